"""Large tensors are drawn in pieces: the same values to the bit, and never the whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Values, record
from shardwise.core.layout import Box
from shardwise.graph.torch_private import TorchDispatchMode
from shardwise.initial import pieces


class Table(nn.Module):
    """A parameter of any shape and dtype, and what its initialisation does."""

    def __init__(self, shape: tuple[int, ...], write: Callable[[Tensor], object], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            write(self.weight)


def padded(x: Tensor) -> None:
    x.normal_(0, 0.02)
    x[37].fill_(0)
    x[-1].zero_()


def shifted(x: Tensor) -> None:
    x.uniform_(-1, 2)
    x.mul_(0.5).add_(3).clamp_(2.6, 3.9)


def twice(x: Tensor) -> None:
    x.normal_()
    x.view(-1)[3:].mul_(2)
    x.uniform_()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda x: nn.init.normal_(x, 1, 3), "uniform": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "padded": padded, "shifted": shifted, "twice": twice, "ones": nn.init.ones_,
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shape", [(401, 3), (160, 5), (97, 4, 2), (1000, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pieces_are_the_whole(
    write: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    recorded = record(lambda: Table(shape, WRITES[write], dtype))
    assert recorded.reason is None
    whole, found = recorded.materialise("weight", 5, "cpu"), list[Tensor]()
    for first, piece in recorded.pieces("weight", 5):
        assert first == sum(len(one) for one in found)
        found.append(piece.clone())
    assert len(found) >= 3
    assert torch.equal(torch.cat(found), whole)
    values = Values.of_recorded(recorded, 5)
    box = Box((33, *[0] * (len(shape) - 2), 0), (90, *shape[1:-1], max(1, shape[-1] - 1)))
    out = torch.full(box.shape, torch.nan, dtype=torch.float64)
    values.copy_boxes("weight", [(box, out)])
    assert torch.equal(out, whole[box.slices].double())


def sampled(x: Tensor) -> None:
    x.copy_(torch.rand(x.shape))


def truncated(x: Tensor) -> None:
    nn.init.trunc_normal_(x)


def by_rows(x: Tensor) -> None:
    x[: len(x) // 2].normal_()
    x[len(x) // 2 :].uniform_()


def orthogonal(x: Tensor) -> None:
    nn.init.orthogonal_(x)


def raised(x: Tensor) -> None:
    x.uniform_().pow_(1.7)


def scaled_and_added(x: Tensor) -> None:
    x.normal_().add_(0.3, alpha=0.7)


def across(x: Tensor) -> None:
    x.normal_()
    x.t().mul_(2)


@pytest.mark.parametrize("write", [sampled, truncated, by_rows, orthogonal, across, raised, scaled_and_added])
def test_what_cannot_be_done_in_pieces_is_done_whole(
    write: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    recorded = record(lambda: Table((401, 3), write, torch.float32))
    ((first, whole),) = recorded.pieces("weight", 2)
    assert first == 0
    assert torch.equal(whole, recorded.materialise("weight", 2, "cpu"))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return found


def test_a_part_of_a_large_tensor_is_made_without_the_whole() -> None:
    """For tables larger than what one rank or server has room for."""
    rows, width = 4_000_000, 8
    values = Values.of_recorded(record(lambda: nn.Embedding(rows, width, padding_idx=3)), 0)
    out = torch.empty(1000, width)
    with Largest() as largest:
        values.copy_boxes("weight", [(Box((3_000_000, 0), (3_001_000, width)), out)])
    assert largest.nbytes <= 2 * pieces.PIECE * 4 < rows * width * 4 // 10
    assert abs(out.std() - 1) < 0.05
