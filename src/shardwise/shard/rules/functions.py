"""The rule for Functions with a backward of their own: trials show along which dims their elements are independent."""

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

ROWS = 4  # of a trial


def custom_function(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a Function whose rows, those of dim 0, are independent in forward and in backward; None where
    a trial on random numbers shows anything else, or nothing: it is then computed whole.

    Other dims are independent too where all operands and results have one shape and a trial shows it (an activation).
    """
    operands, results = tensors(node), values_of(node)
    sizes = [context.expressions(o) for o in operands]
    rows = next((own[0] for own in sizes if own and _follows(context, own[0])), None)
    if rows is None or not all(v.dim() and expression(v.shape[0]) == rows for v in results):
        return None
    cut = [bool(own) and own[0] == rows for own in sizes]
    trial = Trial(context, node, cut, 1 if rows == context.rows else int(rows / context.rows))
    if not trial.passes(0):
        return None
    alike = all(own == sizes[0] for own in sizes) and all([expression(s) for s in v.shape] == sizes[0] for v in results)
    dims = [0, *(d for d in range(1, len(sizes[0])) if alike and trial.passes(d))]
    pairs = [(o, [d if c and d in dims else None for d in range(len(own))])
             for o, own, c in zip(operands, sizes, cut, strict=True)]  # fmt: skip
    labels = [[d if d in dims else None for d in range(v.dim())] for v in results]
    return context.labelled(node, pairs, labels, several=True)


def _follows(context: ShardingContext, size: Any) -> bool:
    """Whether a size is a multiple of the number of rows."""
    if isinstance(context.rows, int):
        return bool(size == context.rows)
    return not isinstance(size, int) and bool((size / context.rows).is_Integer)


class Trial:
    """A Function on the random numbers of a few rows: on all together, and on two parts of them.

    ``cut`` says which operands have the rows in dim 0, and ``each`` how many elements of that dim a row has."""

    def __init__(self, context: ShardingContext, node: fx.Node, cut: Sequence[bool], each: int) -> None:
        self.function: CustomFunction = node.target
        self.cut, self.each, self.device = cut, each, _computing(context.device)
        self.draw = torch.Generator().manual_seed(0)
        both = zip(tensors(node), cut, strict=True)
        self.given = [self.random(o.meta["val"].dtype, context.shape(o), c) for o, c in both]

    def random(self, dtype: torch.dtype, shape: Sequence[int], cut: bool) -> Tensor:
        """Return random numbers; the first dim is that of the trial's rows if it is ``cut``."""
        shape = (ROWS * self.each, *shape[1:]) if cut else shape
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(tuple(shape), generator=self.draw, dtype=dtype).to(self.device)
        return torch.randint(0, 2, tuple(shape), generator=self.draw).to(self.device, dtype)

    def passes(self, dim: int) -> bool:
        """Whether a first part along ``dim`` and the rest give the same as all, forward and backward.

        Raises :class:`Uncapturable` if the same numbers give another result each time."""
        size = next(g.shape[dim] for g, c in zip(self.given, self.cut, strict=True) if c)
        first = self.each if dim == 0 else size // 3
        if not 0 < first < size:
            return False
        try:
            whole, again = (self.run(self.given, dim, size, 0, size) for _ in range(2))
            parts = [self.run(self.part(dim, a, b), dim, size, a, b) for a, b in ((0, first), (first, size))]
        except Exception:  # a Function may take none of these numbers, and then nothing is known of it
            return False
        if not all(map(_close, whole, again)):
            raise Uncapturable(f"the autograd.Function {self.function.__name__} gives another result each time")
        results = len(whole) - len(self.given)
        joined = []
        for i, pair in enumerate(zip(*parts, strict=True)):
            along = i < results or self.cut[i - results]
            joined.append(None if pair[0] is None else torch.cat(pair, dim) if along else sum(pair))
        return all(map(_close, whole, joined))

    def part(self, dim: int, start: int, stop: int) -> list[Tensor]:
        """Return the operands of a part along ``dim``."""
        both = zip(self.given, self.cut, strict=True)
        return [one.narrow(dim, start, stop - start) if cut else one for one, cut in both]

    def run(self, given: Sequence[Tensor], dim: int, size: int, start: int, stop: int) -> list[Tensor | None]:
        """Return the results, and the gradients of the operands for random ones of the results, of a part of these:
        what is between ``start`` and ``stop`` of a ``dim`` of ``size``."""
        leaves = [g.detach().clone().requires_grad_(g.is_floating_point() or g.is_complex()) for g in given]
        with torch.enable_grad():
            results = self.function(*leaves)
        seeds = torch.Generator().manual_seed(1)
        ends = []
        for one in results:
            if one.requires_grad:
                shape = list(one.shape)
                shape[0], shape[dim] = ROWS * self.each, size
                full = torch.randn(shape, generator=seeds, dtype=one.dtype)
                ends.append((one, full.narrow(dim, start, stop - start).to(self.device)))
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if ends:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            feed = iter(torch.autograd.grad([r for r, _ in ends], wanted, [b for _, b in ends], allow_unused=True))
            found = [next(feed) if leaf.requires_grad else None for leaf in leaves]
        return [*(r.detach() for r in results), *found]


def _computing(device: torch.device) -> torch.device:
    """Return ``device``, or the CPU where this torch has no kernels for it: its programs are then only looked at."""
    try:
        return torch.zeros(1).to(device).add(1).device
    except NotImplementedError:
        return torch.device("cpu")


def _close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=1e3 * eps, atol=1e2 * eps))


__all__ = ["custom_function"]
