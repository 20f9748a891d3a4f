"""Find which values of a functional graph have a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.captured import Captured
from shardwise.graph.schema import differentiable

aten = torch.ops.aten


class Tracked:
    """Tell whether autograd tracks a node, also while its graph grows; ``known`` has the answers so far."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.known: dict[fx.Node, bool] = {}

    def __call__(self, node: Any) -> bool:
        """Return whether a node has a gradient; anything that is not a node has none."""
        if not isinstance(node, fx.Node):
            return False
        if node not in self.known:
            stack = [node]
            while stack:  # graphs are deep: no recursion
                missing = [i for i in stack[-1].all_input_nodes if i not in self.known]
                if missing:
                    stack.extend(missing)
                else:
                    last = stack.pop()
                    self.known[last] = self._of(last)
        return self.known[node]

    def _of(self, node: fx.Node) -> bool:
        """Return whether a node whose inputs are known has a gradient."""
        if node.op == "placeholder":
            return bool(self.captured.trainable.get(self.captured.parameters.get(node.name, ""), False))
        value = node.meta.get("val")
        if node.target is aten.detach.default or has(node, Fact.LIKE):
            return False
        if isinstance(value, Tensor) and not differentiable(value):
            return False
        return any(self.known[i] for i in node.all_input_nodes)
