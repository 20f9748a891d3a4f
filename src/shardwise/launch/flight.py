"""Report the ranks' last collectives when a run hangs, from the flight recorder of torch's communication backends.

Torch keeps the last collectives of a process in a ring buffer, and writes them into a file when a pipe is written to;
:meth:`shardwise.backend.Backend.flight_recorder` gives the environment variables that make it do so.  The files are
pickles of plain objects: a dict with the list ``entries`` (the collectives) and the dict ``pg_config`` (the process
groups).
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

STEM = "flight_"  # rank N has the pipe flight_N.pipe and the file flight_N
ANSWER_TIME = 5.0  # seconds that ranks have to write: torch checks the pipe once a second
POLL = 0.1
SHOWN = 3  # the most collectives of a rank in the report


@dataclass(frozen=True)
class RecordedCollective:
    """This is a collective, or a message between two ranks, that a rank has posted.

    It is the ``number``-th collective, or message, of its process group.  ``state`` is "scheduled", "started" or
    "completed", and ``time`` is when it was posted, in nanoseconds.
    """

    group: str
    message: bool
    number: int
    name: str
    sizes: str
    state: str
    time: int

    @property
    def key(self) -> tuple[str, bool, int]:
        """Return the key of the collective, which is the same on all ranks that take part."""
        return self.group, self.message, self.number


@dataclass(frozen=True)
class Flight:
    """This is what a rank's recorder held, the oldest first; ``groups`` maps each process group to its ranks."""

    groups: Mapping[str, tuple[int, ...]]
    collectives: tuple[RecordedCollective, ...]

    def of(self, key: tuple[str, bool, int]) -> RecordedCollective | None:
        return next((one for one in reversed(self.collectives) if one.key == key), None)

    def is_past(self, key: tuple[str, bool, int]) -> bool:
        """Return whether the recorder has a later collective of the group, so that it may have dropped this one."""
        return any(one.key[:2] == key[:2] and one.number > key[2] for one in self.collectives)


class _Plain(pickle.Unpickler):
    """This unpickles only dicts, lists, tuples, strings and numbers."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump of collectives")


def parse(dump: bytes) -> Flight:
    """Parse the bytes of a dump; raise ValueError if they are something else."""
    try:
        found = _Plain(io.BytesIO(dump)).load()
        groups = {str(name): _ranks(one["ranks"]) for name, one in found["pg_config"].items()}
        return Flight(groups, tuple(_collective(entry) for entry in found.get("entries", [])))
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"no dump of collectives: {error}") from error


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.strip("[] ").split(",") if one.strip())


def _collective(entry: Mapping[str, Any]) -> RecordedCollective:
    message = bool(entry["is_p2p"])
    number = int(entry["p2p_seq_id" if message else "collective_seq_id"])
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    sizes = ", ".join(str(one) for one in entry["input_sizes"])
    group = str(entry["process_group"][0])
    return RecordedCollective(group, message, number, name, sizes, str(entry["state"]), int(entry["time_created_ns"]))


def collect(folder: Path, pipes: Path | None) -> dict[int, Flight]:
    """Ask all ranks with a pipe in ``pipes``, and wait at most :data:`ANSWER_TIME` for what they write into ``folder``;
    ranks that do not answer are left out."""
    asked: dict[int, float] = {}
    for pipe in () if pipes is None else pipes.glob(f"{STEM}*.pipe"):
        with suppress(OSError, ValueError):  # no process reads the pipe any more
            rank, file = int(pipe.name[len(STEM) : -len(".pipe")]), os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                before = time.time()
                os.write(file, b"dump\n")
                asked[rank] = before
            finally:
                os.close(file)
    found: dict[int, Flight] = {}
    deadline = time.monotonic() + ANSWER_TIME
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(POLL)
        for rank in asked.keys() - found.keys():
            path = folder / f"{STEM}{rank}"
            with suppress(OSError, ValueError):  # the file is not there yet, or not complete
                if path.stat().st_mtime >= asked[rank] - 1.0:  # the clocks of file systems are coarse
                    found[rank] = parse(path.read_bytes())
    return found


def report(flights: Mapping[int, Flight]) -> list[str]:
    """Return a line with the first collective on which ranks differ, and for each rank one with its unfinished
    collectives, or its last one."""
    if not flights:
        return []
    lines = [first] if (first := _first_difference(flights)) else []
    for rank, flight in sorted(flights.items()):
        pending = [one for one in flight.collectives if one.state != "completed"]
        shown = pending[:SHOWN] or list(flight.collectives[-1:])
        words = [f"{_words(one, flight)}: {one.state}" for one in shown]
        more = [f"{len(pending) - SHOWN} more"] if len(pending) > SHOWN else []
        lines.append(f"rank {rank}, collectives: {'; '.join(words + more) or 'none'}")
    return lines


def _words(one: RecordedCollective, flight: Flight) -> str:
    """Return ``all_gather 12 of group 5 among ranks [0, 1]``."""
    ranks = flight.groups.get(one.group)
    return f"{one.name} {one.number} of group {one.group}" + (f" among ranks {list(ranks)}" if ranks else "")


def _first_difference(flights: Mapping[int, Flight]) -> str | None:
    """Describe the first collective that ranks have not all posted alike, else the first with unlike states."""
    posted = sorted(_differences(flights), key=lambda one: (not one[0], one[1]))
    return posted[0][2] if posted else None


def _differences(flights: Mapping[int, Flight]) -> Iterator[tuple[bool, int, str]]:
    """Yield (whether ranks differ in what they posted, time, words) for the collectives whose states differ by rank."""
    seen: set[tuple[str, bool, int]] = set()
    for flight in flights.values():
        for one in flight.collectives:
            if one.key in seen or one.state == "completed":
                continue
            seen.add(one.key)
            members = [rank for rank in flight.groups.get(one.group, tuple(flights)) if rank in flights]
            states = {rank: _state(flights[rank], one) for rank in members}
            if len(set(states.values())) > 1:
                absent = any(state.startswith("has ") for state in states.values())
                told = ", ".join(f"rank {rank} {state}" for rank, state in states.items())
                yield absent, one.time, f"collectives differ first at {_words(one, flight)}: {told}"


def _state(flight: Flight, like: RecordedCollective) -> str:
    own = flight.of(like.key)
    if own is None:
        return "completed" if flight.is_past(like.key) else "has not posted it"
    if like.message or (own.name, own.sizes) == (like.name, like.sizes):
        return own.state
    return f"has posted {own.name} of {own.sizes}"
