"""What a model that cannot be captured writes to its buffers is found by trial, or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import verify

Write = Callable[[Tensor, Tensor], Tensor]

WRITES: dict[str, tuple[Write, str]] = {
    "a counter": (lambda kept, h: kept + 1, "same"),
    "nothing": (lambda kept, h: kept * 1, "same"),
    "a number of rows": (lambda kept, h: kept + len(h), "sum"),
    "a sum": (lambda kept, h: kept + h.detach().sum(0), "sum"),
    "a moving average": (lambda kept, h: 0.9 * kept + 0.1 * h.detach().mean(0), "mean"),
    "the last mean": (lambda kept, h: h.detach().mean(0), "mean"),
    "a largest value": (lambda kept, h: torch.maximum(kept, h.detach().amax(0)), ""),
}


class Branching(nn.Module):
    """A branch on values keeps it from being captured."""

    kept: Tensor

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.first, self.out = write, nn.Linear(4, 3), nn.Linear(3, 1)
        self.register_buffer("kept", torch.full((3,), -2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if bool((h > 100).any()):
            h = h * 2
        out = self.out(h + self.kept).squeeze(-1)
        self.kept = self.write(self.kept, h)
        return F.mse_loss(out, y)


def batch(rows: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows)}


@pytest.mark.parametrize("name", [name for name, (_, kind) in WRITES.items() if kind])
@pytest.mark.parametrize(("dp", "microbatches"), [(1, 3), (2, 1), (2, 2), (3, 3)])
def test_buffers_are_those_of_the_whole_batch(name: str, dp: int, microbatches: int) -> None:
    """Uneven rows; each microbatch and each rank reads what the buffer held when the batch began."""
    subject = Subject(Branching(WRITES[name][0]), batch())
    assert subject.trace.opaque is not None
    found = errors(sharded_run(subject, dp, microbatches), plain_run(subject))
    assert max(found.values()) <= TOLERANCE, found


def test_over_several_steps() -> None:
    for name in ("a moving average", "a sum", "a counter"):
        module = Branching(WRITES[name][0])
        report = verify(module, [batch(7), batch(5)], Plan.of(Mesh.of(dp=2), microbatches=2))
        assert report.passed, (name, report.worst[:3])


def test_ranks_without_rows() -> None:
    subject = Subject(Branching(WRITES["a sum"][0]), batch(2))
    found = errors(sharded_run(subject, 3), plain_run(subject))
    assert max(found.values()) <= TOLERANCE, found


def test_what_nobody_knows_is_refused() -> None:
    module = Branching(WRITES["a largest value"][0])
    one = Subject(module, batch())
    assert max(errors(sharded_run(one, 1), plain_run(one)).values()) <= TOLERANCE
    for options in ({"mesh": Mesh.of(dp=2)}, {"microbatches": 2}):
        plan = Plan.of(precision="fp64", **options)
        subject = Compiled(module, plan, one.batch)
        with pytest.raises(ConfigError, match=r"the buffer kept is neither the same for all rows nor a sum or a mean"):
            subject.programs(subject.general, plan.microbatches)


class NormInBranch(nn.Module):
    """Ranks whose rows are large normalise them, others do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.out = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if bool((x > 100).any()):
            h = self.norm(h)
        h = self.norm(h) if len(x) else h
        return F.mse_loss(self.out(h).squeeze(-1), y)


@pytest.mark.parametrize("large", [[True, False], [False, True]])
def test_a_batchnorm_in_a_branch_raises_and_does_not_hang(large: list[bool]) -> None:
    given = batch(8)
    subject = Subject(NormInBranch(), given)
    sharded_run(subject, 2)  # all ranks take the same branch
    for half, one in zip((slice(0, 4), slice(4, 8)), large, strict=True):
        subject.batch["x"][half] += 1000.0 * one
    with pytest.raises(ShardwiseError, match=r"a BatchNorm that trains runs on some ranks and not on others"):
        sharded_run(subject, 2)
