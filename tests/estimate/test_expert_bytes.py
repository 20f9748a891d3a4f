"""Experts by number over the ranks of ``tp``: bytes and traffic are those predicted where all get equally many rows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from real import differences
from test_traffic import compared
from torch import Tensor, nn

from covering import covering
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.nn import MoE
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel

torch.set_num_threads(1)
EXPERTS, LENGTH, TOP_K = 6, 12, 2


class Even(nn.Module):
    """Its batch says which experts each token chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.moe = nn.Embedding(16, 8), MoE(8, 16, EXPERTS, TOP_K, balance=None)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        self.moe.route = lambda scores: ids  # type: ignore[method-assign]
        hidden = self.table(x)
        return (hidden + self.moe(hidden)[0] - y).square().mean()


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.arange(LENGTH * TOP_K).remainder(EXPERTS).view(1, LENGTH, TOP_K).repeat(rows, 1, 1)
    return {"x": torch.randint(0, 16, (rows, LENGTH)), "ids": ids, "y": torch.randn(rows, LENGTH, 8)}


CASES = list(
    itertools.product(
        (("1d", 2), ("1d", 3), ("1d-sp", 2)), ((1, 0), (2, 3)), ("none", "full", "selective"), ("fp32", "bf16"),
        (1, 2),
    )
)  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.few(6)
@pytest.mark.parametrize("case", list(covering(CASES)), ids=str)
def test_every_instruction(case: Any) -> None:
    (kind, tp), (dp, zero), recompute, precision, microbatches = case
    plan = Plan.of(Mesh(()), precision=precision, recompute=recompute, microbatches=microbatches)
    plan = data_parallel(tensor_parallel(plan, tp, kind, experts="by-number"), dp, zero)
    given = batch(4)
    subject = Compiled(Even().train(), plan, given, None)
    assert not differences(subject, given)
    assert compared(subject, given) > 4
