"""Layers of experts are found where nothing depends on the order of tokens, and computed as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (it registers the product)
from torch import Tensor, fx, nn

from shardwise.capture.capture import capture
from shardwise.graph import normalise
from shardwise.graph.experts import Experts
from shardwise.graph.functional import functionalise

EXPERTS = 3


class Layer(nn.Module):
    """Two tokens of each sequence choose experts; ``change`` says what is done to rows between the products."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change = change
        self.gate, self.bias = nn.Linear(4, EXPERTS), nn.Parameter(torch.randn(EXPERTS, 8))
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, 4, 8)), nn.Parameter(torch.randn(EXPERTS, 8, 4))
        self.width = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).softmax(-1).topk(2)
        numbers = chosen.flatten()
        numbers, order = torch.sort(numbers, descending=self.change == "descending")
        counts = torch.histc(numbers.float(), EXPERTS, 0, EXPERTS - 1 + (self.change == "other bounds"))
        ends = counts.cumsum(0, dtype=torch.int32)
        if self.change in SEARCHED:
            every = torch.arange(EXPERTS) if self.change != "even numbers" else torch.arange(0, 2 * EXPERTS, 2)
            ends = torch.searchsorted(numbers, every, right=self.change != "from the left").int()
        known = torch.ops.shardwise.grouped_mm, torch.ops.transformers.grouped_mm_fallback
        product = known[self.change not in SEARCHED]
        rows = product(tokens[order // 2], self.up, ends)
        rows = self.between(rows, numbers, tokens)
        rows = product(rows, self.down, ends)
        inverse = torch.empty_like(order)
        inverse[order] = (
            torch.arange(len(order)).flip(0) if self.change == "another order" else torch.arange(len(order))
        )
        out = rows[inverse].unflatten(0, (-1, 2)) * scores[..., None]
        return out.sum(1).square().mean() + (counts.sum() if self.change == "counts leave" else 0.0)

    def between(self, rows: Tensor, numbers: Tensor, tokens: Tensor) -> Tensor:
        if self.change == "bias":
            return (rows + self.bias[numbers]).relu()
        if self.change == "halves":
            gate, value = rows.softmax(-1).chunk(2, -1)
            return rows * (gate.sigmoid() * value)[:, :1] + self.width
        if self.change == "masked":
            missing = (numbers >= EXPERTS)[:, None]
            return rows.masked_fill(missing, 0.0) + self.bias[numbers.clamp(max=EXPERTS - 1)]
        if self.change == "one apart":
            return rows * (numbers == 1)[:, None]
        if self.change == "normed":
            return torch.nn.functional.layer_norm(rows, (8,)) * self.width
        if self.change == "over rows":
            return rows - rows.mean(0)
        if self.change == "with others":
            return rows * tokens.repeat_interleave(2, 0).repeat(1, 2)
        if self.change == "cumulated":
            return rows.cumsum(0)
        return rows.relu()


SEARCHED = ("searched", "from the left", "even numbers")
"""These find where experts end by a search."""
FOUND = ("relu", "bias", "halves", "normed", "masked", "searched")
LEFT = (
    "descending", "one apart", "other bounds", "over rows", "with others", "cumulated", "counts leave",
    "another order", "from the left", "even numbers",
)  # fmt: skip


def run(graph: fx.Graph, module: nn.Module, names: dict[str, str], x: Tensor) -> Tensor:
    values = dict(module.named_parameters())
    places = [node for node in graph.nodes if node.op == "placeholder"]
    given = [values[names[node.name]] if node.name in names else x for node in places]
    found: Any = fx.Interpreter(nn.Module(), graph=graph).run(*given)
    result: Tensor = found[0]
    return result


@pytest.mark.quick(5)
@pytest.mark.parametrize("change", [*FOUND, *LEFT])
def test_a_layer(change: str) -> None:
    """It gives what the module gives, and the same gradients, as one node or as it was."""
    module = Layer(change)
    x = torch.randn(5, 3, 4)
    normal = functionalise(capture(module, {"x": x}))
    normalise.normalise(normal)
    layers = [node for node in normal.graph.nodes if isinstance(node.target, Experts)]
    assert len(layers) == (change in FOUND)
    expected = module(x)
    found = run(normal.graph, module, normal.captured.parameters, x)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(one, list(module.parameters()), allow_unused=True) for one in (found, expected))
    for mine, own in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, own)


def test_what_is_known_of_a_layer() -> None:
    module = Layer("bias")
    normal = functionalise(capture(module, {"x": torch.randn(5, 3, 4)}))
    normalise.normalise(normal)
    (layer,) = (node for node in normal.graph.nodes if isinstance(node.target, Experts))
    assert layer.target.experts == EXPERTS and layer.target.slots == (2,)
    assert [normal.captured.parameters.get(one.name) for one in layer.args[2:]] == ["up", "bias", "down"]
