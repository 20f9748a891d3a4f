"""A microbatch weighs as much as it has targets, or as their classes weigh, whatever views a loss passes through on its
way out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classes
from harness import TOLERANCE, Run, Subject, errors, oracle_run, parity, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import run_steps, run_threads

PLAIN = OptimizerChoice("sgd", lr=0.0)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda loss: loss,
    "a view and back": lambda loss: loss.view(1).reshape(()),
    "a dim and back": lambda loss: loss.unsqueeze(0).squeeze(0),
    "flat": lambda loss: loss.flatten().squeeze(),
    "like itself": lambda loss: loss.view_as(loss).contiguous().clone(),
}


class Scores(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.end, self.layer = end, nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(F.cross_entropy(self.layer(x), y))


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_of_unequal_targets(name: str) -> None:
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, -100, -100, -100, -100, 1])
    one = Subject(Scores(LOSSES[name]), {"x": x, "y": y})
    parity(one, dp=2, microbatches=2)
    assert one.trace.sums is not None


class Pooled(nn.Module):
    """Scores of the batch as a whole, whose targets every rank has."""

    wanted: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("wanted", torch.tensor([1, -100, 2]))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.layer(x).mean(0)
        return F.cross_entropy(torch.stack([pooled, pooled * 2, pooled.sin()]), self.wanted)


def test_targets_that_every_rank_has() -> None:
    one = Subject(Pooled(), {"x": torch.randn(8, 4)})
    assert one.trace.sums is None and not one.trace.cuts_batch
    for dp in (2, 3):
        parity(one, dp=dp)


class Centred(nn.Module):
    """Rows meet before a mean cross-entropy: each microbatch is a batch of its own, which weighs by its targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x)
        return F.cross_entropy(self.out((hidden - hidden.mean(0)).tanh()), y)


@pytest.mark.parametrize("labels", [[0, 1, 2, -100, -100, -100, 2, 1], [0, 1, 2, 1, -100, -100, -100, -100]])
def test_batches_of_their_own_weigh_by_their_targets(labels: list[int]) -> None:
    """Of the second labels one microbatch has no target: it weighs nothing."""
    one = Subject(Centred(), {"x": torch.randn(8, 4), "y": torch.tensor(labels)})
    assert one.trace.weighs_targets and one.trace.meets == ("the loss (sub)",)
    for dp in (1, 2, 3):
        parity(one, dp=dp, microbatches=2)


class Root(nn.Module):
    """Rows meet in a loss that is no mean: its microbatches weigh by their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean().sqrt()


def test_batches_of_their_own_weigh_by_their_rows() -> None:
    one = Subject(Root(), {"x": torch.randn(7, 4)})
    assert not one.trace.cuts_batch and not one.trace.weighs_targets
    for dp in (1, 2):
        parity(one, dp=dp, microbatches=3)


# ---- weights of classes ----------------------------------------------------------------------------------------------

CLASSES = 4
WEIGHTS = torch.tensor([1.0, 9.0, 0.0, 0.5])


class Weighted(nn.Module):
    """A mean cross-entropy, of tokens, by weights of its classes that come from wherever ``how`` gets them."""

    weights: Tensor

    def __init__(self, how: str, smoothing: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.smoothing, self.table, self.head = how, smoothing, nn.Embedding(7, 8), nn.Linear(8, CLASSES)
        self.register_buffer("weights", WEIGHTS)
        self.chances = nn.Parameter(torch.tensor([0.3, 0.9, 0.2, 0.4]), requires_grad=False)

    def weight(self, counts: Tensor) -> Tensor:
        match self.how:
            case "a frozen parameter":
                return self.chances.exp()
            case "of another parameter":
                return self.head.bias.detach().exp()
            case "a constant":
                return WEIGHTS.to(self.table.weight.dtype)
            case "a field":
                return counts.to(self.table.weight.dtype).mean(0)
        return self.weights

    def forward(self, ids: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        scores, weight = self.head(self.table(ids).tanh() * 3), self.weight(counts)
        if self.how == "log-probabilities":
            return F.nll_loss(scores.log_softmax(-1).mT, labels, weight)
        if self.how == "an ignored class":
            return F.cross_entropy(
                scores.mT, labels.clamp(min=0), weight, ignore_index=1, label_smoothing=self.smoothing
            )
        if self.how == "of a view":
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight).view(1)
        return F.cross_entropy(scores.mT, labels, weight, label_smoothing=self.smoothing)


def fields(rows: int = 6) -> dict[str, Tensor]:
    """Targets of rows differ in weight and number; the third row has none, and the last only some of no weight."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (rows, 3), generator=generator)
    labels[0], labels[1, 1:], labels[2], labels[-1] = 1, -100, -100, 2
    counts = torch.tensor([1, 5, 2, 3]).expand(rows, CLASSES).contiguous()  # a class's weight is the same in all rows
    return {"ids": torch.randint(0, 7, (rows, 3), generator=generator), "labels": labels, "counts": counts}


