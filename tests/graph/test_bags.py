"""Bags of one size are looked up and summed, with the numbers of torch's one op, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.graph.schema import op_name
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

ADAGRAD = OptimizerChoice("adagrad", lr=0.1)
MODES = [
    {"mode": mode, "sparse": sparse, "padding_idx": padding, "weighted": weighted}
    for mode in ("sum", "mean") for sparse in (False, True) for padding in (None, 3, -2)
    for weighted in ((False, True) if mode == "sum" else (False,))
]  # fmt: skip


class Bagged(nn.Module):
    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.head, self.weighted = nn.EmbeddingBag(37, 6, **options), nn.Linear(6, 1), weighted

    def forward(self, ids: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
        bags = self.bag(ids, per_sample_weights=weights if self.weighted else None)
        return ((self.head(bags).squeeze(-1) - wanted) ** 2).mean()


class Ragged(nn.Module):
    """The numbers of all bags are one field of the batch, in which bag i begins at 3 i but for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(37, 6, sparse=True), nn.Linear(6, 1)

    def forward(self, ids: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
        starts = torch.arange(0, 3 * ids.shape[0], 3)
        starts = torch.cat([starts[:-1], starts[-1:] + 1])
        return ((self.head(self.bag(ids.reshape(-1), starts)).squeeze(-1) - wanted) ** 2).mean()


def batch(rows: int = 11) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    ids = torch.randint(0, 37, (rows, 3))
    ids[0], ids[1, :2] = 3, 35  # one bag of padding alone
    return {"ids": ids, "weights": torch.rand(rows, 3), "wanted": torch.rand(rows)}


def ops(one: Compiled) -> set[str]:
    return {op_name(node) for unit in one.general.units if unit.graph is not None for node in unit.graph.nodes}


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_bags_of_one_size(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module, plan = Bagged(**options), data_parallel(Plan.of(microbatches=2), 2, zero=1)
    plan = plan.replace(sparse_gradients="rows")
    one = Compiled(module, plan, batch())
    assert "embedding" in ops(one) and "embedding_bag" not in ops(one)
    assert [b.table for b in one.buckets].count(True) == options["sparse"]
    assert not one.general.notes_without_rule(11)
    report = verify(module, [batch(), batch(7)], plan, optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]


def test_a_row_that_is_not_finite_is_left_out_as_padding() -> None:
    module = Bagged(padding_idx=3)
    with torch.no_grad():
        module.bag.weight[3] = float("inf")
    report = verify(module, [batch()], data_parallel(Plan.of(), 2), optimizer=ADAGRAD)
    assert {one.name for one in report.worst if not one.error < 1e-12} == {"bag.weight"}  # infinity from infinity
    assert all(one.error < 1e-12 for one in report.worst if one.what == "gradient")


def test_bags_under_tensor_parallelism() -> None:
    report = verify(Bagged(sparse=True), [batch()], tensor_parallel(Plan.of(), 2), optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]


@pytest.mark.parametrize("options", [{"mode": "max"}, {"scale_grad_by_freq": True}], ids=str)
def test_what_stays_one_op(options: dict[str, Any]) -> None:
    module = Bagged(**options)
    one = Compiled(module, data_parallel(Plan.of(), 2), batch())
    assert "embedding_bag" in ops(one)
    report = verify(module, [batch()], data_parallel(Plan.of(), 2), optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]


def test_bags_of_different_sizes_have_dense_gradients() -> None:
    plan = data_parallel(Plan.of(sparse_gradients="rows"), 2)
    one = Compiled(Ragged(), plan, batch())
    assert "embedding_bag" in ops(one) and not any(b.table for b in one.buckets)
    report = verify(Ragged(), [batch()], plan, optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]
