"""A small model whose parameters lie in pieces over tensor-parallel axes, put there by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.units.trace import Parameter, Trace
from shardwise.units.tracing import _buckets

WIDTH = 6


class Block(nn.Module):
    """A fused projection of three parts, a way back, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.qkv(self.norm(x)).unflatten(-1, (3, WIDTH)).tanh().prod(-2))


class Net(nn.Module):
    """Seven words, two blocks, a head of two; a frozen layer, a parameter of no dims, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain, self.unread = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor, y: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.frozen(x) * self.gain), y)


def layouts(first: str = "tp", second: str = "tp") -> dict[str, Layout]:
    """Of the parameters that are sharded: uneven (7 words), fused, by columns, and, over three ranks, with nothing for
    one of them (a head of two).  Some are sharded over ``first``, some over ``second``, the words over both."""
    both = (first,) if first == second else (first, second)
    wide = Factor(WIDTH)
    found = {
        "embed.weight": Layout(((Factor(7, both),), (wide,))),
        "frozen.weight": Layout(((wide,), (Factor(WIDTH, (second,)),))),
        "head.weight": Layout(((Factor(2, (second,)),), (wide,))),
        "head.bias": Layout(((Factor(2, (second,)),),)),
    }
    for block in ("blocks.0", "blocks.1"):
        parts = (Factor(3), Factor(WIDTH, (first,)))
        found |= {
            f"{block}.qkv.weight": Layout((parts, (wide,))),
            f"{block}.qkv.bias": Layout((parts,)),
            f"{block}.out.weight": Layout(((wide,), (Factor(3), Factor(2, (first,))))),
        }
    return found


def net() -> Net:
    torch.manual_seed(4)
    return Net().double()


def batch(rows: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "words": torch.randint(0, 7, (rows,), generator=generator),
        "y": torch.randint(0, 2, (rows,), generator=generator),
    }


def place(found: Trace, module: nn.Module, plan: Plan, given: Mapping[str, Layout]) -> None:
    """Give the parameters of a trace these layouts, and the buckets that follow from them."""
    learning = {p.name for p in found.parameters}
    found.buckets[:] = _buckets(found.units, module, found.precision, learning, plan.data.rule, given)


def planned(
    tensor: Mapping[str, int], dp: int = 1, zero: int = 0, replicas: int = 1, pp: int = 1, **fields: Any
) -> Plan:
    """A plan over these tensor-parallel axes."""
    mesh = Mesh(tuple(Axis(name, size) for name, size in tensor.items()))
    return pipeline(data_parallel(Plan.of(mesh=mesh, **{"precision": "fp64", **fields}), dp, zero, replicas), pp)


def compiled(plan: Plan, module: nn.Module | None = None) -> Compiled:
    """The net under a plan, its parameters sharded over the plan's axes ``tp`` and ``ep``, whichever there are."""
    names = [name for name in ("tp", "xp") if name in plan.mesh.names]
    made = Compiled(module or net(), plan, batch())
    if names:
        place(made.general, made.module, plan, layouts(names[0], names[-1]))
    return made


def local(parameter: Parameter, whole: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """What a rank has of a whole parameter: cut factor by factor."""
    factors = [factor for dim in parameter.placed.dims for factor in dim]
    cut = whole.reshape([factor.size for factor in factors])[tuple(slice(*f.ranges(mesh, rank)[0]) for f in factors)]
    return cut.reshape(parameter.local_shape(mesh, rank))
