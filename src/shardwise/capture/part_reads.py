"""What forward reads of a microbatch where it decides row by row, held against what it reads of the whole batch.

One device decides for all rows.  A microbatch that is captured for what it reads of its own rows computes the same for
them where each place in the code reads the same of both, or the part that its rows have of what is read of all, or a
sum over rows.  One whose capture reads nothing decides nothing: its part may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from shardwise.capture.reads import Read


def answers(reads: Sequence[Read]) -> dict[tuple[Any, str, str], list[Any]]:
    """Return the answers to ``reads``, one after the other, by the function and the call that read."""
    found: dict[tuple[Any, str, str], list[Any]] = {}
    for one in reads:
        found.setdefault((one.function, one.call, one.place), []).append(one.answer)
    return found


def apart(whole: Sequence[Read], parts: Sequence[Sequence[Read] | None]) -> str | None:
    """Return where (`` in encoder (model.py:7)``) the ``parts`` of a batch, in the order of their rows (None: one that
    decides nothing), read what does not follow from their rows and from what the ``whole`` batch reads; None if nothing
    is."""
    every, each = answers(whole), [None if one is None else answers(one) for one in parts]
    for key in dict.fromkeys(chain(every, *(one for one in each if one is not None))):
        of_all, of_parts = every.get(key, []), [None if one is None else one.get(key, []) for one in each]
        same = all(one in (None, of_all) for one in of_parts)
        if not (same or _sum(of_parts, of_all) or _joined_by_calls(of_parts, of_all)):
            return key[2]
    return None


def _joined_by_calls(parts: Sequence[Sequence[Any] | None], whole: Sequence[Any]) -> bool:
    """Whether what each of several calls reads of all rows, a list as in ``lengths.tolist()``, is made of what it reads
    of ``parts``; a place in a loop is called several times."""
    most = math.gcd(len(whole), *(len(one) for one in parts if one is not None))

    def of(one: Sequence[Any], call: int, calls: int) -> Sequence[Any]:
        size = len(one) // calls
        return one[call * size : (call + 1) * size]

    return any(
        all(_joined([None if one is None else of(one, k, calls) for one in parts], of(whole, k, calls))
            for k in range(calls))
        for calls in range(1, most + 1) if most % calls == 0
    )  # fmt: skip


def _joined(parts: Sequence[Sequence[Any] | None], whole: Sequence[Any]) -> bool:
    """Whether ``whole`` is made of ``parts`` one after the other."""
    if not parts:
        return not whole
    first, *others = parts
    if first is None:
        return any(_joined(others, whole[start:]) for start in range(len(whole) + 1))
    return whole[: len(first)] == first and _joined(others, whole[len(first) :])


def _sum(parts: Sequence[Sequence[Any] | None], whole: Sequence[Any]) -> bool:
    """Whether the numbers of ``whole`` are the sums of those of ``parts``; no more than them if one can be anything."""
    known = [one for one in parts if one is not None]
    if any(type(number) is not int for number in chain(whole, *known)) or {len(one) for one in known} != {len(whole)}:
        return False
    sums = [sum(each) for each in zip(*known, strict=True)]
    return sums == whole if len(known) == len(parts) else all(a <= b for a, b in zip(sums, whole, strict=True))


__all__ = ["apart"]
