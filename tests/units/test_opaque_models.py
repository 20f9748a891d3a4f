"""Models that are not captured, of many kinds: each beside plain PyTorch on the whole batch, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import TOLERANCE, Loss, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

PLANS = [(1, 1), (2, 1), (1, 2), (2, 2)]


class Model(nn.Module):
    """A branch on values keeps it from being captured, and ``locals()`` the branch from running as a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def hidden(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return h * 2 if bool((h > 100).any()) and locals() else (self.mask.softmax(-1) @ h).tanh()


class Result(dict[str, Tensor]):
    @property
    def loss(self) -> Tensor:
        return self["loss"]


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Result:
        scores = self.head(self.hidden(ids))
        return Result(loss=F.cross_entropy(scores.flatten(0, 1), labels.flatten()), scores=scores)


class Attributes(NamedTuple):
    loss: Tensor
    scores: Tensor


class Output(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Attributes:
        scores = self.head(self.hidden(ids))
        return Attributes(F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"), scores)


class Scores(Model):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(ids))


class Unused(Model):
    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return self.head(self.hidden(ids)).square().mean()


class Shuffled(Model):
    """Negatives are the other rows of the batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.normalize(self.head(self.hidden(ids)).mean(1), dim=-1)
        return F.cross_entropy(h @ h.roll(1, 0).T, torch.arange(len(h)))


class Balanced(Model):
    """A small balance loss of the whole batch beside a mean."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.hidden(ids))
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return loss + 1e-3 * scores.softmax(-1).mean((0, 1)).square().sum()


class Penalty(Model):
    """A penalty on parameters beside a sum counts once a batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.hidden(ids)).square().sum() + 1e-4 * self.head.weight.square().sum()


class OwnNorm(Model):
    """A BatchNorm of the user's own."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.hidden(ids)
        if self.training:
            h = (h - h.mean((0, 1))) / (h.var((0, 1)) + 1e-5).sqrt()
        return self.head(h).square().mean()


class Dropped(Model):
    """One mask for all rows."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.hidden(ids) * F.dropout(torch.ones(5, 6, dtype=self.head.weight.dtype), 0.5, self.training)
        return self.head(h).square().mean()


def mean_loss(scores: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), fields["labels"].flatten())


def mask_loss(scores: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    mask = fields["labels"] >= 0
    losses = F.cross_entropy(scores.transpose(1, 2), fields["labels"].clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


def token_loss(scores: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Targets are shifted: the last token of each row predicts nothing, so that a row may have no target."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), fields["labels"][:, 1:].flatten())


def counted_loss(scores: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    mask = fields["ids"] != 3  # padding
    return (scores.square().mean(-1) * mask).sum() / mask.sum()


def batch(rows: int = 8, padded: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(0, 3, (rows, 5)), torch.randint(0, 7, (rows, 5))
    if padded:
        labels[: rows // 2, 2:] = -100
    return {"ids": ids, "labels": labels}


RIGHT: dict[str, tuple[Callable[[], nn.Module], Loss | None, str]] = {
    "a dict, tied": (Tied, None, "a mean over the targets of labels"),
    "an output": (Output, None, "a sum over rows"),
    "a loss function": (Scores, mean_loss, "a mean over the targets of labels"),
    "a mask of what is ignored": (Scores, mask_loss, ""),
    "one mask for all rows": (Dropped, None, "a mean over rows"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_every_plan_has_the_numbers_of_one_device(name: str, padded: bool) -> None:
    make, loss, kind = RIGHT[name]
    subject = Subject(make(), batch(padded=padded), loss)
    assert f"its loss is {kind}" in str(subject.trace.notes) and subject.trace.opaque is not None
    truth = plain_run(subject) if make is not Dropped else sharded_run(subject, 1)
    for dp, microbatches in PLANS:
        if not kind and (dp, microbatches) != (1, 1):
            with pytest.raises(ConfigError, match="model.loss_weight"):
                sharded_run(subject, dp, microbatches)
            continue
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


def test_fields_that_nothing_uses() -> None:
    subject = Subject(Unused(), batch() | {"weights": torch.ones(8)})
    for dp, microbatches in PLANS:
        assert max(errors(sharded_run(subject, dp, microbatches), plain_run(subject)).values()) <= TOLERANCE


REFUSED: dict[str, tuple[Callable[[], nn.Module], Loss | None]] = {
    "in-batch negatives": (Shuffled, None),
    "a balance loss": (Balanced, None),
    "a penalty beside a sum": (Penalty, None),
    "a norm of its own": (OwnNorm, None),
    "padding that the example has not": (Scores, counted_loss),
    "shifted targets": (Scores, token_loss),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_part_can_tell_is_refused(name: str, rows: int) -> None:
    make, loss = REFUSED[name]
    subject = Subject(make(), batch(rows), loss)
    assert subject.trace.opaque is not None
    assert max(errors(sharded_run(subject, 1), plain_run(subject)).values()) <= TOLERANCE
    for dp, microbatches in PLANS[1:]:
        with pytest.raises(ConfigError, match="model.loss_weight"):
            sharded_run(subject, dp, microbatches)


class Low(Model):
    """It computes in bf16 alone."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.hidden(ids)
        return F.linear(h, torch.eye(6, dtype=torch.bfloat16)).float().square().mean()


def test_a_model_of_one_precision() -> None:
    """No trial in fp32 can tell of it: one rank trains all the same."""
    one = Compiled(Low().bfloat16(), Plan.of(precision="bf16"), batch())
    assert one.general.opaque is not None and one.programs(one.general, 1)
    other = one.under(Plan.of(Mesh.of(dp=2), precision="bf16"))
    with pytest.raises(ConfigError, match="model.loss_weight"):
        other.programs(other.general, 1)


def test_an_example_without_targets_is_no_evidence() -> None:
    """Its loss is 0/0 in every trial: the model trains on one device, and elsewhere it has to be said what it is."""
    batch = {"ids": torch.randint(0, 7, (4, 5)), "labels": torch.full((4, 5), -100)}
    assert Compiled(Tied(), Plan.of(), batch).general.opaque is not None
    with pytest.raises(ConfigError, match=r"^model\.loss_weight: the model was not captured, and a trial did not show"):
        sharded_run(Subject(Tied(), batch), 2)


class Again(nn.Module):
    """Each row decides by its own values, and a layer is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.entry(x))
        h = torch.stack([2 * row if float(row.detach().sum()) > 0 and locals() else row for row in h])
        return self.head(checkpoint(self.layer, h, use_reentrant=True)).square().mean()


def test_a_backward_that_runs_forward_again_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"its backward, which is written in Python, fails in a trial.*reversible"):
        Compiled(Again(), Plan.of(), {"x": torch.randn(6, 4)})
