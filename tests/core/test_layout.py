from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import meshes_and_layouts

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Box, Factor, Layout, axis_ranges, shard_range
from shardwise.core.mesh import Mesh
from shardwise.core.tensor_options import CONTEXT


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 6))
def test_balanced_split_tiles_and_nests(size: int, a: int, b: int) -> None:
    ranges = [shard_range(size, a * b, index) for index in range(a * b)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
    for major in range(a):
        inner = ranges[major * b : (major + 1) * b]
        assert (inner[0][0], inner[-1][1]) == shard_range(size, a, major)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 6))
def test_the_sequence_is_shared_out_in_zigzag_order(size: int, a: int, b: int) -> None:
    """Every element has one owner, parts are equal where the size divides, and those of a minor axis nest."""
    ranks = [axis_ranges(size, (CONTEXT, "tp"), a * b, index) for index in range(a * b)]
    owned = [[i for start, stop in one for i in range(start, stop)] for one in ranks]
    assert sorted(itertools.chain(*owned)) == list(range(size))
    assert all(one == sorted(one) for one in owned)
    lengths = {len(one) for one in owned}
    assert max(lengths) - min(lengths) <= 1 and (size % (a * b) or len(lengths) == 1)
    for major in range(a):
        outer = [i for start, stop in axis_ranges(size, (CONTEXT,), a, major) for i in range(start, stop)]
        assert sorted(itertools.chain(*owned[major * b : (major + 1) * b])) == outer


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_under_a_causal_mask_all_ranks_have_the_same_work(ranks: int) -> None:
    work = [
        sum(i + 1 for start, stop in axis_ranges(48, (CONTEXT,), ranks, index) for i in range(start, stop))
        for index in range(ranks)
    ]
    assert len(set(work)) == 1, work


@pytest.mark.parametrize(("parts", "index"), [(0, 0), (3, 3), (3, -1)])
def test_parts_that_do_not_exist_are_refused(parts: int, index: int) -> None:
    with pytest.raises(ShardwiseError, match=f"part {index} of {parts} does not exist"):
        shard_range(10, parts, index)


