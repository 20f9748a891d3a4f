"""Events in a device's compute stream show how far it has come while the host runs ahead, and make nothing wait."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

POLL = 0.1  # seconds between two looks: each takes Python's global lock for some microseconds
MOST = 20_000  # the most marks under way, of several steps: beyond them the device's place is less exact


class DeviceEvent(Protocol):
    """This is the part of ``torch.Event`` that is used here."""

    def record(self) -> None:
        """Put the event behind all work issued to the current stream of the thread's current device, the rank's."""

    def query(self) -> bool:
        """Return, without waiting, whether the device has passed the event."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark is a place in the device's work: once the device has passed ``event``, it has begun ``doing``.

    ``number`` counts the marks from 1, in the order of issue.
    """

    number: int
    step: int
    position: int
    doing: bytes
    event: DeviceEvent


class Marks:
    """This puts marks into a device's work, and calls ``passed`` with the latest that the device has passed, from a
    thread of its own.

    ``make`` gives a new event that has just been recorded.  Events are reused, so that after some steps none are made.

    A CUDA graph can be captured meanwhile only in a mode that lets other threads query events ("thread_local"), and
    without marks in it.
    """

    def __init__(self, make: Callable[[], DeviceEvent], passed: Callable[[Mark], None], poll: float = POLL) -> None:
        self._make, self._passed, self._poll = make, passed, poll
        # The host appends, the thread takes: each operation of a deque is atomic.
        self._under_way: deque[Mark] = deque()
        self._free: deque[DeviceEvent] = deque()
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shardwise-device", daemon=True)
        self._thread.start()

    def put(self, step: int, position: int, doing: bytes) -> int:
        """Mark that the host issues ``doing`` now, and return the number of the latest mark."""
        if len(self._under_way) >= MOST:
            return self._number
        if self._free:
            event = self._free.pop()
            event.record()
        else:
            event = self._make()
        self._number += 1
        self._under_way.append(Mark(self._number, step, position, doing, event))
        return self._number

    def close(self) -> None:
        """Stop following the device."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while not self._ended.wait(self._poll):
                self._look()
        except RuntimeError:  # the device itself has failed, as the host will find
            return

    def _look(self) -> None:
        """Report the latest mark that the device has passed: it passes marks in their order."""
        marks = list(self._under_way)
        count = bisect_left(marks, True, key=lambda one: not one.event.query())
        for one in marks[:count]:
            self._under_way.popleft()
            self._free.append(one.event)
        if count:
            self._passed(marks[count - 1])