HOW = [
    "a buffer",
    "a frozen parameter",
    "of another parameter",
    "a constant",
    "a field",
    "log-probabilities",
    "of a view",
    "an ignored class",
]


def check(truth: Run, ours: Run) -> None:
    """The same loss and gradients as of the whole batch."""
    found = errors(ours, truth)
    assert max(found.values()) <= TOLERANCE, found


def first_step(compiled: Compiled, subject: Subject) -> Run:
    """What the ranks of any plan have after a step."""
    step = run_threads(compiled, lambda comm: run_steps(compiled, comm, [subject.batch], PLAIN, None, 0))[0][0]
    return Run([step.loss], step.gradients, {})


@pytest.mark.quick(1)
@pytest.mark.few(9)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("how", HOW)
def test_microbatches_and_ranks_do_not_change_a_mean_over_weights_of_classes(how: str, smoothing: float) -> None:
    """Against the plain module on the whole batch, not the oracle, which has to find the same by its own means."""
    subject = Subject(Weighted(how, smoothing), fields())
    truth = plain_run(subject)
    for microbatches in (1, 2, 3, 6):
        check(truth, oracle_run(subject, microbatches))
        for dp in (1, 2, 3):
            check(truth, sharded_run(subject, dp, microbatches))
    assert subject.trace.opaque is None and subject.trace.sums is not None


def test_another_mean_over_nothing_is_not_a_number() -> None:
    """A cross-entropy that is not the loss, as on one device."""
    module = Scores(lambda loss: loss * 2)
    x, y = torch.randn(4, 4), torch.full((4,), -100)
    subject = Subject(module, {"x": x, "y": y})
    assert all(math.isnan(run.losses[0]) for run in (oracle_run(subject), sharded_run(subject, 2)))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("name", "microbatches"), [("weights", 2), ("dims, all", 3), ("nll, dims", 2), ("nll, dims", 3)]
)
def test_where_ranks_share_the_classes(name: str, microbatches: int, tp: int) -> None:
    """No rank has all the scores of a row; the batch axis is beside it."""
    module, batch = classes.made(name, 31)
    subject = Subject(copy.deepcopy(module), batch)
    truth = plain_run(subject)
    plan = Plan.of(precision="fp64", mesh=Mesh(()), microbatches=microbatches)
    one = Compiled(subject.module, plan, subject.batch)
    for dp, kind in ((1, "1d"), (2, "1d"), (1, "1d-sp")):
        compiled = one.under(tensor_parallel(data_parallel(plan, dp), tp, kind))
        check(truth, first_step(compiled, subject))


class Staged(Weighted):
    """The same behind blocks, which stages of a pipeline share."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).mT, labels, self.weight(counts))


@pytest.mark.parametrize("how", ["a buffer", "a field", "of another parameter"])
def test_stages_weigh_the_same_or_refuse(how: str) -> None:
    """Every stage needs the weights of the microbatches, and only one may have the parameter that they follow from."""
    plan = pipeline(Plan.of(precision="fp64", mesh=Mesh(()), microbatches=3), 2)
    subject = Subject(Staged(how), fields())
    compiled = Compiled(subject.module, plan, subject.batch)
    if how == "of another parameter":
        with pytest.raises(ConfigError, match="counts its targets with head.bias, which one stage has"):
            compiled.programs(compiled.general, 3)
    else:
        check(plain_run(subject), first_step(compiled, subject))
