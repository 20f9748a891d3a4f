"""Pack examples into rows of one length, whole, so that little of a row stays empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


def pack(lengths: Sequence[int] | Places, size: int) -> tuple[Places, Places]:
    """Return which examples share a row of ``size`` tokens: ``order`` (examples,), and ``starts`` (rows + 1,): row r
    has the examples ``order[starts[r] : starts[r + 1]]``.

    Each example, longest first, goes into the row that it fills best (best fit decreasing, which takes at most 11/9 of
    the fewest rows possible, and one more). No length may be above ``size``; the same lengths give the same rows.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit n is set if a row has room for exactly n tokens
    for example in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = int(lengths[example])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(example)
        else:
            room, row = size, len(rows)
            rows.append([example])
        by_room.setdefault(room - length, []).append(row)
        rooms |= 1 << (room - length)
    starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return np.array([example for row in rows for example in row], dtype=np.int64), starts
