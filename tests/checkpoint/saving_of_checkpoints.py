"""What the tests of checkpoints share: ranks as threads, and states split over them as training splits them."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.atoms import Gather, Piece
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.writer import CheckpointWriter, Saved
from shardwise.core.flat import range_boxes
from shardwise.core.layout import Box, shard_range


class Meeting:
    """The gathers of ``ranks`` threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._said: list[bytes] = [b""] * ranks

    def gather(self, rank: int) -> Gather:
        """That of one rank."""

        def gather(data: bytes, everywhere: bool = True) -> list[bytes]:
            self._said[rank] = data
            self._barrier.wait()
            found = list(self._said) if everywhere or rank == 0 else []
            self._barrier.wait()
            return found

        return gather


def whole(name: str, tensor: Tensor) -> Piece:
    """A tensor as one piece."""
    shape = tuple(tensor.shape)
    return Piece(name, shape, Box.whole(shape), tensor)


def flat_pieces(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[Piece]:
    """What ``rank`` holds if the tensors lie end to end and each rank has an equal range; values are views."""
    found = []
    total = sum(tensor.numel() for tensor in tensors.values())
    start, stop = shard_range(total, ranks, rank)
    offset = 0
    for name, tensor in tensors.items():
        if not tensor.numel() and rank == 0:
            found.append(whole(name, tensor))
        for box in range_boxes(tuple(tensor.shape), max(start - offset, 0), min(stop - offset, tensor.numel())):
            found.append(Piece(name, tuple(tensor.shape), box, tensor[box.slices]))
        offset += tensor.numel()
    return found


def cut_pieces(tensors: Mapping[str, Tensor], rank: int, ranks: int, seed: int) -> list[Piece]:
    """Random boxes: each tensor is cut at random places of each dim, and the boxes dealt to random ranks; values are
    strided views.
    """
    found = []
    for number, (name, tensor) in enumerate(tensors.items()):
        generator = random.Random(seed * 1000 + number)
        boxes = [Box.whole(tensor.shape)]
        for dim in range(tensor.dim()):
            cut = generator.randint(0, tensor.shape[dim])
            boxes = [part for box in boxes for part in _split(box, dim, cut)]
        owners = [generator.randrange(ranks) for _ in boxes]
        mine = [box for box, owner in zip(boxes, owners, strict=True) if owner == rank]
        found += [Piece(name, tuple(tensor.shape), box, tensor[box.slices]) for box in mine]
    return found


def _split(box: Box, dim: int, cut: int) -> list[Box]:
    stop, start = list(box.stop), list(box.start)
    stop[dim] = start[dim] = cut
    parts = [Box(box.start, tuple(stop)), Box(tuple(start), box.stop)]
    return [part for part in parts if part.numel] or [box]


def state(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of all kinds that training has: weights, state, a scalar, generators' bytes, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {
        "model.weight": torch.randn(7, 5, 3, generator=generator),
        "model.bias": torch.randn(11, generator=generator),
        "model.half": torch.randn(13, 3, generator=generator).bfloat16(),
        "optimizer.weight.exp_avg": torch.randn(7, 5, 3, generator=generator),
        "optimizer.weight.exp_avg_sq": torch.rand(7, 5, 3, generator=generator).double(),
        "optimizer.step": torch.tensor(float(seed)),
        "model.mask": torch.rand(9, generator=generator) > 0.5,
        "model.empty": torch.empty(0, 4),
        "rng.rank0": generator.get_state()[:200].clone(),
    }
    return found


def on_ranks(ranks: int, work: Callable[[int, Gather], Any]) -> list[Any]:
    """``work(rank, gather)`` on a thread for each rank."""
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(work, rank, meeting.gather(rank)) for rank in range(ranks)]
        return [future.result() for future in futures]


def save(
    folder: Path,
    step: int,
    pieces: Sequence[Sequence[Piece]],
    meta: Mapping[str, Any] | None = None,
    warned: list[str] | None = None,
    **options: Any,
) -> list[Saved]:
    """Save once on as many ranks as there are lists of pieces; how it ended on each."""

    def work(rank: int, gather: Gather) -> Saved:
        warn = (warned if warned is not None else []).append
        writer = CheckpointWriter(folder, rank, len(pieces), gather, warn=warn, **options)
        writer.save(step, pieces[rank], meta or {})
        writer.wait()
        (saved,) = writer.poll()
        writer.close()
        return saved

    return on_ranks(len(pieces), work)


def load(path: Path, pieces: Sequence[Sequence[Piece]]) -> None:
    """Verify and load on as many ranks as there are lists of pieces."""
    for rank, listed in enumerate(pieces):
        checkpoint = Checkpoint.open(path)
        checkpoint.verify(rank, len(pieces))
        checkpoint.load(listed)


def same(first: Tensor, second: Tensor) -> bool:
    """Bit-equal, of one dtype and shape."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bytes(first.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        second.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


def blank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same kind with other values."""
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def numel(tensors: Mapping[str, Tensor]) -> int:
    """The elements of all tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())
