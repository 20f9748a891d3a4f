"""The loss of a model that cannot be captured: what it is of its rows is found by trial, or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import verify

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Branching(nn.Module):
    """A branch on values keeps it from being captured."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.norm, self.out = body, nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(self.norm(self.first(x)).tanh())
        if bool((scores > 100).any()):
            scores = scores * 2
        return self.body(scores, y, lengths)


def ctc(scores: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    log_probabilities = scores[:, None].expand(-1, 6, -1).log_softmax(-1).transpose(0, 1)
    targets = (y.clamp(min=0) % 2 + 1)[:, None].expand(-1, 2)
    return F.ctc_loss(log_probabilities, targets, torch.full((len(y),), 6), lengths, reduction="sum")


LOSSES: dict[str, tuple[Body, str]] = {
    "a mean over rows": (lambda z, y, n: z.square().mean(), "a mean over rows"),
    "a sum": (lambda z, y, n: z.square().sum(), "a sum over rows"),
    "a mean over targets": (lambda z, y, n: F.cross_entropy(z, y), "a mean over the targets of y"),
    "twice that": (lambda z, y, n: 2 * F.cross_entropy(z, y), "a mean over the targets of y"),
    "a sum over targets": (lambda z, y, n: F.cross_entropy(z, y, reduction="sum"), "a sum over rows"),
    "ctc": (ctc, "a sum over rows"),
}


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    y = torch.tensor([0, 1, -100, -100, -100, 2, 1, 2])
    return {"x": torch.randn(8, 4), "y": y, "lengths": torch.tensor([1, 2] * 4)}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_trial_finds(name: str) -> None:
    body, kind = LOSSES[name]
    subject = Subject(Branching(body), batch())
    assert subject.trace.opaque is not None
    assert f"its loss is {kind}, as a trial showed" in subject.trace.notes
    truth = plain_run(subject)
    for dp, microbatches in ((1, 1), (2, 1), (1, 3), (2, 2), (3, 1)):
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


@pytest.mark.parametrize("name", ["a sum", "a mean over targets"])
def test_under_verify(name: str) -> None:
    report = verify(Branching(LOSSES[name][0]), [batch()] * 2, Plan.of(Mesh.of(dp=2), microbatches=2))
    assert report.passed, report.worst[:3]


def test_targets_that_the_example_does_not_ignore() -> None:
    """The trial tries what the batches to come may have."""
    given = batch() | {"y": torch.tensor([0, 1, 2, 0, 1, 2, 1, 2])}
    subject = Subject(Branching(LOSSES["a mean over targets"][0]), given)
    assert "its loss is a mean over the targets of y, as a trial showed" in subject.trace.notes


UNKNOWN: dict[str, Body] = {
    "contrastive": lambda z, y, n: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    "a root": lambda z, y, n: z.square().mean().sqrt(),
    "weights": lambda z, y, n: (z.square().sum(1) * n).sum() / n.sum(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_trial_can_tell_is_refused(name: str) -> None:
    model = Branching(UNKNOWN[name])
    for changes in ({"mesh": Mesh.of(dp=2)}, {"microbatches": 2}):
        one = Compiled(model, Plan.of(**changes), batch())
        with pytest.raises(ConfigError, match="model.loss_weight: the model was not captured, and how") as error:
            one.programs(one.general, one.plan.microbatches)
        assert '"targets:FIELD"' in str(error.value)
    subject = Subject(model, batch())
    assert max(errors(sharded_run(subject, 1), plain_run(subject)).values()) <= TOLERANCE


class Training(Branching):
    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("no loss in evaluation mode")
        return super().forward(x, y, lengths)


def test_a_forward_without_a_loss_in_evaluation_mode() -> None:
    """No trial can tell of it, which is no reason to refuse it where nothing is divided."""
    subject = Subject(Training(LOSSES["a sum"][0]), batch())
    assert subject.trace.opaque is not None and not subject.trace.divisible
    assert max(errors(sharded_run(subject, 1), plain_run(subject)).values()) <= TOLERANCE


def test_what_the_user_says() -> None:
    model, plan = Branching(UNKNOWN["a root"]), Plan.of(Mesh.of(dp=2))
    assert Compiled(model, plan, batch(), loss_weight="rows").general.divisible
    for wrong in ("columns", "targets:", "targets:x", "rows:y"):
        with pytest.raises(ConfigError, match=r'loss_weight.*legal: "rows", "sum", "targets:y", "targets:lengths"'):
            Compiled(model, plan, batch(), loss_weight=wrong)


class Renormed(Branching):
    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return super().forward(x, y, lengths)


def test_parameters_that_forward_writes_to() -> None:
    with pytest.raises(ConfigError, match="model: forward writes to the parameter out.weight"):
        assert Subject(Renormed(LOSSES["a sum"][0]), batch()).trace


class Averaging(Branching):
    average: Tensor

    def __init__(self) -> None:
        super().__init__(LOSSES["a mean over rows"][0])
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        return super().forward(x, y, lengths)


def test_buffers_that_it_assigns() -> None:
    """On one rank, as one device has them; microbatches write one after the other."""
    subject = Subject(Averaging(), batch())
    assert subject.trace.opaque is not None
    ours = sharded_run(subject, 1, steps=2)
    truth = Averaging().double()
    for _ in range(2):
        truth(**subject.batch)
    torch.testing.assert_close(ours.state["average"], truth.average)
