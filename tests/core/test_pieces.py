"""Local tensors and whole ones: whatever the factors, each element is where slicing the factors puts it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import meshes_and_layouts

from shardwise.core.layout import Box, Factor, Layout
from shardwise.core.mesh import Mesh
from shardwise.core.pieces import Part, parts, range_parts

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def sliced(layout: Layout, mesh: Mesh, rank: int) -> tuple[Array, Array]:
    """A whole array of distinct numbers, and what a rank has of it, cut factor by factor."""
    whole = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    factors = [factor for dim in layout.dims for factor in dim]
    cut = tuple(slice(*factor.ranges(mesh, rank)[0]) for factor in factors)
    return whole, whole.reshape([factor.size for factor in factors])[cut].reshape(layout.local_shape(mesh, rank))


@settings(max_examples=200, deadline=None)
@given(meshes_and_layouts())
def test_parts_are_what_slicing_the_factors_gives(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    for rank in range(mesh.size):
        whole, local = sliced(layout, mesh, rank)
        found, seen = np.full(local.shape, -1), np.zeros(local.shape, dtype=int)
        for part in parts(layout, mesh, rank):
            assert part.local.numel and part.local.shape == part.whole.shape
            found[part.local.slices] = whole[part.whole.slices]
            seen[part.local.slices] += 1
        assert (seen == 1).all() and (found == local).all()
        assert [part.whole for part in parts(layout, mesh, rank)] == layout.boxes(mesh, rank)


@settings(max_examples=200, deadline=None)
@given(meshes_and_layouts(), st.data())
def test_a_range_of_a_local_tensor_is_in_parts_once(case: tuple[Mesh, Layout], data: st.DataObject) -> None:
    mesh, layout = case
    rank = data.draw(st.integers(0, mesh.size - 1))
    whole, local = sliced(layout, mesh, rank)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, local.size)] * 2)))
    found: list[int] = []
    for part in range_parts(layout, mesh, rank, start, stop):
        assert (local[part.local.slices] == whole[part.whole.slices]).all() and part.local.numel
        found += local[part.local.slices].ravel().tolist()
    assert sorted(found) == sorted(local.ravel()[start:stop].tolist())


def test_the_heads_of_a_fused_projection() -> None:
    """3 x 4 heads x 2, of which each of two ranks has two heads of each part."""
    layout, mesh = Layout(((Factor(3), Factor(4, ("tp",)), Factor(2)), (Factor(5),))), Mesh.of(dp=2, tp=2)
    for rank in (1, 3):
        assert parts(layout, mesh, rank) == [
            Part(Box((0, 0), (4, 5)), Box((4, 0), (8, 5))),
            Part(Box((4, 0), (8, 5)), Box((12, 0), (16, 5))),
            Part(Box((8, 0), (12, 5)), Box((20, 0), (24, 5))),
        ]
    # From the last two elements of row 3 to the first of row 5: over the border of two parts.
    assert list(range_parts(layout, mesh, 1, 18, 26)) == [
        Part(Box((3, 3), (4, 5)), Box((7, 3), (8, 5))),
        Part(Box((4, 0), (5, 5)), Box((12, 0), (13, 5))),
        Part(Box((5, 0), (6, 1)), Box((13, 0), (14, 1))),
    ]


def test_a_scalar_is_one_part_and_what_is_empty_none() -> None:
    assert parts(Layout(()), Mesh.of(tp=2), 1) == [Part(Box((), ()), Box((), ()))]
    assert parts(Layout.sharded((2, 3), {0: "tp"}), Mesh.of(tp=3), 0) == []
    assert list(range_parts(Layout.sharded((2, 3), {0: "tp"}), Mesh.of(tp=3), 0, 0, 0)) == []
