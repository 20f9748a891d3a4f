"""Models that are unlike most in one way: they train to the numbers of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

PLANS = {
    "dp": Plan.of(Mesh.of(dp=2)),
    "microbatches": Plan.of(Mesh.of(dp=2), microbatches=2),
    "zero3": data_parallel(Plan.of(microbatches=2), 2, 3),
    "pp": pipeline(Plan.of(microbatches=2), 2),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "tp-sp": tensor_parallel(Plan.of(), 3, "1d-sp"),
}


class Residual(nn.Module):
    """Four blocks, and a loss for each row; with ``hardest`` the mean of the largest ones."""

    def __init__(self, hardest: int = 0) -> None:
        super().__init__()
        self.hardest = hardest
        self.layers, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        losses = F.cross_entropy(self.out(x), y, reduction="none")
        return losses.topk(self.hardest)[0].mean() if self.hardest else losses.mean()


class Words(nn.Module):
    def __init__(self, sparse: bool = False, script: bool = False) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 6, sparse=sparse), nn.Linear(6, 3)
        if script:
            self.out = torch.jit.script(self.out)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.table(ids)).mean(1), y)


class Prefixed(nn.Module):
    """A prefix of no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix, self.body, self.out = nn.Parameter(torch.randn(0, 6)), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([self.prefix[None].expand(len(x), -1, -1), self.body(x)[:, None]], 1)
        return F.cross_entropy(self.out(both[:, -1]), y)


class Parted(nn.Module):
    """A projection into three parts, of which one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.last = nn.Linear(6, 6), nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b, nothing = self.body(x).split([4, 2, 0], -1)
        return F.cross_entropy(self.first(a) + self.last(b) + nothing.sum(), y)


class Attention(nn.Module):
    """Attention over the edges of a graph (Velickovic et al., arXiv 1710.10903), whose nodes are the rows: dropout
    draws as many numbers as there are edges."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop, self.out = nn.Linear(6, 8, bias=False), nn.Dropout(0.3), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor, adjacent: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        source, goal = adjacent.nonzero(as_tuple=True)
        edges = self.drop(F.leaky_relu((torch.cat([h[source], h[goal]], -1) * self.weight).sum(-1), 0.2).exp())
        return F.cross_entropy(self.out(torch.zeros_like(h).index_add(0, goal, h[source] * edges[:, None])), y)


def batch(field: str = "x") -> dict[str, Tensor]:
    torch.manual_seed(1)
    values = torch.randn(7, 6) if field == "x" else torch.randint(0, 10, (7, 4))
    return {field: values, "y": torch.randint(0, 3, (7,))}


def seeded(make: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = make(*args)
    return module


def check(module: nn.Module, given: dict[str, Tensor], plan: Plan) -> list[str]:
    report = verify(module, [given], plan)
    assert report.passed, report.worst[:3]
    return report.notes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_model_and_a_batch_in_fp64(precision: Any) -> None:
    given = {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}
    check(seeded(Residual).double(), given, Plan.of(Mesh.of(dp=2), microbatches=2, precision=precision))


@pytest.mark.parametrize("plan", ["dp", "pp", "tp"])
def test_a_model_that_takes_no_two_rows(plan: str) -> None:
    """Its loss is made of the three hardest rows; batches of two rows are what nobody may try."""
    one = PLANS[plan] if plan != "pp" else pipeline(Plan.of(), 2)
    check(seeded(Residual, 3), batch(), one)
    if plan == "dp":
        check(seeded(Residual, 3), batch(), one.replace(microbatches=2, rows="batch"))


@pytest.mark.parametrize("plan", ["dp", "zero3", "tp"])
def test_sparse_gradients(plan: str) -> None:
    check(seeded(Words, True), batch("ids"), PLANS[plan])


@pytest.mark.slow
def test_scripted_modules() -> None:
    notes = check(seeded(Words, False, True), batch("ids"), PLANS["microbatches"])
    assert any("not captured" in note for note in notes)
    check(torch.jit.script(seeded(Residual)), batch(), PLANS["microbatches"])


@pytest.mark.parametrize("plan", ["dp", "tp", "tp-sp"])
def test_a_dim_without_elements(plan: str) -> None:
    check(seeded(Prefixed), batch(), PLANS[plan])


def test_a_part_without_elements() -> None:
    check(seeded(Parted), batch(), PLANS["tp"])


@pytest.mark.parametrize("plan", ["dp", "tp", "tp-sp"])
def test_random_numbers_for_edges_of_a_graph(plan: str) -> None:
    given = batch()
    check(seeded(Attention), {**given, "adjacent": torch.rand(7, 7) > 0.6}, PLANS[plan])


@pytest.mark.slow
def test_numbers_that_are_read_from_tensors_in_a_pipeline() -> None:
    """JetMoe reads on the host how many tokens each of its experts gets."""
    import transformers as t

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = t.JetMoeConfig(
        **sizes, vocab_size=31, kv_channels=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32
    )
    ids = torch.randint(0, 31, (4, 8))
    check(copy.deepcopy(seeded(t.JetMoeForCausalLM, config)), {"input_ids": ids, "labels": ids}, pipeline(Plan.of(), 2))
