"""Hide what is exchanged inside layers: microbatches run in pairs, one of which computes while the values of the other
one are under way (``overlap = "pairs"``).

Tensor, context and expert parallelism exchange activations between one product and the next, so that a single
microbatch has nothing to compute meanwhile. Two have: DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) runs the forward of
one and the backward of another in turns, at the price of the activations of one more microbatch. Without a pipeline,
pairs are two forwards, then the two backwards, which hides all of both. In a pipeline they are a forward and a backward
that a rank could begin at the same time: pairs never make a rank wait for what it need not wait for, so a schedule has
as many as it has slack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.errors import ConfigError, check_choice
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.tensor_options import Overlap, tensor_axes
from shardwise.core.timetable import Task, Timetable, needs

Group = tuple[Task, ...]
"""One task, or two that run as a pair."""


def overlapped(plan: Plan, overlap: Overlap) -> Plan:
    """Return ``plan`` with what layers exchange hidden in this way.

    Raises :class:`ConfigError` where there is nothing to hide, or nothing to hide it under.
    """
    check_choice("overlap", overlap, CHOICES["overlap"])
    if overlap == "pairs":
        if not tensor_axes(plan.mesh):
            wrong = '"pairs" is not legal without ranks that share layers: nothing is exchanged inside them'
            raise ConfigError.on("overlap", wrong, '"none", or tp, cp or ep of 2 or more.')
        if plan.microbatches < 2:
            wrong = '"pairs" is not legal with microbatches = 1: there is nothing to compute meanwhile'
            raise ConfigError.on("overlap", wrong, '"none", or microbatches of 2 or more.')
        if plan.asynchronous:
            wrong = f'"pairs" is not legal with schedule "{plan.pipeline.schedule}", which updates between microbatches'
            raise ConfigError.on("overlap", wrong, '"none", or another schedule.')
    return plan.replace(overlap=overlap)


def neighbours(tasks: Sequence[Task]) -> Iterator[Group]:
    """Yield the tasks in pairs of equal ones of two microbatches, where these follow each other."""
    waiting: Task | None = None
    for task in tasks:
        if waiting is not None and waiting[:2] == task[:2]:
            yield waiting, task
            waiting = None
            continue
        if waiting is not None:
            yield (waiting,)
        waiting = task
    if waiting is not None:
        yield (waiting,)


def together(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of a rank that computes all stages, so that those of microbatches 2k and 2k + 1 come together:
    what both have of a kind and a stage, in the order of the first."""
    found: list[Task] = []
    for pair in dict.fromkeys(task.microbatch // 2 for task in tasks):
        mine = [task for task in tasks if task.microbatch // 2 == pair]
        for kind, stage in dict.fromkeys(task[:2] for task in mine):
            found += [task for task in mine if task[:2] == (kind, stage)]
    return found


def paired(timetable: Timetable) -> tuple[tuple[Group, ...], ...]:
    """Return the tasks of each rank in groups: a forward and a backward of different microbatches are a pair if both
    could begin when the first of them does, in a play of the timetable in which every rank does one group at a time."""
    last = max((task.stage for tasks in timetable for task in tasks), default=0)
    place, done = [0] * len(timetable), set[tuple[str, int, int]]()
    found: list[list[Group]] = [[] for _ in timetable]
    while any(at < len(tasks) for at, tasks in zip(place, timetable, strict=True)):
        begun: list[Task] = []
        for rank, tasks in enumerate(timetable):
            ready = [task for task in tasks[place[rank] : place[rank] + 2] if done.issuperset(needs(task, last))]
            if not ready or ready[0] != tasks[place[rank]]:
                continue
            group = tuple(ready) if len(ready) == 2 and _fit(*ready) else (ready[0],)
            found[rank].append(group)
            place[rank] += len(group)
            begun += group
        if not begun:
            raise ConfigError.on("timetable", "its tasks wait for each other in a circle", "another order.")
        done |= {("B" if task.kind == "I" else task.kind, task.stage, task.microbatch) for task in begun}
    return tuple(map(tuple, found))


def _fit(first: Task, second: Task) -> bool:
    """Whether two tasks can be a pair."""
    return first.microbatch != second.microbatch and {first.kind, second.kind} in ({"F", "B"}, {"F", "I"})
