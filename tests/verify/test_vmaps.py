"""Functions that ``torch.vmap`` maps, inside a model that is captured around them, equal one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

LENGTH, WIDTH = 6, 8


class Mapped(nn.Module):
    """Attention whose mask, scores and rows are written for one element, one pair and one row."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.mixed(block(x)).tanh()
        scores = self.head(x.mean(1))
        if self.form == "loss":
            return torch.vmap(F.cross_entropy)(scores, y).mean()
        return F.cross_entropy(scores, y)

    def mixed(self, h: Tensor) -> Tensor:
        if self.form == "mask":
            places, allowed = torch.arange(h.shape[1]), h.detach().mean(-1) > -9
            along = torch.vmap(lambda ok, q, k: (k <= q) & ok, in_dims=(0, None, 0))
            whole = torch.vmap(torch.vmap(along, in_dims=(None, 0, None)), in_dims=(0, None, None))
            with torch.no_grad():
                mask = whole(allowed, places, places)
            return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        if self.form == "product":
            scores = torch.vmap(lambda row: (row * self.scale) @ row.T)(h)
            return scores.softmax(-1) @ h
        if self.form == "in place":

            def marked(row: Tensor) -> tuple[Tensor, Tensor]:
                row = row.clone()
                row[0].mul_(2)
                return row, row.sum(0, keepdim=True)

            rows, sums = torch.vmap(marked)(h)
            rows.add_(sums)
            return rows
        if self.form == "detached":
            return torch.vmap(lambda row: row.detach() * 2 + row)(h)
        if self.form == "normed":
            normed = torch.vmap(lambda row: F.layer_norm(F.linear(row, self.head.weight, self.head.bias), (3,)))(h)
            return F.pad(normed, (0, WIDTH - 3))
        if self.form == "one memory":
            rows, again = torch.vmap(lambda row: ((own := row * 2), own[None]))(h)
            rows[:, 0].mul_(3)
            return rows + again.squeeze(1)
        if self.form == "written inside":
            h, before = h.clone(), h
            rows = torch.vmap(lambda row: row.mul_(2)[1:])(h)
            rows.add_(1)
            return h + before
        return torch.vmap(lambda row: row[None] + row.flip(0), out_dims=1)(h).squeeze(0)


def numbers(rows: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=drawn), "y": torch.randint(0, 3, (rows,), generator=drawn)}


PLANS: dict[str, Any] = {
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(Plan.of(microbatches=2), 2, 3),
    "pp": pipeline(Plan.of(microbatches=3), 2),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
}


@pytest.mark.parametrize(
    "form", ["mask", "product", "in place", "one memory", "written inside", "out_dims", "detached", "normed", "loss"]
)
@pytest.mark.parametrize("plan", PLANS)
def test_mapped_functions(form: str, plan: str) -> None:
    report = verify(Mapped(form), [numbers(rows) for rows in (12, 8)], PLANS[plan])
    assert report.passed and report.ranks_agree, report.worst[:3]
    assert not any("not captured" in note for note in report.notes)


def without_gradients(row: Tensor) -> Tensor:
    with torch.no_grad():
        scale = row.square()
    return scale * row


class Partly(nn.Module):
    """A mapped function, a part of which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(without_gradients)(self.layer(x)).mean()


def test_parts_without_gradients() -> None:
    report = verify(Partly(), [{"x": numbers(4)["x"]}] * 2, data_parallel(Plan.of(), 2))
    assert report.passed, report.worst[:3]


class MappedDropout(nn.Module):
    """Dropout of mapped rows, of which nobody can tell which row it draws for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: F.dropout(self.layer(row), 0.5), randomness="same")(x).square().mean()


def test_random_numbers_of_mapped_functions_are_refused() -> None:
    with pytest.raises(Exception, match=r"draws inside torch\.vmap"):
        verify(MappedDropout(), [{"x": numbers(4)["x"]}] * 2, data_parallel(Plan.of(), 2))
