"""Losses of scores whose classes tensor parallelism shares out, in the ways that people write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQUENCE = 16  # so many that what an op keeps of a row is more than the scalars of a step
Fields = dict[str, Tensor]
How = Callable[[Any, Tensor, Fields], Tensor]


class Scored(nn.Module):
    """A table and a head of ``classes``, and a loss of their scores (rows, sequence, classes)."""

    def __init__(self, how: How, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, classes)
        self.register_buffer("weights", torch.linspace(0.5, 2, classes))

    def forward(self, ids: Tensor, labels: Tensor, soft: Tensor, mask: Tensor) -> Tensor:
        scores = self.head(self.table(ids).tanh() * 3)
        return self.how(self, scores, {"ids": ids, "labels": labels, "soft": soft, "mask": mask})


def batch(classes: int, rows: int = 5) -> Fields:
    """Tokens, their classes, some of them ignored, probabilities of classes, and a weight of each token."""
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(0, classes, (rows, SEQUENCE), generator=g)
    labels[1, 1:] = -100
    return {
        "ids": torch.randint(0, 10, (rows, SEQUENCE), generator=g), "labels": labels,
        "soft": torch.rand(rows, SEQUENCE, classes, generator=g).softmax(-1),
        "mask": torch.rand(rows, SEQUENCE, generator=g),
    }  # fmt: skip


@functools.cache
def made(name: str, classes: int) -> tuple[nn.Module, Fields]:
    return Scored(HOW[name], classes), batch(classes)


def _tokens(scores: Tensor, b: Fields) -> tuple[Tensor, Tensor]:
    return scores.flatten(0, 1), b["labels"].flatten()


def _own(chances: Tensor, b: Fields) -> Tensor:
    return F.nll_loss(chances.flatten(0, 1), b["labels"].flatten())


HOW: dict[str, How] = {
    "plain": lambda m, s, b: F.cross_entropy(*_tokens(s, b)),
    "smooth": lambda m, s, b: F.cross_entropy(*_tokens(s, b), label_smoothing=0.1),
    "sum": lambda m, s, b: F.cross_entropy(*_tokens(s, b), reduction="sum") * 0.1,
    "none": lambda m, s, b: (F.cross_entropy(*_tokens(s, b), reduction="none") * b["mask"].flatten()).mean(),
    "weights": lambda m, s, b: F.cross_entropy(*_tokens(s, b), weight=m.weights),
    "ignored": lambda m, s, b: F.cross_entropy(s[:, 0], b["ids"][:, 0] % 4, ignore_index=1),
    "all but mean": lambda m, s, b: (
        F.cross_entropy(s.mT, b["labels"], m.weights, label_smoothing=0.2, reduction="none") * b["mask"]
    ).sum(),
    "dims": lambda m, s, b: F.cross_entropy(s.transpose(1, 2), b["labels"]),
    "dims, all": lambda m, s, b: F.cross_entropy(s.mT, b["labels"], m.weights, label_smoothing=0.1),
    "probabilities": lambda m, s, b: F.cross_entropy(s.flatten(0, 1), b["soft"].flatten(0, 1)),
    "probabilities, all": lambda m, s,
    b: F.cross_entropy(s.mT, b["soft"].mT, m.weights, label_smoothing=0.1, reduction="none").sum(),
    "learned probabilities": lambda m, s,
    b: F.cross_entropy(s[:, 1:].flatten(0, 1), s[:, :-1].softmax(-1).flatten(0, 1), m.weights),
    "nll": lambda m, s, b: _own(F.log_softmax(s, -1), b),
    "nll, dims": lambda m, s, b: F.nll_loss(F.log_softmax(s.mT, 1), b["labels"], m.weights),
    "nll, none": lambda m, s,
    b: (F.nll_loss(s.mT.log_softmax(1), b["labels"], m.weights, reduction="none") * b["mask"]).sum(),
    "nll, sum": lambda m, s, b: F.nll_loss(*_tokens(s.log_softmax(-1), b), reduction="sum") * 0.1,
    "nll, wider": lambda m, s, b: _own(F.log_softmax(s, -1, dtype=torch.float64), b),
    "z": lambda m, s, b: F.cross_entropy(*_tokens(s, b)) + 0.1 * s.logsumexp(-1).square().mean(),
    "kl": lambda m, s, b: F.kl_div(s.log_softmax(-1), b["soft"], reduction="batchmean"),
    "entropy": lambda m, s, b: (s.softmax(-1) * s.log_softmax(-1)).sum(-1).mean() + (s.softmax(-1) * b["soft"]).sum(),
    "masked classes": lambda m, s, b: F.cross_entropy(
        s.masked_fill(torch.arange(s.shape[-1]) < s.shape[-1] // 2 + 1, -torch.inf).flatten(0, 1),
        b["labels"].flatten() * 0 + s.shape[-1] - 1
    ),
}  # fmt: skip
