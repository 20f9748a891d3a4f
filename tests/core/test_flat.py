from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ShardwiseError
from shardwise.core.flat import FlatBuffer, FlatEntry, FlatShard, range_boxes
from shardwise.core.layout import Box

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shapes, st.data())
def test_a_range_is_at_most_2n_minus_1_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, numel), st.integers(0, numel))))
    boxes = range_boxes(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    whole = np.arange(numel).reshape(shape)
    held = [int(element) for box in boxes for element in whole[box.slices].ravel()]
    assert held == list(range(start, stop))
    assert all(box.numel for box in boxes)


def test_the_bound_is_reached() -> None:
    for n in (1, 2, 3, 4):
        assert len(range_boxes((4,) * n, 1, 4**n - 1)) == 2 * n - 1
    assert range_boxes((3, 4), 2, 10) == [Box((0, 2), (1, 4)), Box((1, 0), (2, 4)), Box((2, 0), (3, 2))]


items = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(0, 4)),
    max_size=7,
).map(lambda found: [(f"p{n}", shape, group) for n, (shape, group) in enumerate(found)])


@settings(max_examples=150, deadline=None)
@given(items, st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))
def test_shards_are_equal_aligned_and_tile_every_tensor(
    tensors: list[tuple[str, tuple[int, ...], int]], parts: int, itemsize: int
) -> None:
    buffer = FlatBuffer.pack(tensors, parts, itemsize)
    shards = [buffer.shard(parts, index) for index in range(parts)]
    assert shards[0].start == 0
    assert shards[-1].stop == buffer.numel
    assert all(a.stop == b.start for a, b in pairwise(shards))
    assert len({shard.stop - shard.start for shard in shards}) == 1
    assert all(shard.start * itemsize % 64 == 0 for shard in shards)
    assert all(entry.offset * itemsize % 64 == 0 for entry in buffer.entries)
    # the elements of each tensor, wherever they are, exactly once
    owners = {name: np.zeros(shape, dtype=int) for name, shape, _ in tensors}
    flat = np.full(buffer.numel, -1)
    for entry in buffer.entries:
        assert (flat[entry.offset : entry.stop] == -1).all(), "tensors overlap"
        flat[entry.offset : entry.stop] = np.arange(entry.numel)
    for shard in shards:
        for name, box in shard.boxes(buffer):
            owners[name][box.slices] += 1
    assert all((counts == 1).all() for counts in owners.values())
    # less than one part's alignment of padding for each tensor and each part
    used = sum(entry.numel for entry in buffer.entries)
    assert (buffer.numel - used) * itemsize < 64 * (len(tensors) + parts)


@settings(max_examples=100, deadline=None)
@given(items, st.integers(1, 4))
def test_segments_hold_their_group_and_shards_cut_them(
    tensors: list[tuple[str, tuple[int, ...], int]], parts: int
) -> None:
    buffer = FlatBuffer.pack(tensors, parts, 4)
    group_of = {name: group for name, _, group in tensors}
    assert [group for group, _, _ in buffer.segments] == sorted(set(group_of.values()))
    assert all(a[2] <= b[1] for a, b in pairwise(buffer.segments))
    bounds = {group: (start, stop) for group, start, stop in buffer.segments}
    for entry in buffer.entries:
        start, stop = bounds[group_of[entry.name]]
        assert start <= entry.offset <= entry.stop <= stop
    cut = [segment for index in range(parts) for segment in buffer.shard(parts, index).segments(buffer)]
    for group, (start, stop) in bounds.items():
        pieces = [(low, high) for name, low, high in cut if name == group]
        assert sum(high - low for low, high in pieces) == stop - start
        assert all(start <= low < high <= stop for low, high in pieces)


def test_groups_come_in_the_order_of_their_numbers() -> None:
    buffer = FlatBuffer.pack([("b", (3,), 1), ("w", (20, 2), 0), ("z", (1,), 4), ("v", (5,), 0)], 2, 4)
    assert buffer.entries == (
        FlatEntry("w", (20, 2), 0),
        FlatEntry("v", (5,), 48),
        FlatEntry("b", (3,), 64),
        FlatEntry("z", (1,), 80),
    )
    assert buffer.segments == ((0, 0, 53), (1, 64, 67), (4, 80, 81))
    assert buffer.numel == 96
    assert buffer.shard(2, 1) == FlatShard(48, 96)
    assert buffer.shard(2, 0).boxes(buffer) == [("w", Box((0, 0), (20, 2)))]
    assert buffer.shard(2, 1).segments(buffer) == ((0, 48, 53), (1, 64, 67), (4, 80, 81))
    assert {entry.name: entry.offset for entry in buffer.entries}["z"] == 80


def test_bad_requests_are_refused() -> None:
    buffer = FlatBuffer.pack([("w", (5,), 0)], 2, 4)
    with pytest.raises(ShardwiseError, match="shard 2 of 2 does not exist"):
        buffer.shard(2, 2)
    with pytest.raises(ShardwiseError, match="no 4 aligned shards; pack it for 4"):
        buffer.shard(4, 0)
    with pytest.raises(ShardwiseError, match="cannot pack 'w' twice"):
        FlatBuffer.pack([("w", (5,), 0), ("w", (5,), 0)], 2, 4)
    with pytest.raises(ShardwiseError, match="items of 3 bytes"):
        FlatBuffer.pack([], 2, 3)
