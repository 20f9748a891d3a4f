"""A waiting rank sleeps until another rank of its host wakes it.

A rank says in its control segment that it sleeps, looks once more, and then waits at a pipe of its own.  A rank that
publishes something for it looks at that word and writes to the pipe.  x86 promises no order between a store and a later
load, so a wake-up may be missed: a rank never sleeps for long.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

FULL = 4096  # bytes that are read at once, one for each wake-up: more than there are ranks


class WakeupPipe:
    """A rank sleeps at the read end of this pipe, and other ranks open the write end ``fd``."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Sleep until another rank wakes this one, but no longer than ``seconds``."""
        if self._poll.poll(1e3 * seconds):
            with suppress(BlockingIOError):
                os.read(self._read, FULL)

    def close(self) -> None:
        """Close both ends; a later wake-up has no effect."""
        for fd in (self._read, self.fd):
            if fd >= 0:
                os.close(fd)
        self._read = self.fd = -1


class Waker:
    """A waker wakes the rank of another process."""

    def __init__(self, pid: int, fd: int) -> None:
        """Open the write end of its pipe.  Raises OSError where that process is gone or denies access."""
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Wake the other rank, now or as soon as it goes to sleep."""
        with suppress(BlockingIOError, BrokenPipeError):  # its pipe is full of unread bytes, or it has left
            os.write(self._fd, b"\0")

    def close(self) -> None:
        """Close this end of the pipe."""
        os.close(self._fd)
