"""The loss of a model that cannot be captured: what it is of its rows is found by trial, or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    """A branch on values keeps it from being captured, and ``locals()`` the branch from running as a part."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.out = body, nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm: nn.Module = nn.Dropout(0.0)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(self.norm(self.first(x)).tanh())
        if bool((scores > 100).any()) and locals():
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


@pytest.mark.quick(2)
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


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_trial_can_tell_is_refused(name: str) -> None:
    model = Branching(UNKNOWN[name])
    for changes in ({"mesh": Mesh.of(dp=2)}, {"microbatches": 2}):
        one = Compiled(model, Plan.of(**changes), batch())
        with pytest.raises(ConfigError, match="model.loss_weight: the model was not captured, and a trial") as error:
            one.programs(one.general, one.plan.microbatches)
        assert '"targets:FIELD"' in str(error.value)
    subject = Subject(model, batch())
    assert max(errors(sharded_run(subject, 1), plain_run(subject)).values()) <= TOLERANCE


PLANS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def right_on_all_plans(model: nn.Module, given: Mapping[str, Tensor], kind: str) -> None:
    """The trial finds ``kind``, and every plan has the numbers of plain PyTorch on the whole batch."""
    subject = Subject(model, given)
    assert f"its loss is {kind}, as a trial showed" in subject.trace.notes, subject.trace.notes
    truth = plain_run(subject)
    for dp, microbatches in PLANS:
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


def right_on_one_or_refused(model: nn.Module, given: Mapping[str, Tensor], message: str = "model.loss_weight") -> None:
    """One device has the numbers of plain PyTorch; several ranks or microbatches are refused."""
    subject = Subject(model, given)
    assert subject.trace.opaque is not None
    assert max(errors(sharded_run(subject, 1), plain_run(subject)).values()) <= TOLERANCE
    for dp, microbatches in PLANS[1:]:
        with pytest.raises(ConfigError, match=message):
            sharded_run(subject, dp, microbatches)


class Training(Branching):
    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError("no loss in evaluation mode")
        return super().forward(x, y, lengths)


def test_a_forward_without_a_loss_in_evaluation_mode() -> None:
    right_on_all_plans(Training(LOSSES["a sum"][0]), batch(), "a sum over rows")


class SumInTraining(Branching):
    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        loss = super().forward(x, y, lengths)
        return loss if self.training else loss / len(x)


class PenaltyInTraining(Branching):
    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        loss = super().forward(x, y, lengths)
        return loss + 0.1 * x.square().mean().sqrt() * self.out.weight.square().sum() if self.training else loss


def test_a_loss_that_is_another_in_training() -> None:
    right_on_all_plans(SumInTraining(LOSSES["a sum"][0]), batch(), "a sum over rows")
    subject = Subject(SumInTraining(LOSSES["a sum"][0]), batch(), training=False)
    assert "its loss is a mean over rows, as a trial showed" in subject.trace.notes
    right_on_one_or_refused(PenaltyInTraining(LOSSES["a mean over rows"][0]), batch())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [True, False])
