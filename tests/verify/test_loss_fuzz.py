"""Random losses over a small model: under any plan they are those of the whole batch, or a note names where rows meet.

A loss is a random expression: sums, means, masks, weights and selections of what the model makes of each row, times
numbers and statistics of the fields, and sums of several of them; some also let rows meet in values that depend on
parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, planned_run, sharded_run
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan

CASES = 500
ROWS, TOKENS, CLASSES = 7, 4, 3

Fields = dict[str, Tensor]
Made = dict[str, Tensor]  # what the model makes of the fields: a score of each row and class, and of each token
Expression = Callable[[Made, Fields], Tensor]


def batch(choice: random.Random) -> Fields:
    """Fields of rows whose numbers of targets differ; the first half has hardly any."""
    torch.manual_seed(choice.randrange(1 << 30))
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS))
    labels[torch.rand(ROWS, TOKENS) < 0.4] = -100
    labels[: ROWS // 2, 1:] = -100
    labels[0, 0] = labels[-1, 0] = 1
    return {
        "x": torch.randn(ROWS, 5), "ids": torch.randint(0, 11, (ROWS, TOKENS)), "labels": labels,
        "keep": labels >= 0, "weights": torch.rand(ROWS) + 0.1, "targets": torch.randn(ROWS, CLASSES),
    }  # fmt: skip


# ---- a number for each row or token ----------------------------------------------------------------------------------

EACH: dict[str, Expression] = {
    "square": lambda z, b: (z["rows"] - b["targets"]).square(),
    "distance": lambda z, b: F.smooth_l1_loss(z["rows"], b["targets"], reduction="none"),
    "binary": lambda z, b: F.binary_cross_entropy_with_logits(z["rows"], (b["targets"] > 0).double(), reduction="none"),
    "centred": lambda z, b: (z["rows"] - b["targets"].mean(0)).abs(),
    "divergence": lambda z, b: F.kl_div(z["rows"].log_softmax(-1), b["targets"].softmax(-1), reduction="none"),
}
TOKEN: dict[str, Expression] = {
    "entropy": lambda z, b: F.cross_entropy(z["tokens"].flatten(0, 1), b["labels"].flatten(), reduction="none").view(
        rows_of(b), TOKENS
    ),
    "scores": lambda z, b: z["tokens"].tanh().sum(-1),
    "log": lambda z, b: -z["tokens"].log_softmax(-1).gather(-1, b["labels"].clamp(min=0)[..., None])[..., 0],
}


def rows_of(b: Fields) -> int:
    return b["x"].shape[0]


# ---- what follows from fields alone ----------------------------------------------------------------------------------

NUMBERS: dict[str, Expression] = {
    "mean weight": lambda z, b: b["weights"].mean(),
    "share kept": lambda z, b: b["keep"].double().mean(),
    "targets": lambda z, b: (b["labels"] >= 0).sum(),
    "kept, not none": lambda z, b: b["keep"].sum().clamp(min=1),
    "weights": lambda z, b: b["weights"].sum(),
    "two": lambda z, b: torch.tensor(2.0),
    "tokens": lambda z, b: b["keep"].numel() * torch.ones(()),
    "spread": lambda z, b: b["targets"].var() + 1,
}

# ---- losses ----------------------------------------------------------------------------------------------------------


@dataclass
class Term:
    """A loss, and whether rows meet in it in values that depend on parameters."""

    name: str
    value: Expression
    meets: bool = False


def reduced(choice: random.Random) -> Term:
    """The sum or mean of a number for each row or token, of all, of some, or weighted."""
    tokens = choice.random() < 0.5
    name, each = choice.choice(sorted((TOKEN if tokens else EACH).items()))
    ways: dict[str, Expression] = {
        "mean": lambda z, b: each(z, b).mean(),
        "sum": lambda z, b: each(z, b).sum(),
        "mean of sums": lambda z, b: each(z, b).sum(-1).mean(),
        "sum of means": lambda z, b: each(z, b).mean(-1).sum(),
        "over rows": lambda z, b: each(z, b).sum() / rows_of(b),
        "mean of columns": lambda z, b: each(z, b).mean(0).sum(),
    }
    if tokens:
        ways |= {
            "masked mean": lambda z, b: (each(z, b) * b["keep"]).sum() / b["keep"].sum(),
            "mean of selected": lambda z, b: each(z, b)[b["keep"]].mean(),
            "sum of selected": lambda z, b: each(z, b).masked_select(b["keep"]).sum(),
            "filled": lambda z, b: each(z, b).masked_fill(~b["keep"], 0).sum() / b["keep"].sum().clamp(min=1),
            "mean of rows' means": lambda z, b: (
                (each(z, b) * b["keep"]).sum(1) / b["keep"].sum(1).clamp(min=1)
            ).mean(),
        }
    else:
        ways |= {
            "weighted mean": lambda z, b: (each(z, b).sum(-1) * b["weights"]).sum() / b["weights"].sum(),
            "weights of one": lambda z, b: (each(z, b).sum(-1) * (b["weights"] / b["weights"].sum())).sum(),
            "softmax of weights": lambda z, b: (each(z, b).sum(-1) * b["weights"].softmax(0)).sum(),
            "some rows": lambda z, b: each(z, b)[b["labels"][:, 0] >= 0].mean(),
        }
    how, value = choice.choice(sorted(ways.items()))
    return Term(f"{how} of {name}", value)


def entropy(choice: random.Random) -> Term:
    """A cross-entropy over targets, some of which are ignored."""
    options: dict[str, object] = {"reduction": choice.choice(["mean", "mean", "sum"])}
    if choice.random() < 0.4:
        options["weight"] = torch.tensor([0.3, 2.0, 1.0], dtype=torch.float64)
    if choice.random() < 0.3:
        options["label_smoothing"] = 0.1
    some = choice.random() < 0.3

    def value(z: Made, b: Fields) -> Tensor:
        scores, labels = z["tokens"].flatten(0, 1), b["labels"].flatten()
        if some:
            scores, labels = z["tokens"][b["keep"]], b["labels"][b["keep"]]
        return F.cross_entropy(scores, labels, **options)  # type: ignore[arg-type]

    return Term(f"cross-entropy {sorted(options)} {'of some' if some else ''}", value)


MEETING: dict[str, Expression] = {
    "root": lambda z, b: (z["rows"] - b["targets"]).square().mean().sqrt(),
    "pairs": lambda z, b: F.cross_entropy(z["rows"] @ z["rows"].T, torch.arange(rows_of(b))),
    "variance": lambda z, b: z["rows"].var(0).sum(),
    "product": lambda z, b: z["rows"].square().mean() * z["tokens"].square().mean(),
    "balance": lambda z, b: (
        z["rows"].softmax(-1).mean(0) * F.one_hot(z["rows"].argmax(-1), CLASSES).double().mean(0)
    ).sum(),
    "hardest": lambda z, b: (z["rows"] - b["targets"]).square().sum(-1).amax(),
}


def term(choice: random.Random) -> Term:
    """A loss, maybe times numbers or statistics of fields, or less a number."""
    kind = choice.random()
    if kind < 0.12:
        name, value = choice.choice(sorted(MEETING.items()))
        return Term(name, value, True)
    one = entropy(choice) if kind < 0.4 else reduced(choice)
    name, number = choice.choice(sorted(NUMBERS.items()))
    ways: dict[str, Expression] = {
        "itself": one.value,
        "its double": lambda z, b: one.value(z, b) * 2,
        "1 -": lambda z, b: 1 - 0.7 * one.value(z, b),
        "- 0.5": lambda z, b: one.value(z, b) - 0.5,
        f"times {name}": lambda z, b: one.value(z, b) * number(z, b),
        f"over {name}": lambda z, b: one.value(z, b) / number(z, b),
    }
    how, changed = choice.choice(sorted(ways.items()))
    return Term(f"({how} {one.name})", changed)


class Model(nn.Module):
    """Scores of rows and of tokens, and a loss of both; ``penalty`` adds one of the parameters alone."""

    def __init__(self, terms: list[Term], penalty: bool, form: str) -> None:
        super().__init__()
        self.terms, self.penalty, self.form = terms, penalty, form
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, CLASSES)
        self.table, self.out = nn.Embedding(11, 6), nn.Linear(6, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, **fields: Tensor) -> Tensor:
        made = {
            "rows": self.second(self.first(fields["x"]).tanh()),
            "tokens": self.out(self.table(fields["ids"]).sin() + self.first(fields["x"])[:, None]),
        }
        values = [one.value(made, fields) for one in self.terms]
        loss = torch.stack(values).sum() if self.form == "stacked" else sum(values[1:], start=values[0])
        if self.penalty:
            loss = loss + 0.01 * sum(p.square().sum() for p in (self.first.weight, self.out.weight))
        return loss


def model(choice: random.Random) -> Model:
    torch.manual_seed(choice.randrange(1 << 30))
    terms = [term(choice) for _ in range(choice.choice([1, 1, 2, 3]))]
    return Model(terms, choice.random() < 0.2, choice.choice(["added", "stacked"]))


@pytest.mark.slow
@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_loss(seed: int) -> None:
    choice = random.Random(seed)
    one = model(choice)
    subject = Subject(one, batch(choice))
    names = [t.name for t in one.terms]
    trace = subject.trace
    assert trace.opaque is None, (names, trace.opaque)
    meets = any(t.meets for t in one.terms)
    assert trace.cuts_batch != meets and bool(trace.meets) == meets, (names, trace.meets)
    assert bool(trace.notes_of_microbatches(2)) == meets
    truth = plain_run(subject)
    for dp, microbatches in [(choice.choice([1, 2, 3]), m) for m in ([1] if meets else choice.sample([1, 2, 3, 5], 2))]:
        found = errors(sharded_run(subject, dp, microbatches, choice.choice(["none", "full", "selective"])), truth)
        worst = max(found, key=lambda n: found[n])
        assert found[worst] <= TOLERANCE, (names, dp, microbatches, worst, found[worst])
    if meets:  # microbatches that exchange give the whole batch, too
        plan = Plan.of(
            Mesh.of(dp=choice.choice([1, 2, 3])), precision="fp64", rows="batch", microbatches=choice.choice([2, 3, 5])
        )
        found = errors(planned_run(subject.compile(1, 1, "none").under(plan), subject.batch), truth)
        worst = max(found, key=lambda n: found[n])
        assert found[worst] <= TOLERANCE, (names, plan.mesh, plan.microbatches, worst, found[worst])
