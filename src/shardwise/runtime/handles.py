"""Handles of operations under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Handle(Protocol):
    """A handle stands for an operation under way."""

    def wait(self) -> None:
        """Return when the operation is complete on this rank; it may be called more than once.

        Raises :class:`CommunicationTimeout` when it takes longer than the communicator's time-out.  With a backend
        between devices, such as NCCL, the current stream waits, not the host.
        """


class Completed:
    """This is the handle of an operation that is complete when it is posted."""

    def wait(self) -> None:
        return None


class Then:
    """This is the handle of several operations, after which comes a last piece of work, perhaps none."""

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], object] | None = None) -> None:
        self._handles, self._finish = handles, finish

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