def test_random_numbers_of_each_row_or_of_all(rows: bool) -> None:
    """A part of the trial's batch draws what its rows draw in the whole."""

    def noisy(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
        return (z * torch.rand_like(z if rows else z[0])).square().sum()

    subject = Subject(Branching(noisy), batch())
    assert "its loss is a sum over rows, as a trial showed" in subject.trace.notes
    one = sharded_run(subject, 1)
    for dp, microbatches in PLANS[1:]:
        assert max(errors(sharded_run(subject, dp, microbatches), one).values()) <= TOLERANCE, (dp, microbatches)
    assert verify(Branching(noisy), [batch()], Plan.of(Mesh.of(dp=2), microbatches=2)).passed


def ones(dtype: torch.dtype) -> dict[str, Tensor]:
    return batch() | {"lengths": torch.ones(8, dtype=dtype)}


def per_row(z: Tensor) -> Tensor:
    return z.square().mean(1)


MASKED: dict[str, tuple[Body, dict[str, Tensor]]] = {
    "a float mask": (lambda z, y, n: (per_row(z) * n).sum() / n.sum(), ones(torch.float64)),
    "a bool mask": (lambda z, y, n: (per_row(z) * n).sum() / n.sum(), ones(torch.bool)),
    "an int mask": (lambda z, y, n: (per_row(z) * n).sum() / n.sum(), ones(torch.int64)),
    "selected": (lambda z, y, n: per_row(z)[n > 0.5].mean(), ones(torch.float64)),
    "weights": (lambda z, y, n: (per_row(z) * (n / n.sum())).sum(), ones(torch.float64)),
    "numbers that are missing": (lambda z, y, n: per_row(z)[~n.isnan()].mean(), ones(torch.float64)),
    "a mark for what is missing": (lambda z, y, n: per_row(z)[n != -999.0].mean(), ones(torch.float64)),
    "the first class": (
        lambda z, y, n: F.cross_entropy(z, y, ignore_index=0),
        batch() | {"y": torch.tensor([1, 2] * 4)},
    ),
    "a large number": (
        lambda z, y, n: F.cross_entropy(z, y, ignore_index=255),
        batch() | {"y": torch.tensor([0, 1, 2, 0, 1, 2, 1, 2])},
    ),
    "a class, evenly": (
        lambda z, y, n: F.cross_entropy(z, y, ignore_index=2),
        batch() | {"y": torch.tensor([0, 2, 0, 2, 1, 2, 1, 2])},
    ),
    "weights of classes": (
        lambda z, y, n: F.cross_entropy(z, y, weight=torch.tensor([1.0, 2.0, 3.0]).to(z)),
        batch() | {"y": torch.zeros(8, dtype=torch.int64)},
    ),
    "the weight of a class that the example lacks": (
        lambda z, y, n: F.cross_entropy(z, y, weight=torch.tensor([1.0, 1.0, 3.0]).to(z)),
        batch() | {"y": torch.tensor([0, 1] * 4)},
    ),
    "a table of classes that count": (
        lambda z, y, n: (per_row(z) * torch.tensor([1, 1, 0]).to(z)[y]).sum() / torch.tensor([1, 1, 0]).to(z)[y].sum(),
        batch() | {"y": torch.tensor([0, 1] * 4)},
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MASKED)
def test_masks_that_the_example_does_not_use(name: str) -> None:
    body, given = MASKED[name]
    right_on_one_or_refused(Branching(body), given)


class Zeros(Branching):
    """The scores of a last layer of zeros are equal for all rows, whatever these are."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


def test_layers_of_zeros() -> None:
    right_on_all_plans(Zeros(LOSSES["a mean over targets"][0]), batch(), "a mean over the targets of y")
    right_on_one_or_refused(Zeros(lambda z, y, n: (1 + z.square().mean()).sqrt()), batch())


def like(value: int, rows: int) -> dict[str, Tensor]:
    return {
        "x": torch.full((rows, 4), float(value)),
        "y": torch.full((rows,), value),
        "lengths": torch.ones(rows).long(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("value", [0, 1])
def test_examples_of_equal_or_few_rows(value: int, rows: int) -> None:
    right_on_one_or_refused(Branching(UNKNOWN["a root"]), like(value, rows))
    right_on_one_or_refused(Branching(UNKNOWN["contrastive"]), like(value, rows))
    subject = Subject(Branching(LOSSES["a mean over targets"][0]), like(value, rows))
    assert "its loss is a mean over the targets of y, as a trial showed" in subject.trace.notes


class Fixed(Branching):
    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.norm = nn.Identity()  # what draws no random numbers need not take other numbers of rows

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x, y, lengths) if len(x) == 8 else x.view(8, 4).sum()


def test_why_a_trial_fails() -> None:
    notes = Subject(Fixed(LOSSES["a sum"][0]), batch()).trace.notes
    assert any("what its loss is of its rows is not known, for a trial failed: model: its forward fails" in n
               and "test_loss_weight.py" in n for n in notes), notes  # fmt: skip
    right_on_one_or_refused(Fixed(LOSSES["a sum"][0]), batch())


def test_what_a_trial_costs() -> None:
    """It runs as many rows as some fifteen forwards of an example of 32 rows."""
    rows = list[int]()

    def counting(z: Tensor, y: Tensor, n: Tensor) -> Tensor:
        rows.append(len(z))
        return F.cross_entropy(z, y)

    given = {k: v.repeat(4, *(1 for _ in v.shape[1:])) for k, v in batch().items()}
    assert Subject(Branching(counting), given).trace.opaque is not None
    assert sum(rows) <= 16 * 32, rows


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


class Together(Branching):
    """It decides by the sum over all rows."""

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        scores = self.out(self.first(x).tanh())
        if bool((x * self.first.weight.square().mean()).sum() > 0) and locals():
            scores = scores * 2
        return scores.square().mean()


def test_rows_that_decide_together_are_refused() -> None:
    """Those of the example have one sign, so each part of them decides as all do; others would not."""
    given = {**batch(), "x": torch.rand(8, 4)}
    with pytest.raises(ConfigError, match="model.loss_weight: the model was not captured, and a trial did not show"):
        sharded_run(Subject(Together(LOSSES["a sum"][0]), given), 2)
