"""The rule for Functions with a backward of their own: a trial shows whether their rows are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.captured import Uncapturable
from shardwise.graph.schema import values_of
from shardwise.graph.sizes import expression
from shardwise.ops.custom_function import CustomFunction
from shardwise.shard.context import ShardingContext
from shardwise.shard.rules.table import tensors

CUTS = (0, 1, 4)
"""The rows of a trial are divided into a first one and three more."""


def custom_function(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a Function whose rows, those of dim 0, are independent in forward and in backward; None where
    a trial on random numbers shows anything else, or nothing: it is then computed whole."""
    operands, results = tensors(node), values_of(node)
    sizes = [context.expressions(o) for o in operands]
    rows = next((own[0] for own in sizes if own and _follows(context, own[0])), None)
    if rows is None or not all(v.dim() and expression(v.shape[0]) == rows for v in results):
        return None
    cut = [bool(own) and own[0] == rows for own in sizes]
    each = 1 if rows == context.rows else int(rows / context.rows)
    if not Trial(context, node, cut, each).passes():
        return None
    pairs = [(o, ["b" if c and d == 0 else None for d in range(len(own))])
             for o, own, c in zip(operands, sizes, cut, strict=True)]  # fmt: skip
    labels = [["b", *([None] * (v.dim() - 1))] for v in results]
    return context.labelled(node, pairs, labels, several=True)


def _follows(context: ShardingContext, size: Any) -> bool:
    """Whether a size is a multiple of the number of rows."""
    if isinstance(context.rows, int):
        return bool(size == context.rows)
    return not isinstance(size, int) and bool((size / context.rows).is_Integer)


class Trial:
    """A Function on the random numbers of a few rows: on all together, and on two parts of them."""

    def __init__(self, context: ShardingContext, node: fx.Node, cut: Sequence[bool], each: int) -> None:
        self.function: CustomFunction = node.target
        self.cut, self.each, self.device = cut, each, context.device
        self.draw = torch.Generator().manual_seed(0)
        self.given = [
            self.random(o.meta["val"].dtype, context.shape(o), c) for o, c in zip(tensors(node), cut, strict=True)
        ]

    def random(self, dtype: torch.dtype, shape: Sequence[int], cut: bool) -> Tensor:
        """Return random numbers; the first dim is that of the trial's rows if it is ``cut``."""
        shape = (CUTS[-1] * self.each, *shape[1:]) if cut else shape
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(*shape, generator=self.draw, dtype=dtype).to(self.device)
        return torch.randint(0, 2, tuple(shape), generator=self.draw).to(self.device, dtype)

    def passes(self) -> bool:
        """Whether both give the same, forward and backward; raise :class:`Uncapturable` if each time gives another."""
        try:
            whole, again = (self.run(self.given, slice(None)) for _ in range(2))
            pieces = [slice(a * self.each, b * self.each) for a, b in zip(CUTS, CUTS[1:], strict=False)]
            parts = [self.run(self.part(p), p) for p in pieces]
        except Exception:  # a Function may take none of these numbers, and then nothing is known of it
            return False
        if not all(map(_close, whole, again)):
            raise Uncapturable(f"the autograd.Function {self.function.__name__} gives another result each time")
        results = len(whole) - len(self.given)
        joined = []
        for i, pair in enumerate(zip(*parts, strict=True)):
            rows = i < results or self.cut[i - results]
            joined.append(None if pair[0] is None else torch.cat(pair) if rows else sum(pair))
        return all(map(_close, whole, joined))

    def part(self, rows: slice) -> list[Tensor]:
        """Return the operands of some rows."""
        return [one[rows] if cut else one for one, cut in zip(self.given, self.cut, strict=True)]

    def run(self, given: Sequence[Tensor], rows: slice) -> list[Tensor | None]:
        """Return the results, and the gradients of the operands for random ones of the results."""
        leaves = [g.detach().clone().requires_grad_(g.is_floating_point() or g.is_complex()) for g in given]
        with torch.enable_grad():
            results = self.function(*leaves)
        seeds = torch.Generator().manual_seed(1)
        back = []
        for one in results:
            full, dtype = (CUTS[-1] * self.each, *one.shape[1:]), one.dtype if one.requires_grad else None
            back.append(torch.randn(full, generator=seeds, dtype=dtype)[rows].to(self.device))
        ends = [(r, b) for r, b in zip(results, back, strict=True) if r.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if ends:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            feed = iter(torch.autograd.grad([r for r, _ in ends], wanted, [b for _, b in ends], allow_unused=True))
            found = [next(feed) if leaf.requires_grad else None for leaf in leaves]
        return [*(r.detach() for r in results), *found]


def _close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=1e3 * eps, atol=1e2 * eps))


__all__ = ["custom_function"]
