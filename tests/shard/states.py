"""What the states of a value mean, spelled out; nothing that makes layouts and moves has a part in it.

Over n ranks a tensor is

=====  ===========================================  ==========
state  what ranks have of it                        its dual
=====  ===========================================  ==========
V      a piece each, which together are the tensor  V
P      a summand each, whose sum is the tensor      I
I      the tensor                                   I
R      the tensor                                   P
=====  ===========================================  ==========

The gradient of a value in a state is in the dual one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.shard.op_spec import Placement, Shard

TOLERANCE = 1e-12
States = Mapping[str, Placement]
Rank = Mapping[str, int]
"""The place of a rank on each group of axes."""


class Ranks:
    """The ``sizes`` of groups of axes, for a batch of some ``rows``."""

    def __init__(self, sizes: Mapping[str, int], rows: int) -> None:
        self.sizes, self.rows = sizes, rows
        places = itertools.product(*map(range, sizes.values()))
        self.all: list[Rank] = [dict(zip(sizes, place, strict=True)) for place in places]
        self.known: dict[Any, list[list[Tensor]]] = {}

    def indices(self, states: States, shape: torch.Size) -> list[list[Tensor]]:
        """Of each rank which indices of each dim it has."""
        key = tuple(states.items()), shape
        if key not in self.known:
            self.known[key] = [[self.own(states, d, n, rank) for d, n in enumerate(shape)] for rank in self.all]
        return self.known[key]

    def own(self, states: States, dim: int, size: int, rank: Rank) -> Tensor:
        """Of one rank, and one dim: of a place that several groups shard each has its part of the part of the one
        before.
        """
        places = dict[Shard, tuple[int, int]]()
        for group, state in states.items():
            if isinstance(state, Shard) and state.dim == dim:
                parts, index = places.get(state, (1, 0))
                places[state] = parts * self.sizes[group], index * self.sizes[group] + rank[group]
        own = torch.ones(size, dtype=torch.bool)
        for place, (parts, index) in places.items():
            pre = (
                place.pre
                if isinstance(place.pre, int)
                else int(place.pre.subs(place.pre.free_symbols.pop(), self.rows))
            )
            factor = size // (pre * place.post)
            here, first = torch.zeros(factor, dtype=torch.bool), 0
            for part in place.parts or (factor,):
                here[first + part * index // parts : first + part * (index + 1) // parts] = True
                first += part
            own &= here[torch.arange(size) // place.post % max(factor, 1)]
        return own.nonzero()[:, 0]

    def pieces(self, whole: Tensor, states: States) -> list[Tensor]:
        """What each rank has of a tensor."""
        partial = [group for group, state in states.items() if state == "P"]
        summands = [random_like(whole) for _ in range(math.prod(self.sizes[group] for group in partial) - 1)]
        summands.append(whole - sum(summands) if summands else whole)
        found = []
        for rank, indices in zip(self.all, self.indices(states, whole.shape), strict=True):
            number = 0
            for group in partial:
                number = number * self.sizes[group] + rank[group]
            value = summands[number]
            for dim, own in enumerate(indices):
                value = value if len(own) == whole.shape[dim] else value.index_select(dim, own)
            found.append(value.detach())
        return found

    def together(self, like: Tensor, states: States, pieces: Sequence[Tensor]) -> Tensor:
        """What ranks have, put together as a tensor of the shape of ``like``: all copies of it have to be the same."""
        if like.dtype is torch.bool and "P" in states.values():
            raise Wrong("a partial sum of truth values")
        alike = [group for group, state in states.items() if state in ("I", "R")]
        copies: dict[tuple[int, ...], Tensor] = {}
        for rank, indices, piece in zip(self.all, self.indices(states, like.shape), pieces, strict=True):
            shape = [len(own) for own in indices]
            if list(piece.shape) != shape or piece.dtype != like.dtype:
                raise Wrong(f"rank {rank} has {list(piece.shape)} of {piece.dtype}, not {shape} of {like.dtype}")
            which = tuple(rank[group] for group in alike)
            if piece.shape == like.shape:
                copies[which] = copies[which] + piece if which in copies else piece
            else:
                at = torch.meshgrid(*indices, indexing="ij")
                copies.setdefault(which, torch.zeros_like(like))[at] += piece
        first, *others = copies.values()
        if not all(distance(other, first) <= TOLERANCE for other in others):
            raise Wrong("ranks that should have the same do not")
        return first


class Wrong(AssertionError):
    """Pieces are not what a strategy says."""


def dual(states: States) -> dict[str, Placement]:
    """Those of a gradient."""
    return {
        group: {"P": "I", "R": "P"}.get(state, state) if isinstance(state, str) else state
        for group, state in states.items()
    }


def random_like(whole: Tensor) -> Tensor:
    if whole.is_floating_point() or whole.is_complex():
        return torch.randn_like(whole)
    return torch.randint_like(whole, -9, 9)


def distance(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors, against the largest number or 1; what is not finite has to be the same."""
    if torch.equal(mine, theirs):
        return 0.0
    if not mine.is_floating_point() and not mine.is_complex():
        return math.inf
    finite = theirs.isfinite()
    if not bool(torch.isclose(mine, theirs, 0, 0, equal_nan=True)[~finite].all()):
        return math.inf
    error = (mine - theirs)[finite].abs().max() / theirs[finite].abs().max().clamp(min=1) if bool(finite.any()) else 0.0
    return float(error)
