"""Weight gradients of linear layers taken out of backward: their operands become outputs of the unit.

The gradient of a weight, dYᵀX, needs only the input X and the output's gradient dY.  Each linear of a unit gets a *probe*, a tensor of
zeros of Y's shape that is added to Y in name only (nothing is computed): the gradient of the probe is dY.  So backward gives dY as one of
its results, and whoever runs the unit multiplies dYᵀX when and where it likes: straight into the gradient buffer, without a copy.
No side effect of backward is involved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor]:
        (weight,), dy = ctx.saved_tensors, grads[0]
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        db = dy.sum(list(range(dy.dim() - 1))) if ctx.needs_input_grad[2] else None
        return dx, None, db, dy


def probe(x: Tensor, weight: Tensor) -> Tensor:
    """A leaf of the shape of ``linear(x, weight)`` that takes up no memory."""
    return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0]).requires_grad_()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor) -> Tensor:
    """``F.linear``, but for the gradient of ``weight``: the gradient of ``probe`` is the output's instead."""
    result: Tensor = _Linear.apply(x, weight, bias, probe)  # type: ignore[no-untyped-call]
    return result


def expose(graph: fx.Graph, trainable: list[bool]) -> tuple[fx.Graph, tuple[int, ...]]:
    """A copy of a unit's graph whose last outputs are (X, probe) of every linear over a trainable parameter of the unit.

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
            one = new.call_function(probe, (x, w))
            copies[node] = new.call_function(linear, (x, w, rest[0] if rest else None, one))
            operands += [x, one]
            found.append(weights[weight])
        else:
            copies[node] = new.node_copy(node, lambda a: copies[a])
    return new, tuple(found)


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
