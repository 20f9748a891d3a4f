"""Boxes tile a tensor if each of its elements lies in exactly one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.core.layout import Box

from .atoms import inside, span


def cover_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return in words why ``boxes`` do not tile a tensor of ``shape``, or None if they do.

    Boxes without elements are ignored.  The others are swept along the first dim, so that only boxes that overlap there
    are compared: flat ranges take n log n.
    """
    for box in boxes:
        if len(box.start) != len(shape) or not inside(box, shape):
            return f"box {span(box)} lies outside its shape {list(shape)}"
    filled = sorted((box for box in boxes if box.numel), key=lambda box: box.start)
    active: list[Box] = []
    for box in filled:
        active = [other for other in active if not shape or other.stop[0] > box.start[0]]
        for other in active:
            if other.intersect(box) is not None:
                return f"boxes {span(other)} and {span(box)} overlap"
        active.append(box)
    held, all_of_it = sum(box.numel for box in filled), math.prod(shape)
    if held < all_of_it:
        return f"its boxes hold {held} of {all_of_it} elements"
    return None
