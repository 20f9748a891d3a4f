"""Processes of one host share memory that has no name: nothing needs to be unlinked, and a crash leaves nothing behind.

A segment is an anonymous file (``memfd_create``) of the process that owns it.  Others map it through
``/proc/<pid>/fd/<fd>``, so (pid, fd) is its address.  Unlike files in ``/dev/shm`` it is bounded by the
machine's memory only, not by the size of a mount, which containers often keep at 64 MB.
"""

from __future__ import annotations

import mmap
import os
import platform
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError

BLOCK = 64 << 20  # bytes of address space per segment of an arena; pages are taken only when touched
ALIGNMENT = 64  # bytes
MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class SharedSegment:
    """A segment is ``nbytes`` of zeroed shared memory; ``fd`` must stay open while other processes may map it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("shardwise")
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)
        self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def close(self) -> None:
        """Close ``fd``: no new process can map the segment after this; those that have mapped it keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_segment(pid: int, fd: int) -> mmap.mmap:
    """Map another process's segment.  Raises OSError where that process is gone or denies access."""
    handle = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)


class Arena:
    """An arena allocates buffers in segments of this process, and never gives them back."""

    def __init__(self) -> None:
        self._segments: list[SharedSegment] = []
        self._used = 0  # bytes used of the last segment

    def allocate(self, nbytes: int) -> Tensor:
        """Return ``nbytes`` zeroed bytes, 64-byte aligned.  Raises :class:`ShardwiseError` where memory is short."""
        if not self._segments or self._used + nbytes > self._segments[-1].nbytes:
            if nbytes > BLOCK and nbytes > (free := available_memory()):
                raise ShardwiseError(
                    f"shared memory: {nbytes >> 20} MiB wanted, {free >> 20} MiB of memory are available"
                )
            self._segments.append(SharedSegment(max(BLOCK, nbytes)))
            self._used = 0
        start = self._used
        self._used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return self._segments[-1].bytes[start : start + nbytes]

    def locate(self, x: Tensor) -> tuple[int, int] | None:
        """Return (fd, offset in bytes) of a tensor that lies in the arena, aligned to its elements, else None."""
        start = x.data_ptr()
        for segment in self._segments:
            offset = start - segment.address
            if 0 <= offset < segment.nbytes:
                return (segment.fd, offset) if offset % x.itemsize == 0 else None
        return None

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def unsupported() -> str | None:
    """Return why processes of this machine cannot communicate through shared memory, or None."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return "shared memory needs Linux with memfd_create"
    if platform.machine() not in ("x86_64", "AMD64"):
        # The protocol relies on x86's order: stores become visible in program order, and loads happen in it.
        return f"shared memory needs an x86-64 processor, this is {platform.machine()}"
    return None


def available_memory() -> int:
    """Return the bytes that this process can still take: the machine's, or less where a control group sets a limit."""
    free = 1 << 62
    with suppress(OSError, ValueError):
        free = _numbers(MEMINFO).get("MemAvailable:", free >> 10) << 10
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        # What is used includes files that the kernel has cached and forgets as soon as memory is short.
        cached = _numbers(CONTROL_GROUP / "memory.stat").get("inactive_file", 0)
        free = min(free, limit - used + cached)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the word that stands before it."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
