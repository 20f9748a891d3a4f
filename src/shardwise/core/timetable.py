"""This module reads and checks timetables of pipelines: a timetable lists the tasks of each rank in their order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.core.errors import ConfigError


class Task(NamedTuple):
    """A task has a ``kind``, F, B, I or W, a stage (0 is the first of the model) and a microbatch, as in ``F0.3``."""

    kind: str
    stage: int
    microbatch: int


Timetable = tuple[tuple[Task, ...], ...]
"""A timetable has the tasks of each rank of a pipeline, in the order in which the rank computes them."""

WORD = re.compile(r"([FBIW])(\d{1,9})\.(\d{1,9})")
LEGAL = (
    "F (forward), B (backward) or, in two parts, I (gradients of inputs) and W (gradients of weights), each with its "
    "stage and "
    "microbatch, such as F0.3"
)


def to_texts(timetable: Timetable) -> tuple[str, ...]:
    """Return the tasks of each rank as a text: ``F0.0 F0.1 B0.0 B0.1``; :func:`read` reads them back unchanged."""
    return tuple(" ".join(map(word, tasks)) for tasks in timetable)


def word(task: Task) -> str:
    """Return the text of a task, such as ``F0.3``."""
    return f"{task.kind}{task.stage}.{task.microbatch}"


def read(texts: Sequence[str], ranks: int, stages_per_rank: int | None, microbatches: int) -> Timetable:
    """Read a timetable from a text for each rank; raise :class:`ConfigError` unless ``ranks`` with ``stages_per_rank``
    stages each (None: any number, the same on all) can compute a step of ``microbatches`` microbatches by it.

    It may have more microbatches: :func:`first` leaves them out when it is used.
    """
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts) or len(texts) != ranks:
        legal = f"{ranks} texts, one for each rank over pp, of {LEGAL}."
        raise ConfigError.on("timetable", f"{texts!r} is not legal", legal)
    timetable = tuple(tuple(_task(rank, one) for one in text.split()) for rank, text in enumerate(texts))
    _check_stages(timetable, stages_per_rank)
    found = 1 + max(task.microbatch for tasks in timetable for task in tasks)
    if found < microbatches:
        raise ConfigError.on("timetable", f"it has {found} microbatches", f"at least microbatches = {microbatches}.")
    for rank, tasks in enumerate(timetable):
        _check_complete(rank, tasks, found)
    _check_order(timetable)
    return timetable


def first(timetable: Timetable, microbatches: int) -> Timetable:
    """Return only the tasks of the first ``microbatches``; those of different microbatches never need each other."""
    return tuple(tuple(task for task in tasks if task.microbatch < microbatches) for tasks in timetable)


def rank_of_stage(timetable: Timetable) -> tuple[int, ...]:
    """Return the rank of each stage."""
    found = {task.stage: rank for rank, tasks in enumerate(timetable) for task in tasks}
    return tuple(found[stage] for stage in range(len(found)))


def _task(rank: int, text: str) -> Task:
    match = WORD.fullmatch(text)
    if match is None:
        raise ConfigError.on("timetable", f'"{text}" is not legal', f"{LEGAL}.", part=f"rank {rank}")
    return Task(match[1], int(match[2]), int(match[3]))


def _check_stages(timetable: Timetable, stages_per_rank: int | None) -> None:
    """Check that every rank has the same number of stages and every stage is on one rank."""
    home: dict[int, int] = {}
    for rank, tasks in enumerate(timetable):
        for stage in {task.stage for task in tasks}:
            if (other := home.setdefault(stage, rank)) != rank:
                wrong = f"stage {stage} is on ranks {other} and {rank}"
                raise ConfigError.on("timetable", wrong, "each stage on one rank.")
    each = Counter(home.values())
    wanted = stages_per_rank or max(each.values(), default=1)
    for rank in range(len(timetable)):
        if each[rank] != wanted:
            words = ", ".join(str(stage) for stage in sorted(home) if home[stage] == rank) or "none"
            legal = f"{wanted} (stages_per_rank) on every rank."
            raise ConfigError.on("timetable", f"its stages are {words}", legal, part=f"rank {rank}")
    missing = [stage for stage in range(len(home)) if stage not in home]
    if missing:
        raise ConfigError.on("timetable", f"no rank has stage {missing[0]}", f"stages 0 to {len(home) - 1}.")


def _check_complete(rank: int, tasks: Sequence[Task], microbatches: int) -> None:
    """Check that every stage has F, and B or I and W, once for each microbatch."""
    times = Counter(tasks)
    for task in tasks:
        if times[task] > 1:
            wrong = f"{word(task)} is there {times[task]} times"
            raise ConfigError.on("timetable", wrong, "once.", part=f"rank {rank}")
    for stage in sorted({task.stage for task in tasks}):
        for m in range(microbatches):
            kinds = "".join(kind for kind in "FBIW" if Task(kind, stage, m) in times)
            if kinds not in ("FB", "FIW"):
                found = ", ".join(f"{kind}{stage}.{m}" for kind in kinds) or "nothing"
                wrong = f"of stage {stage} and microbatch {m} there is {found}"
                legal = f"F{stage}.{m} and B{stage}.{m}, or F{stage}.{m}, I{stage}.{m} and W{stage}.{m}."
                raise ConfigError.on("timetable", wrong, legal, part=f"rank {rank}")


def needs(task: Task, last: int) -> Iterable[tuple[str, int, int]]:
    """Return what must be computed before a task, with B for both B and I; ``last`` is the number of the last stage."""
    kind, stage, m = task
    if kind == "W":
        return (("B", stage, m),)
    if kind == "F":
        return (("F", stage - 1, m),) if stage else ()
    return (("F", stage, m), *((("B", stage + 1, m),) if stage < last else ()))


def _check_order(timetable: Timetable) -> None:
    """Check that no tasks wait for each other in a circle."""
    last = max(task.stage for tasks in timetable for task in tasks)
    done: set[tuple[str, int, int]] = set()
    place = [0] * len(timetable)

    def awaited(rank: int) -> tuple[str, int, int] | None:
        return next((need for need in needs(timetable[rank][place[rank]], last) if need not in done), None)

    before: list[int] = []
    while before != place:
        before = list(place)
        for rank, tasks in enumerate(timetable):
            while place[rank] < len(tasks) and awaited(rank) is None:
                kind, stage, m = tasks[place[rank]]
                done.add(("B" if kind == "I" else kind, stage, m))
                place[rank] += 1
    home = rank_of_stage(timetable)
    waits = [
        f"rank {rank} has {word(tasks[place[rank]])} next, which waits for {need[0]}{need[1]}.{need[2]} on rank "
        f"{home[need[1]]}"
        for rank, tasks in enumerate(timetable)
        if place[rank] < len(tasks) and (need := awaited(rank)) is not None
    ]
    if waits:
        raise ConfigError.on("timetable", "; ".join(waits), "orders in which no ranks wait for each other.")
