"""What units communicate, by the op that needs it; that bytes are those that are sent is tested in
tests/estimate/test_traffic.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.measure.unit_traffic import Cause, UnitTraffic, by_cause, traffic
from shardwise.models.gpt import GPT
from shardwise.ops.env import Env
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel

ROWS = 6
Kinds = tuple[str, ...]


def causes(compiled: Compiled, name: str, env: Env) -> list[tuple[Cause, Kinds, Kinds]]:
    """Of the unit of that name, in order; what its nodes communicate is what the unit does."""
    unit = next(unit for unit in compiled.general.units if unit.name == name)
    assert unit.graph is not None
    found = list(by_cause(unit.graph, env, unit.output_grads))
    whole = traffic(unit.graph, env, unit.output_grads)
    for way in ("forward", "backward"):
        assert [t for _, one in found for t in getattr(one, way)] == list(getattr(whole, way))
    kinds = [(cause, *(tuple(t.kind for t in part) for part in (one.forward, one.backward))) for cause, one in found]
    return [one for one in kinds if one[1] or one[2]]


BLOCK: dict[str, list[tuple[str, str, str, str]]] = {
    "1d": [
        ("aten.linear.default", "attention.qkv", "", "all_reduce"),
        ("aten.dropout.default", "drop", "all_reduce", ""),
        ("aten.linear.default", "mlp.up", "", "all_reduce"),
        ("aten.dropout.default", "drop", "all_reduce", ""),
    ],
    "1d-sp": [
        ("aten.linear.default", "attention.qkv", "all_gather", "reduce_scatter"),
        ("aten.dropout.default", "drop", "reduce_scatter", "all_gather"),
        ("aten.linear.default", "mlp.up", "all_gather", "reduce_scatter"),
        ("aten.dropout.default", "drop", "reduce_scatter", "all_gather"),
    ],
}


@pytest.mark.parametrize("tensor", BLOCK)
@pytest.mark.parametrize("block", [0, 1])
def test_a_block_says_which_ops_need_what(tensor: Any, block: int) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randint(0, 32, (ROWS, 8)) for name in ("input_ids", "labels")}
    module = GPT(vocabulary=32, width=16, layers=2, heads=4, context=8, dropout=0.1)
    compiled = Compiled(module, tensor_parallel(Plan.of(), 2, tensor), batch)
    found = causes(compiled, f"blocks.{block}", Env(rows=ROWS, tensor={"tp": (2, 1)}))
    assert found == [
        (Cause(op, f"blocks.{block}.{path}"), (forward,) if forward else (), (backward,) if backward else ())
        for op, path, forward, backward in BLOCK[tensor]
    ]
    assert not causes(compiled, f"blocks.{block}", Env(rows=ROWS, tensor={"tp": (1, 0)}))


class Normed(nn.Module):
    """Statistics of the whole batch, and negatives of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.net(x), dim=-1)
        return F.cross_entropy(y @ y.T, torch.arange(len(y), device=y.device))


def test_ops_that_mix_rows_say_so() -> None:
    compiled = Compiled(Normed(), data_parallel(Plan.of(), 3), {"x": torch.randn(ROWS, 6)})
    units = compiled.general.units
    found = [one for u in units for one in causes(compiled, u.name, Env(None, ("dp",), 3, 0, ROWS))]
    assert (Cause("sync_batch_norm", "net.1"), ("all_gather",), ("all_reduce",)) in found
    assert (Cause("aten.matmul.default", ""), ("all_gather",), ("reduce_scatter",)) in found
    alone = [one for u in units if u.graph for _, one in by_cause(u.graph, Env(rows=ROWS), u.output_grads)]
    assert alone and all(one == UnitTraffic() for one in alone)
