"""Clicks whose truth is known, and two models of them over hashed categories: a logistic regression, and a
wide-and-deep model (Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems").

A row has a category of each of eight fields.  The logit of a click is a sum of a weight for each category, and of the
product of a city's tastes with a page's topics.  So the best AUC that any model can reach is that of the true
probabilities, which ``python clicks.py`` prints; that of the weights alone is the best of a logistic regression.

The models know no categories but one table of rows: a category of a field is hashed to one of ``buckets`` rows, and two
categories may share one.  Their lookups are sparse: a step touches as many rows as its batch has categories.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZES = {"user": 200_000, "page": 2_000, "ad": 4_000, "query": 20_000, "city": 500, "device": 40, "hour": 24, "slot": 5}
TOPICS = 4


def hashed(field: int, categories: np.ndarray, buckets: int) -> np.ndarray:
    """Return the row of each category of a field: a multiplicative hash of both."""
    mixed = (categories.astype(np.uint64) + np.uint64(field << 32)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(buckets)).astype(np.int64)


class Clicks(Dataset[dict[str, Tensor]]):
    """``rows`` rows, of which a few users, pages and queries have most; another ``part`` has other rows of the same
    truth."""

    def __init__(self, rows: int, buckets: int, part: int = 0) -> None:
        truth, drawn = np.random.default_rng(1), np.random.default_rng((2, part))
        self.linear, ids = np.full(rows, -1.5), []
        chosen = {}
        for field, (name, size) in enumerate(SIZES.items()):
            chosen[name] = (size * drawn.random(rows) ** 3).astype(np.int64)
            self.linear += 0.5 * truth.standard_normal(size)[chosen[name]]
            ids.append(hashed(field, chosen[name], buckets))
        tastes, topics = (truth.standard_normal((SIZES[name], TOPICS)) for name in ("city", "page"))
        both = (tastes[chosen["city"]] * topics[chosen["page"]]).sum(1)
        self.probability = 1 / (1 + np.exp(-self.linear - 0.6 * both))
        self.ids = torch.from_numpy(np.stack(ids, 1))
        self.labels = torch.from_numpy((drawn.random(rows) < self.probability).astype(np.float32))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "labels": self.labels[index]}

    def read_rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Many rows at once, which is faster than one by one."""
        at = torch.from_numpy(indices)
        return {"ids": self.ids[at], "labels": self.labels[at]}


class LogisticRegression(nn.Module):
    """A weight for each row of the table."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(buckets, 1, mode="sum", sparse=True)
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.weights.weight)

    def logits(self, ids: Tensor) -> Tensor:
        return self.weights(ids).squeeze(-1) + self.bias

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(ids)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


class WideAndDeep(LogisticRegression):
    """The same, and beside it a vector of ``width`` for each row, which go through layers and multiply each other."""

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__(buckets)
        self.vectors = nn.Embedding(buckets, width, sparse=True)
        nn.init.normal_(self.vectors.weight, std=0.05)
        self.deep = nn.Sequential(nn.Linear(len(SIZES) * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def logits(self, ids: Tensor) -> Tensor:
        vectors = self.vectors(ids)
        pairs = vectors.sum(1).square() - vectors.square().sum(1)  # twice the sum of all products of two of a row
        return super().logits(ids) + self.deep(vectors.flatten(1)).squeeze(-1) + pairs.sum(-1)


def dataset(rows: int, buckets: int, part: int = 0) -> Clicks:
    return Clicks(rows, buckets, part)


def logistic_regression(buckets: int) -> nn.Module:
    return LogisticRegression(buckets)


def wide_and_deep(buckets: int, width: int) -> nn.Module:
    return WideAndDeep(buckets, width)


def auc() -> object:
    """The metric of ``validation.metrics``."""
    from torchmetrics.classification import BinaryAUROC

    return BinaryAUROC()


def area(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return how often a click has a higher score than what is none."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels > 0
    return float((ranks[clicks].mean() - (clicks.sum() + 1) / 2) / (~clicks).sum())


if __name__ == "__main__":
    held_out = Clicks(100_000, 1, part=1)
    labels = held_out.labels.numpy()
    print(f"of 100,000 rows {labels.mean():.1%} are clicks")
    print(f"AUC of the true probabilities: {area(held_out.probability, labels):.4f}")
    print(f"AUC of the weights alone:      {area(held_out.linear, labels):.4f}")
