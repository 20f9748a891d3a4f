"""Weight gradients of linear layers taken out of backward: their operands become outputs of the unit.

The gradient of a weight, dYᵀX, needs only the input X and the output's gradient dY.  A unit that trains computes its linears
with detached weights and returns, for each, X and the *edge* of Y in the autograd graph: backward then gives dY as one of its
results, and whoever runs the unit multiplies dYᵀX when and where it likes: straight into the gradient buffer, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

aten = torch.ops.aten


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, but for the gradient of ``weight``, which there is none of."""
    y = F.linear(x, weight.detach(), bias)
    return y if y.requires_grad else start([y])[0]


def start(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``tensors`` as the start of a graph: gradients end there, but it does not hold them as it would hold leaves."""
    begun: tuple[Tensor, ...] = _Start.apply(torch.empty(0, requires_grad=True), tensors)  # type: ignore[no-untyped-call]
    return begun


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def edge(y: Tensor) -> GradientEdge:
    """Where the gradient of ``y`` arrives; ``y`` itself is not kept."""
    return get_gradient_edge(y)


def expose(graph: fx.Graph, trainable: list[bool]) -> tuple[fx.Graph, tuple[int, ...]]:
    """A copy of a unit's graph whose last outputs are (X, edge of Y) of every linear over a trainable parameter of the unit.

    ``trainable`` is given for each parameter, in the order of the placeholders after ``env``.  Returns the graph and, for each
    linear, the position of its weight among the parameters.
    """
    new = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    weights = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("p"))}
    operands: list[Any] = []
    found: list[int] = []
    for node in graph.nodes:
        weight = node.args[1] if node.target is aten.linear.default else None
        if node.op == "output":
            new.output((*fx.map_arg(node.args[0], lambda a: copies[a]), *operands))
        elif weight in weights and trainable[weights[weight]] and weight.meta["val"].dim() == 2:
            x, w, *rest = fx.map_arg((*node.args, *node.kwargs.values()), lambda a: copies[a])
            copies[node] = new.call_function(linear, (x, w, rest[0] if rest else None))
            operands += [x, new.call_function(edge, (copies[node],))]
            found.append(weights[weight])
        else:
            copies[node] = new.node_copy(node, lambda a: copies[a])
    return new, tuple(found)


Operands = tuple[Any, ...]
"""What a unit returns beside its outputs: X and the edge of Y of each of its products in turn."""


def watch(
    names: Sequence[str], operands: Sequence[Any], add: Callable[[str, Tensor, Tensor], None]
) -> list[tuple[str, Tensor, Any]]:
    """Have ``add(weight, dY, X)`` called as soon as backward has dY, while it is in the cache.

    Returns (weight, X, edge of Y) of the linears that backward would not pass, as nothing before them has a gradient.
    """
    later = []
    for name, x, y in zip(names, operands[::2], operands[1::2], strict=bool(names)):
        if not x.requires_grad:
            later.append((name, x, y))
            continue
        x = x.detach()

        def arrive(grads: Sequence[Tensor | None], name: str = name, x: Tensor = x, at: int = y.output_nr) -> None:
            dy = grads[at]
            if dy is not None:
                add(name, dy, x)

        y.node.register_prehook(arrive)
    return later


@torch.no_grad()
def accumulate(goal: Tensor, dy: Tensor, x: Tensor, add: bool) -> None:
    """Write dYᵀX to ``goal``, or add it; products in lower precision than the goal's are rounded first."""
    left, right = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    if goal.dtype != dy.dtype:
        product = left @ right
        goal.add_(product) if add else goal.copy_(product)
    elif add:
        goal.addmm_(left, right)
    else:
        torch.mm(left, right, out=goal)
