"""The moves from any state to any other, made by ranks that hold pieces of an array, leave each with its piece."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shardwise.shard.op_spec import Shard
from shardwise.shard.redistribute import Placements, path

SIZES = (2, 2, 2)  # ranks along each group of axes
RANKS = list(itertools.product(*map(range, SIZES)))
STATES: list[Placements] = list(itertools.product(("I", Shard(0), Shard(1)), repeat=len(SIZES)))
Pieces = dict[tuple[int, ...], Tensor]


class Value:
    """It has a gradient, and may be in any states."""

    grad = True
    together = ()

    def fits(self, states: Placements) -> bool:
        return True

    def same_cut(self, states: Placements, after: Placements, dim: int) -> bool:
        return False


def pieces(states: Placements) -> Pieces:
    """What each rank has in ``states``: the first group that shards a dim cuts it first, the next within its pieces."""
    whole, found = torch.arange(64).view(8, 8), {}
    for rank in RANKS:
        found[rank] = whole
        for place, size, state in zip(rank, SIZES, states, strict=True):
            if isinstance(state, Shard):
                found[rank] = found[rank].chunk(size, state.dim)[place]
    return found


def moved(held: Pieces, name: str, groups: tuple[int, ...], dim: int) -> Pieces:
    """The pieces after a move of ``dim`` over ``groups``, whose ranks are counted with the first group major."""
    found = {}
    for rank, own in held.items():
        others = [r for r in RANKS if all(r[i] == rank[i] for i in range(len(SIZES)) if i not in groups)]
        if name == "gather":
            found[rank] = torch.cat([held[r] for r in others], dim)
        else:
            assert name == "shard"
            found[rank] = own.chunk(len(others), dim)[others.index(rank)]
    return found


@pytest.mark.parametrize("states", STATES, ids=lambda s: "".join(str(x.dim) if isinstance(x, Shard) else x for x in s))
def test_every_rank_ends_with_the_piece_of_the_goal(states: Placements) -> None:
    for goals in STATES:
        held = pieces(states)
        for step in path(Value(), states, goals):
            (dim,) = {s.dim for i in step.groups for s in [step.sharded[i]] if isinstance(s, Shard)}
            held = moved(held, step.name, step.groups, dim)
        wanted = pieces(goals)
        assert all(torch.equal(held[rank], wanted[rank]) for rank in RANKS), goals