@settings(max_examples=150, deadline=None)
@given(meshes_and_layouts())
def test_boxes_tile_the_tensor_and_make_up_the_local_shape(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    owners = np.zeros(layout.shape, dtype=int)
    for rank in range(mesh.size):
        boxes = layout.boxes(mesh, rank)
        mine = np.zeros(layout.shape, dtype=int)
        for box in boxes:
            mine[box.slices] += 1
        assert mine.max(initial=0) <= 1, "the boxes of one rank must not overlap"
        assert mine.sum() == math.prod(layout.local_shape(mesh, rank)) == sum(box.numel for box in boxes)
        assert all(box.numel for box in boxes)
        assert layout.nbytes(4, mesh, rank) == 4 * mine.sum()
        owners += mine
    copies = mesh.size // mesh.axis_size(tuple(layout.sharding_axes))
    assert (owners == copies).all()


@settings(max_examples=100, deadline=None)
@given(meshes_and_layouts())
def test_boxes_hold_what_slicing_the_factors_gives(case: tuple[Mesh, Layout]) -> None:
    """The elements in the boxes, in order, are those of the factored array sliced factor by factor."""
    mesh, layout = case
    factors = [factor for dim in layout.dims for factor in dim]
    whole = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    for rank in range(mesh.size):
        cut = tuple(slice(*factor.ranges(mesh, rank)[0]) for factor in factors)
        sliced = whole.reshape([factor.size for factor in factors])[cut]
        pieces = [whole[box.slices].ravel() for box in layout.boxes(mesh, rank)]
        assert sorted(sliced.ravel().tolist()) == sorted(np.concatenate([*pieces, np.zeros(0, int)]).tolist())
        assert sliced.reshape(layout.local_shape(mesh, rank)).shape == layout.local_shape(mesh, rank)


def test_a_sharded_minor_factor_gives_several_boxes() -> None:
    """A fused qkv of 3 x 4 heads x 5: each rank has its heads of q, of k and of v."""
    mesh = Mesh.of(tp=2)
    layout = Layout(((Factor(3), Factor(4, ("tp",)), Factor(5)), (Factor(7),)))
    assert layout.shape == (60, 7)
    assert layout.local_shape(mesh, 1) == (30, 7)
    assert layout.boxes(mesh, 1) == [Box((at, 0), (at + 10, 7)) for at in (10, 30, 50)]
    assert str(layout) == "[3*4:tp*5, 7]"


def test_adjacent_pieces_are_one_box() -> None:
    """A minor factor that is whole on this rank, though its axis is there, does not split the box."""
    layout = Layout(((Factor(4, ("a",)), Factor(6, ("b",))),))
    assert layout.boxes(Mesh.of(a=2, b=1), 1) == [Box((12,), (24,))]
    assert len(layout.boxes(Mesh.of(a=2, b=2), 1)) == 2


def test_uneven_shards() -> None:
    mesh = Mesh.of(x=2, y=2)
    layout = Layout.sharded((7, 3), {0: ("x", "y")})
    assert [layout.local_shape(mesh, rank)[0] for rank in range(4)] == [1, 2, 2, 2]
    assert [layout.boxes(mesh, rank)[0].start[0] for rank in range(4)] == [0, 1, 3, 5]
    assert [layout.nbytes(2, mesh, rank) for rank in range(4)] == [6, 12, 12, 12]
    tiny = Layout.sharded((1,), {0: "x"})
    assert [tiny.boxes(mesh, rank) for rank in (0, 2)] == [[], [Box((0,), (1,))]]


def test_a_scalar_is_one_box() -> None:
    assert Layout.replicated(()).boxes(Mesh.of(dp=2), 1) == [Box((), ())]
    assert Layout.replicated(()).boxes(Mesh.of(dp=2), 1)[0].numel == 1


def test_the_axes_of_a_layout() -> None:
    assert Layout.sharded((8, 6), {0: "dp", 1: ("x", "y")}).sharding_axes == {"dp", "x", "y"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.sharded((4, 4), {0: "x", 1: "x"}), "axis x is used twice"),
        (lambda: Layout.sharded((4,), {0: ("x", "x")}), "axis x is used twice"),
        (lambda: Layout.sharded((4,), {1: "x"}), r"dim 1 of a tensor of shape \(4,\) does not exist"),
        (lambda: Factor(-1), "factor of size -1"),
        (lambda: Box((0,), (1, 2)), "two numbers of dims"),
    ],
)
def test_bad_layouts_are_refused(make: object, message: str) -> None:
    with pytest.raises(ShardwiseError, match=message):
        make()  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_box_intersection_and_containment(data: st.DataObject) -> None:
    def draw() -> tuple[Box, np.ndarray]:
        ends = [sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))) for _ in range(2)]
        box = Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))
        mask = np.zeros((5, 5), dtype=bool)
        mask[box.slices] = True
        return box, mask

    (a, in_a), (b, in_b) = draw(), draw()
    both = a.intersect(b)
    expected = in_a & in_b
    assert a.numel == in_a.sum()
    assert (both is None) == (not expected.any())
    if both is not None:
        found = np.zeros_like(expected)
        found[both.slices] = True
        assert (found == expected).all()
        assert both == b.intersect(a)
        assert a.contains(both)
    assert a.contains(b) == (not (in_b & ~in_a).any())


def test_parts_of_a_concatenation_are_sharded_each_by_itself() -> None:
    mesh = Mesh.of(tp=2)
    layout = Layout(((Factor(12, ("tp",), (8, 2, 2)), Factor(3)), (Factor(5),)))
    assert str(layout) == "[8+2+2:tp*3, 5]" and layout.shape == (36, 5)
    assert layout.intervals(mesh, 0)[0] == [(0, 12), (24, 27), (30, 33)]
    assert layout.intervals(mesh, 1)[0] == [(12, 24), (27, 30), (33, 36)]
    assert [layout.local_shape(mesh, rank) for rank in range(2)] == [(18, 5)] * 2
    uneven = Layout(((Factor(6, ("tp",), (5, 1)),),))
    assert [uneven.intervals(mesh, rank)[0] for rank in range(2)] == [[(0, 2)], [(2, 6)]]
    with pytest.raises(ShardwiseError, match=r"\(5, 2\)"):
        Factor(6, ("tp",), (5, 2))
