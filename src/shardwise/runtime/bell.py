"""How a rank that waits sleeps until another rank of its host has done something.

A rank says in its control segment that it sleeps, looks once more, and then waits at a pipe of its own.  Who has
published something for it looks at that word and writes to the pipe.  Between a store and a later load x86 promises no
order, so a ring may be missed: a rank never sleeps for long.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

FULL = 4096  # bytes that are read at once: more rings than there are ranks


class Bell:
    """The end at which this rank sleeps; ``fd`` is the other one, which others open."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Until somebody rings, but no longer than ``seconds``."""
        if self._poll.poll(1e3 * seconds):
            with suppress(BlockingIOError):
                os.read(self._read, FULL)

    def close(self) -> None:
        """Nobody sleeps here any more; who rings does so in vain."""
        for fd in (self._read, self.fd):
            if fd >= 0:
                os.close(fd)
        self._read = self.fd = -1


class Rope:
    """What rings the bell of another process."""

    def __init__(self, pid: int, fd: int) -> None:
        """Raises OSError where that process is gone or may not be looked into."""
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def pull(self) -> None:
        """Wake the other rank, now or as soon as it goes to sleep."""
        with suppress(BlockingIOError, BrokenPipeError):  # it has not heard of thousands of rings, or has left
            os.write(self._fd, b"\0")

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)
