"""The snapshots of parameter servers: what a server goes on from, and what the weights of a run are put together from.

A snapshot is written by a fork of the server's process.  A fork sees the memory as it was when it began, and the system
copies only the pages that updates change meanwhile.  So updates go on, and of a table of which a few rows change hardly
anything is there twice.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.container import CHUNK, bytes_of, header, lay_out, opened, read_header
from shardwise.checkpoint.weights import Fitting

if TYPE_CHECKING:
    from shardwise.lower.compiled import Compiled
    from shardwise.runtime.served_store import ServedStore

LEDGER = "ledger"
FAILED = 255  # the exit code of a fork whose error has no number
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)  # what they mean to a server, they do not mean to its fork


@dataclass(frozen=True)
class Writing:
    """A snapshot of ``size`` bytes that process ``child`` writes into ``part``."""

    child: int
    part: Path
    path: Path
    size: int

    def wait(self) -> None:
        """Give the snapshot its name once it is on the disk; raise :class:`OSError` where it could not be written."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        written = self.part.stat().st_size if self.part.exists() else 0
        if code or written != self.size:
            self.part.unlink(missing_ok=True)
            if code < 0:
                raise OSError(f"{self.part}: the process that wrote it was ended by signal {-code}")
            if code in (0, FAILED):
                raise OSError(f"{self.part}: {written:,} of {self.size:,} bytes were written")
            raise OSError(code, os.strerror(code), str(self.part))
        os.replace(self.part, self.path)


def write_snapshot(path: Path, state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Writing:
    """Begin to write state and ledger as they are now; the caller may change them at once, and waits."""
    entries = lay_out([(name, tuple(value.shape), value.dtype) for name, value in state.items()])
    start = header(entries, {LEDGER: json.dumps(facts)})
    chunks = [memoryview(start), *(bytes_of(state[one.key]) for one in entries)]
    # A name of its own: a process that outlives its server must not write into what the next one writes.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    child = os.fork()
    if not child:
        _write_and_end(part, chunks)
    return Writing(child, part, path, sum(map(len, chunks)))


def _write_and_end(part: Path, chunks: Sequence[memoryview]) -> None:
    """Write a file in a fork, in which no other thread runs: locks that these had will never be free again, so nothing
    but system calls is done.  The server's sockets are closed, so that its port is free when the server is lost."""
    code = FAILED
    try:
        gc.disable()
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        for number in os.listdir("/proc/self/fd"):
            if int(number) > 2:
                with suppress(OSError):  # the list's own
                    os.close(int(number))
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        for chunk in chunks:
            done = 0
            while done < len(chunk):
                done += os.write(file, chunk[done : done + CHUNK])
        os.fsync(file)
        code = 0
    except OSError as error:
        code = error.errno or FAILED
    finally:
        os._exit(code)


def remove_parts(path: Path) -> None:
    """Remove what was being written to when an earlier process ended."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        part.unlink(missing_ok=True)


def snapshot_facts(path: Path) -> dict[str, Any] | None:
    """Return what the ledger of a server was at its last snapshot; None if there is none."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(read_header(path)[1][LEDGER])
    return found


def load_snapshot(store: ServedStore, path: Path) -> dict[str, Any] | None:
    """Let a server's store go on from its snapshot, one tensor after the other, and return the ledger's facts; None if
    there is none."""
    facts = snapshot_facts(path)
    if facts is not None:
        with opened(path) as read:
            store.load_state(Fitting({name: name for name in read_header(path)[0]}, read), facts["version"])
    return facts


def write_weights(path: Path, compiled: Compiled, stores: Iterator[ServedStore], buffers: Mapping[str, Tensor]) -> None:
    """Write the state dict of a model with parameters of servers, in master precision: one server's at a time.

    What no server has comes from ``buffers``, or is what the model starts from.
    """
    from shardwise.runtime.whole_state import first_names

    names = dict.fromkeys(first_names(compiled.module).values())
    learned = {p.name: (tuple(p.shape), b.wide) for b in compiled.buckets if b.learns for p in b.parameters}
    own = dict(compiled.module.named_buffers())
    rest = {n: buffers[n] if n in buffers else own.get(n, compiled.values[n]) for n in names if n not in learned}
    described = {name: learned.get(name) or (tuple(rest[name].shape), rest[name].dtype) for name in names}
    with _mapped(path, described) as tensors:
        for name, value in rest.items():
            tensors[name].copy_(value)
        for store in stores:
            for name, _, box, values in store.pieces():
                tensors[name][box.slices] = values


@contextmanager
def _mapped(path: Path, described: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Iterator[dict[str, Tensor]]:
    """Give the tensors of a new file, which the system writes while they are set; it has its name at the end."""
    entries = lay_out([(name, shape, dtype) for name, (shape, dtype) in described.items()])
    start, part = header(entries, {"format": "pt"}), path.with_suffix(".part")
    size = entries[-1].stop if entries else 0
    try:
        with part.open("wb") as file:
            file.write(start)
            file.flush()
            if size:  # a map of a file that has no room ends the process at its first write
                os.posix_fallocate(file.fileno(), 0, len(start) + size)
        whole = torch.empty(0, dtype=torch.uint8)
        if size:
            whole = torch.from_numpy(np.memmap(part, np.uint8, "r+", len(start), (size,)))
        yield {one.key: whole[one.start : one.stop].view(one.dtype).view(one.shape) for one in entries}
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


__all__ = ["Writing", "load_snapshot", "remove_parts", "snapshot_facts", "write_snapshot", "write_weights"]
