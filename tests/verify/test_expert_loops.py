"""Loops over the experts that some token has chosen equal one device, as they are written, under every plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_tensor import ALONE, PLAIN, check, oracle
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

WIDTH, INNER, EXPERTS, SLOTS = 8, 6, 4, 2


class Looping(nn.Module):
    """A layer of experts with a loop over them, in one ``form`` of several."""

    def __init__(self, form: str, plain: int = 0) -> None:
        super().__init__()
        self.form, self.routed, self.every = form, EXPERTS, EXPERTS + plain
        self.up = nn.Parameter(torch.randn(self.every, 2 * INNER, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) / 3)
        self.scale = nn.Parameter(torch.rand(EXPERTS, WIDTH))
        self.rows = 0

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = x.clone() if self.form == "added" else torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=self.every + (self.form == "missing")).permute(2, 1, 0)
            chosen = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        counted = 0
        for each in chosen:
            if self.form == "tensor" or self.form == "missing":
                expert = each[0]
                if expert == self.every:
                    continue
                slots, tokens = torch.where(mask[expert])
            else:
                expert = int(each.item())
                slots, tokens = torch.where(mask[expert].squeeze(0))
            if tokens.numel() == 0:
                continue
            rows = x[tokens]
            counted = counted + rows.shape[0]
            found = self.expert(expert, rows) if expert < self.routed else rows * 2
            found = found * weights[tokens, slots, None]
            final.index_add_(0, tokens, found.to(final.dtype))
        return final * counted if self.form == "counting" else final

    def expert(self, expert: Any, rows: Tensor) -> Tensor:
        if self.form == "products":
            gate, up = (rows @ self.up[expert].T + self.bias[expert]).chunk(2, -1)
            return torch.mm(F.gelu(gate) * up, self.down[expert].t()) * self.scale[expert]
        gate, up = F.linear(rows, self.up[expert], self.bias[expert]).chunk(2, -1)
        if self.form == "mixing":
            gate = gate - gate.mean(0)
        if self.form == "unlike" and expert == 1:
            gate = gate * 2
        return F.linear(F.silu(gate) * up, self.down[expert]) * self.scale[expert]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.drop(F.gelu(self.up(x))))
        return found


class Modules(nn.ModuleDict):
    """A module for each expert, with dropout inside it, as the older mixtures have it: in the form "limited" tokens
    are dropped that are no longer among the first of their expert, and else what experts give is dropped, too."""

    def __init__(self, form: str, plain: int = 0) -> None:
        super().__init__({f"expert_{i}": Expert() for i in range(EXPERTS)})
        self.form, self.drop = form, nn.Dropout(0.2)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        final = torch.zeros_like(x)
        if self.form == "limited":
            first = F.one_hot(ids[:, 0].view(-1, 7), num_classes=EXPERTS)
            first = (first * (torch.cumsum(first, dim=-2) <= 2)).view(-1, 1, EXPERTS)
            mask = first.permute(2, 1, 0)
        else:
            mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slots, tokens = torch.where(mask[expert].squeeze(0))
            rows = x[None, tokens].reshape(-1, WIDTH)
            rows = F.dropout(rows, 0.0)  # it draws nothing, and has an ordinal for all turns
            found = self[f"expert_{expert[0]}"](rows) * weights[:, : mask.shape[1]][tokens, slots, None]
            if self.form != "limited":
                found = self.drop(found)
            final.index_add_(0, tokens, found.to(x.dtype))
        return final


class Block(nn.Module):
    def __init__(self, form: str, plain: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS + plain + (form == "missing"))
        self.experts: nn.Module = (Modules if form in ("modules", "limited") else Looping)(form, plain)
        self.gate.bias.data[2] = -100  # no token chooses this one

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).view(-1, WIDTH)
        weights, ids = self.gate(flat).softmax(-1).topk(SLOTS, -1)
        return x + self.experts(flat, ids, weights).view(x.shape)


class Model(nn.Module):
    def __init__(self, form: str, plain: int = 0) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([Block(form, plain) for _ in range(2)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.entry(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h.mean(1)), labels)


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 7, 5, generator=own, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(3, (rows,), generator=own)}


BATCHES = [batch(5, 1), batch(4, 2)]


@functools.cache
def model(form: str, plain: int) -> tuple[Compiled, nn.Module]:
    torch.manual_seed(0)
    module = Model(form, plain).double()
    return Compiled(module, ALONE, BATCHES[0], None), module


@functools.cache
def truth(form: str, plain: int, microbatches: int) -> Any:
    return oracle(model(form, plain)[1], None, BATCHES, PLAIN, microbatches)


PLANS: dict[str, Plan] = {
    "dp": data_parallel(ALONE, 2),
    "zero3": data_parallel(ALONE.replace(microbatches=2), 2, 3),
    "tp": tensor_parallel(ALONE, 2),
    "tp-sp": tensor_parallel(ALONE, 2, "1d-sp"),
    "ep": expert_parallel(ALONE, 2),
    "by-number": tensor_parallel(ALONE, 2, experts="by-number"),
    "dp-ep-pp": pipeline(data_parallel(expert_parallel(ALONE.replace(microbatches=2), 2), 2), 2, "1f1b"),
}


CASES = [("number", 0), ("number", 2), ("tensor", 0), ("missing", 0), ("products", 1), ("added", 1)]


@pytest.mark.quick(8)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_loops(case: tuple[str, int], plan: str) -> None:
    """Experts with parameters and without, of which no token chooses one, and choices of no expert."""
    compiled = model(*case)[0].under(PLANS[plan])
    assert compiled.general.opaque is None
    assert any("loops over the experts" in note for note in compiled.general.notes)
    check(compiled, BATCHES, truth(*case, PLANS[plan].microbatches), PLAIN)
    if plan in ("ep", "by-number") and case[1] == 0:
        own = [p for p in compiled.general.parameters if p.name.endswith(("experts.up", "experts.down"))]
        assert own
        assert all(p.axes for p in own)


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", ["dp", "zero3", "tp", "tp-sp"])
@pytest.mark.parametrize("form", ["modules", "limited"])
def test_modules(form: str, plan: str) -> None:
    """Random numbers are those of tokens and choices, and an expert that no token chooses takes no step."""
    choice = OptimizerChoice("adamw", lr=0.1, weight_decay=0.1)
    compiled, module = model(form, 0)
    compiled = compiled.under(PLANS[plan])
    assert compiled.general.opaque is None
    check(compiled, BATCHES, oracle(module, None, BATCHES, choice, PLANS[plan].microbatches), choice)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("mixing", "rows of experts from others"),
        ("counting", "loop over experts"),
        ("unlike", "experts of several kinds"),
    ],
)
def test_what_is_no_loop_over_experts(form: str, why: str) -> None:
    """Experts that read other rows or numbers of rows, or compute different things, are said."""
    compiled = model(form, 0)[0]
    assert compiled.general.opaque is not None
    assert why in compiled.general.opaque


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.entry(x)
        narrow = h.to(torch.float32)
        narrow *= torch.empty_like(narrow).uniform_(0.5, 1.5)
        return F.cross_entropy(self.head((h + narrow).mean(1)), labels)


def test_what_is_written_to_a_narrower_copy() -> None:
    """It does not reach the double, as on one device (the noise in the router of Switch Transformers)."""
    torch.manual_seed(0)
    module = Written().double()
    compiled = Compiled(module, ALONE, BATCHES[0], None).under(PLANS["dp"])
    check(compiled, BATCHES, oracle(module, None, BATCHES, PLAIN, 1), PLAIN)
