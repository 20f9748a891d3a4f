"""This measures FLOPs and bytes of the ops of a captured graph: each is run once for the whole batch, on the meta
device, forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.backend import Backend
from shardwise.graph.schema import tensors_in
from shardwise.graph.sizes import size_for_rows
from shardwise.kernels.device_kernels import COMPOSED
from shardwise.kernels.flop_counter import Meter
from shardwise.shard.context import ShardingContext

META = torch.device("meta")


@dataclass(frozen=True)
class Work:
    """This has the FLOPs and bytes of an op's kernels, forward and backward."""

    forward: tuple[float, float]
    backward: tuple[float, float] = (0.0, 0.0)

    @property
    def total(self) -> tuple[float, float]:
        return self.forward[0] + self.backward[0], self.forward[1] + self.backward[1]

    def plus(self, other: Work) -> Work:
        (f, g), (h, i) = self.forward, self.backward
        (a, b), (c, d) = other.forward, other.backward
        return Work((f + a, g + b), (h + c, i + d))


class Works:
    """This measures ops in microbatches of ``rows`` rows on devices of ``kind``; equal ops are measured once."""

    def __init__(self, context: ShardingContext, rows: int, kind: str) -> None:
        self.context, self.rows, self.kind = context, rows, kind
        self.works: dict[Any, Work] = {}
        self.keys: dict[fx.Node, Any] = {}
        self.known: dict[Any, int] = {}

    def sizes(self, tensor: Tensor) -> tuple[int, ...]:
        """Return sizes for as many rows as are priced; one that depends on data is the number of rows, too."""
        return tuple(s if isinstance(s, int) else self.size(s.node.expr, s) for s in tensor.shape)

    def size(self, expression: Any, size: Any) -> int:
        if expression not in self.known:
            self.known[expression] = size_for_rows(size, self.rows, self.rows)
        return self.known[expression]

    def key(self, node: fx.Node) -> Any:
        """Return a key that is equal for ops that do the same with tensors of the same sizes."""
        if node not in self.keys:
            arguments = fx.map_arg((node.args, dict(node.kwargs)), self._argument)
            symbols = [str(n.meta["val"].shape) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
            self.keys[node] = repr((str(node.target), arguments, symbols, "ordinal" in node.meta))
        return self.keys[node]

    def work(self, node: fx.Node) -> Work:
        """Return the work of an op on the whole batch."""
        key = self.key(node)
        if key not in self.works:
            self.works[key] = self._measured(node, fx.map_arg((node.args, dict(node.kwargs)), self._argument))
        return self.works[key]

    def _argument(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        grad = self.context.carrying.get(node, False)
        if isinstance(value, Tensor):
            return _Meta(self.sizes(value), value.dtype, grad and value.dtype.is_floating_point)
        return size_for_rows(value, self.rows, self.rows) if isinstance(value, torch.SymInt) else value

    def _measured(self, node: fx.Node, arguments: Any) -> Work:
        """Measure an op; one that the meta device cannot run is priced by the bytes of its operands and results."""
        args, kwargs = fx.node.map_aggregate(arguments, _made)
        target: Any = node.target
        run = functools.partial(COMPOSED[target], self.kind) if target in COMPOSED else target
        operands = tensors_in((args, kwargs))
        there, back = Meter(self.kind), Meter(self.kind)
        try:
            with torch.device(META):
                with there:
                    results = tensors_in(run(*args, **kwargs))
                wanted, good = ([t for t in ts if t.requires_grad] for ts in (operands, results))
                if wanted and good:
                    with back:
                        torch.autograd.grad(good, wanted, [torch.empty_like(g) for g in good], allow_unused=True)
        except RuntimeError:  # no kernel, or one that needs to see values
            made = sum(math.prod(self.sizes(v)) * v.dtype.itemsize for v in tensors_in(node.meta["val"]))
            nbytes = sum(t.nbytes for t in operands) + made
            return Work((0, nbytes), (0, 2 * nbytes if self.context.carrying[node] else 0))
        return Work((there.flops, there.bytes), (back.flops, back.bytes))


@dataclass(frozen=True)
class _Meta:
    """This describes a tensor; it is no tuple, because torch.fx would look into that for arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


def _made(argument: Any) -> Any:
    if isinstance(argument, _Meta):
        return torch.empty(argument.shape, dtype=argument.dtype, device=META, requires_grad=argument.grad)
    return META if isinstance(argument, torch.device) else argument


Repeats = Callable[[int], Mapping[tuple[str, str], tuple[int, Work]]]
"""For a number of rows of a microbatch this returns, by (op, module path), how many ops of that name there are, and
what they cost together."""


def repeats(
    context: ShardingContext, replicated: Mapping[tuple[str, str], Sequence[fx.Node]], rows: int
) -> dict[tuple[str, str], tuple[int, Work]]:
    """Return what the ops without a rule cost each rank, which computes them whole; those that cost nothing, such as
    views, are left out."""
    works = Works(context, rows, Backend.of(context.device).kind)
    found = {
        key: [work for node in nodes if any((work := works.work(node)).total)] for key, nodes in replicated.items()
    }
    return {key: (len(every), functools.reduce(Work.plus, every)) for key, every in found.items() if every}


__all__ = ["Repeats", "Work", "Works", "repeats"]
