"""What a model that cannot be captured writes to its buffers is found by trial, or the plan is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
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
    """A branch on values keeps it from being captured, and ``locals()`` the branch from running as a part."""

    kept: Tensor

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.first, self.out = write, nn.Linear(4, 3), nn.Linear(3, 1)
        self.register_buffer("kept", torch.full((3,), -2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if bool((h > 100).any()) and locals():
            h = h * 2
        out = self.out(h + self.kept).squeeze(-1)
        self.kept = self.write(self.kept, h)
        return F.mse_loss(out, y)


def batch(rows: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 4), "y": torch.randn(rows)}


@pytest.mark.quick(3)
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


class Later(Branching):
    """It writes to the buffer in some steps, or when values are small, and not in the trial."""

    steps: Tensor

    def __init__(self, write: Write, when: Callable[[Later, Tensor], bool], add: bool = False) -> None:
        super().__init__(write)
        self.when, self.data = when, add
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        h = self.first(x).tanh()
        out = self.out(h + self.kept).squeeze(-1)
        if self.when(self, x) and self.data:
            self.kept.data.copy_(self.write(self.kept, h))  # torch counts no write
        elif self.when(self, x):
            self.kept = self.write(self.kept, h)
        return F.mse_loss(out, y)


LATER: dict[str, Callable[[Later, Tensor], bool]] = {
    "every third step": lambda m, x: int(m.steps) % 3 == 0,
    "small values": lambda m, x: bool(m.first(x).sub(m.first.bias).abs().max() < 0.01),  # no value of the batch
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize(("dp", "microbatches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", LATER)
def test_a_buffer_that_a_later_forward_writes(name: str, dp: int, microbatches: int, data: bool) -> None:
    """The trial has not seen it: what is no longer the same for all rows is refused then, by all ranks."""
    for write, same in ((WRITES["the last mean"][0], False), (WRITES["a counter"][0], True)):
        subject = Subject(Later(write, LATER[name], data), batch(8))
        assert subject.trace.opaque is not None and not subject.trace.unknown_buffers
        sharded_run(subject, dp, microbatches, steps=2)
        subject.batch["x"] *= 1e-3 if name == "small values" else 1
        if same or (dp, microbatches) == (1, 1):
            ours = sharded_run(subject, dp, microbatches, steps=3)
            truth = copy.deepcopy(subject.module)
            for _ in range(3):
                truth(**subject.batch)
            torch.testing.assert_close(ours.state["kept"], truth.kept, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            with pytest.raises(
                ShardwiseError, match="writes to the buffer kept what depends on a rank's or microbatch"
            ):
                sharded_run(subject, dp, microbatches, steps=3)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dp", "microbatches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["a counter", "a moving average", "a largest value"])
def test_what_evaluations_write(name: str, dp: int, microbatches: int) -> None:
    """A forward that writes in evaluation mode, too, does so as on one device, or is refused."""
    write, kind = WRITES[name]
    subject = Subject(Branching(lambda kept, h: write(kept, h) if not h.requires_grad else kept), batch(8))
    compiled = subject.compile(dp, microbatches, "none")

    def rank(comm: ThreadCommunicator) -> tuple[list[float], Tensor]:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0, momentum=0.0), strict=True)
        spans = rank_rows(8, microbatches, dp, comm.rank)
        mine = {k: v[[i for a, b in spans for i in range(a, b)]] for k, v in subject.batch.items()}
        return [float(engine.evaluate(mine, 8).loss) for _ in range(2)], engine.state_dict()["kept"]

    if not kind and (dp, microbatches) != (1, 1):
        with pytest.raises(ConfigError, match="the buffer kept is neither the same for all rows"):
            run_ranks(compiled.plan.mesh, rank)
        return
    truth = copy.deepcopy(subject.module).eval()
    with torch.no_grad():
        losses = [float(truth(**subject.batch)) for _ in range(2)]
    for ours, kept in run_ranks(compiled.plan.mesh, rank):
        assert ours == pytest.approx(losses, rel=TOLERANCE)
        torch.testing.assert_close(kept, truth.kept, rtol=TOLERANCE, atol=TOLERANCE)


ILLEGAL: dict[str, tuple[Write, str]] = {
    "another shape": (lambda kept, h: torch.cat([kept[-2:], h.detach().mean(0)]), "a tensor of shape"),
    "a gradient": (lambda kept, h: h.mean(0), "a tensor with a gradient"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_is_no_value_of_a_buffer(name: str) -> None:
    write, message = ILLEGAL[name]
    with pytest.raises(ConfigError, match=f"forward assigns {message}.* to the buffer kept; legal: "):
        assert Subject(Branching(write), batch()).trace


def test_an_example_of_equal_rows() -> None:
    """A mean over equal rows is the mean over some of them: others show what it is."""
    module = Branching(WRITES["the last mean"][0])
    subject = Subject(module, {k: v[:1].expand(4, *v.shape[1:]).clone() for k, v in batch().items()})
    assert subject.trace.added == {"kept"} and not subject.trace.unknown_buffers
    subject.batch = {k: v.double() for k, v in batch().items()}
    found = errors(sharded_run(subject, 2, 2), plain_run(subject))
    assert max(found.values()) <= TOLERANCE, found


class NormInBranch(nn.Module):
    """Ranks whose rows are large normalise them, others do not; all do so once more if it is ``always``."""

    def __init__(self, always: bool, tracks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.out, self.always = nn.Linear(4, 3), nn.Linear(3, 1), always
        self.norm = nn.BatchNorm1d(3, track_running_stats=tracks)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if float((x > 100).sum()) > 0 and locals():  # no part may run as written: the model is not captured
            h = self.norm(h)
        h = self.norm(h) if self.always else h
        return F.mse_loss(self.out(h).squeeze(-1), y)


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("large", [[True, False], [False, True]])
def test_a_batchnorm_in_a_branch_raises_and_does_not_hang(large: list[bool], always: bool, tracks: bool) -> None:
    given = batch(8)
    subject = Subject(NormInBranch(always, tracks), given)
    sharded_run(subject, 2)  # all ranks take the same branch
    for half, one in zip((slice(0, 4), slice(4, 8)), large, strict=True):
        subject.batch["x"][half] += 1000.0 * one
    with pytest.raises(ShardwiseError, match=r"a BatchNorm that trains runs on some ranks and not on others"):
        sharded_run(subject, 2)
