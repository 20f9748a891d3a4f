"""Ranks exchange these messages while a checkpoint is written, and rank 0 commits it at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Box

from .atoms import DTYPES, Piece, dtype_name
from .container import Entry, HashedFile
from .folder import MANIFEST, free_name, publish, sync_folder
from .manifest import FileRecord, Manifest, Stored, TensorRecord

SLACK = 1 << 20  # bytes that have to be free for headers and the manifest, besides the values


@dataclass(frozen=True)
class Message:
    """This is sent as JSON."""

    def to_bytes(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what :meth:`to_bytes` returned."""
        return cls(**json.loads(data))


@dataclass(frozen=True)
class ReadyCheckpoint(Message):
    """Each rank sends this before it writes: its bytes, the free bytes of its disk, and why it cannot write (or
    None)."""

    step: int
    nbytes: int
    free: int
    error: str | None


def refusal(ranks: Sequence[ReadyCheckpoint]) -> str | None:
    """Return why no rank should begin to write, or None; all ranks see the same messages and so return the same."""
    for rank, ready in enumerate(ranks):
        if ready.error is not None:
            return f"rank {rank}: {ready.error}"
        if ready.step != ranks[0].step:
            return f"rank {rank} saves step {ready.step}, rank 0 step {ranks[0].step}"
    needed, free = sum(ready.nbytes for ready in ranks) + SLACK, min(ready.free for ready in ranks)
    return f"no space left: it needs {needed:,} bytes, {free:,} are free" if needed > free else None


@dataclass(frozen=True)
class RankRecord(Message):
    """Each rank sends this after it has written: its file (None where it had nothing to write) and the pieces in it.

    A piece is [tensor, shape, dtype, key or None, start, stop]; a piece without elements has no key.
    """

    file: str | None
    nbytes: int
    sha256: str
    pieces: list[list[Any]]
    error: str | None

    @staticmethod
    def of(
        pieces: Sequence[Piece], entries: Sequence[Entry], file: str | None, nbytes: int, sha256: str, error: str | None
    ) -> RankRecord:
        """Make the record of a rank from its pieces, those in the file first, and their entries in the file."""
        keys = [entry.key for entry in entries] + [None] * (len(pieces) - len(entries))
        described = [
            [one.name, list(one.shape), dtype_name(one.tensor.dtype), key, list(one.box.start), list(one.box.stop)]
            for one, key in zip(pieces, keys, strict=True)
        ]
        return RankRecord(file, nbytes, sha256, described, error)


@dataclass(frozen=True)
class End(Message):
    """Rank 0 sends this at the end: the checkpoint's ``path`` or an ``error``, and the bytes of all ranks' files."""

    path: str | None
    error: str | None
    nbytes: int


def commit(folder: Path, part: Path, step: int, meta: Mapping[str, Any], records: Sequence[RankRecord]) -> Path:
    """Write the manifest into ``part``, make it a checkpoint of ``folder`` and return its path.

    Raises:
        ShardwiseError: a rank failed, or the pieces of all ranks do not tile every tensor.
        OSError: the disk refuses a write.
    """
    for rank, record in enumerate(records):
        if record.error is not None:
            raise ShardwiseError(f"rank {rank}: {record.error}")
    files = {one.file: FileRecord(one.nbytes, one.sha256) for one in records if one.file is not None}
    manifest = Manifest(step, len(records), meta, files, _tensors(records))
    wrong = manifest.fault()
    if wrong:
        raise ShardwiseError(f"the pieces of all ranks are no whole checkpoint: {wrong}")
    with HashedFile(part / MANIFEST) as file:
        file.write(manifest.to_bytes())
        file.sync()
    path = free_name(folder, step)
    publish(part, path)
    sync_folder(folder.parent)  # the first checkpoint has made the folder
    return path


def _tensors(records: Sequence[RankRecord]) -> dict[str, TensorRecord]:
    """Return the records of all tensors, put together from the pieces of all ranks."""
    heads: dict[str, tuple[tuple[int, ...], str]] = {}
    stored: dict[str, list[Stored]] = {}
    for rank, record in enumerate(records):
        for name, shape, dtype, key, start, stop in record.pieces:
            head = heads.setdefault(name, (tuple(shape), dtype))
            if head != (tuple(shape), dtype):
                raise ShardwiseError(
                    f"tensor {name!r} is {dtype} {shape} on rank {rank}, {head[1]} {list(head[0])} on another"
                )
            boxes = stored.setdefault(name, [])
            if key is not None and record.file is not None:
                boxes.append(Stored(record.file, key, Box(tuple(start), tuple(stop))))
    return {name: TensorRecord(shape, DTYPES[dtype], tuple(stored[name])) for name, (shape, dtype) in heads.items()}
