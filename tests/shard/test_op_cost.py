"""What ops are taken to cost: counted by hand, and as ``cost`` counts the units of the same graph."""

from __future__ import annotations

import pytest
import torch
from test_solve import prepared
from torch import nn

import zoo
from shardwise.capture.capture import capture
from shardwise.graph.functional import functionalise
from shardwise.graph.normalise import normalise
from shardwise.measure.unit_cost import cost
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.shard.solver.op_cost import Work, Works
from shardwise.units.tracing import trace


def test_a_product_costs_what_it_multiplies() -> None:
    """y[6, 5] = x[6, 3] w[3, 5] + b in fp32; then the gradients of w and b alone, for x is a field, and of the sum."""
    normal = functionalise(capture(nn.Linear(3, 5), {"input": torch.zeros(4, 3)}, loss=lambda y, _: y.sum()))
    context, _ = prepared(normal, TensorParallelSpec({"tp": 2}))
    works = Works(context, 6, "cpu")
    (product,) = [works.work(n) for n in normal.graph.nodes if n.target is torch.ops.aten.linear.default]
    y, x, w, b = 30 * 4, 18 * 4, 15 * 4, 5 * 4
    assert product.forward == (2 * 6 * 3 * 5, y + x + w + b)
    assert product.backward == (2 * 6 * 3 * 5, (y + x + w) + (y + b))


class Chosen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[(x > 0).nonzero()[:, 0]].sum()


def test_an_op_without_a_meta_kernel_costs_its_bytes() -> None:
    """x is (6, 3); the positions of true are taken to be as many as rows, pairs of int64."""
    normal = functionalise(capture(Chosen(), {"x": torch.randn(4, 3)}))
    context, _ = prepared(normal, TensorParallelSpec({"tp": 2}))
    (found,) = [n for n in normal.graph.nodes if n.target is torch.ops.aten.nonzero.default]
    assert Works(context, 6, "cpu").work(found).total == (0, 6 * 3 * 1 + 6 * 2 * 8)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["own gpt", "own llama", "own convnet", "bert"])
def test_ops_cost_what_their_units_do(name: str) -> None:
    one = zoo.make(name)
    normal = functionalise(capture(one.module, one.batch, loss=one.loss))
    normalise(normal)
    context, _ = prepared(normal, TensorParallelSpec({"tp": 2}))
    works = Works(context, 6, "cpu")
    total = Work((0, 0))
    for node in context.forms:
        total = total.plus(works.work(node))
    units = cost(trace(one.module, one.batch, loss=one.loss), 6, device="cpu")
    assert total.forward[0] == sum(c.forward_flops for c in units) > 0
    assert total.backward[0] == sum(c.input_flops + c.weight_flops for c in units) > total.forward[0]
    assert total.forward[1] == pytest.approx(sum(c.forward_bytes for c in units), rel=0.2)
