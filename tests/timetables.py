"""Timetables played by hand: slow, plain, and no code of the simulator's, to compare it with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import Task, Timetable
from shardwise.core.timetable import needs as computed_before
from shardwise.estimate.simulate import Costs

NAMES = tuple(SCHEDULES)
SYNCHRONOUS = tuple(name for name, schedule in SCHEDULES.items() if not schedule.asynchronous)


def uniform(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, transfer: float = 0.0) -> Costs:
    """The costs of equal stages, with one byte of activations each."""
    return Costs((forward,) * stages, (input,) * stages, (weight,) * stages, transfer=(transfer,) * (stages - 1))


def numbers(name: str, ranks: int = 8, microbatches: int = 20) -> Iterator[tuple[int, int, int]]:
    """All legal (ranks, microbatches, stages per rank) up to these, with one to four stages a rank."""
    schedule = SCHEDULES[name]
    for p in range(1, ranks + 1):
        for m in range(
            max(1, schedule.min_microbatches_per_rank * p),
            min(microbatches, schedule.max_microbatches or microbatches) + 1,
        ):
            yield from ((p, m, v) for v in range(1, 5) if schedule.takes(v))


def needs(task: Task, stages: int) -> list[Task]:
    """The tasks that must have ended before ``task``; I stands for a whole backward too."""
    kind, stage, m = task
    if kind == "F":
        return [Task("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Task("I", stage, m)]
    return [Task("F", stage, m), *([Task("I", stage + 1, m)] if stage + 1 < stages else [])]


def play(
    timetable: Timetable, seconds: dict[str, float], transfer: float = 0.0, together: frozenset[Task] = frozenset()
) -> list[dict[Task, tuple[float, float]]]:
    """Start and end of the tasks of each rank, every rank doing the next of its tasks as soon as it can.

    A forward in ``together`` and the backward after it are one piece: both start and end at once.
    """
    stages = 1 + max(task.stage for tasks in timetable for task in tasks)
    home = {task.stage: rank for rank, tasks in enumerate(timetable) for task in tasks}
    ended: dict[Task, float] = {}
    found: list[dict[Task, tuple[float, float]]] = [{} for _ in timetable]
    clock, place = [0.0] * len(timetable), [0] * len(timetable)
    while any(place[rank] < len(tasks) for rank, tasks in enumerate(timetable)):
        before = list(place)
        for rank, tasks in enumerate(timetable):
            while place[rank] < len(tasks):
                count = 2 if tasks[place[rank]] in together else 1
                piece = tasks[place[rank] : place[rank] + count]
                wanted = [need for task in piece for need in needs(task, stages)]
                if not all(need in ended for need in wanted):
                    break
                arrivals = [ended[need] + (transfer if home[need.stage] != rank else 0.0) for need in wanted]
                start = max([clock[rank], *arrivals])
                clock[rank] = start + sum(seconds[task.kind] for task in piece)
                for task in piece:
                    found[rank][task] = (start, clock[rank])
                    ended[task._replace(kind="I") if task.kind == "B" else task] = clock[rank]
                place[rank] += count
        assert place != before, (
            f"tasks wait for each other: {[t[i] for t, i in zip(timetable, place, strict=True) if i < len(t)]}"
        )
    return found


def alive(tasks: tuple[Task, ...]) -> int:
    """The most activations of a rank, stage by stage, from forward to the end of backward."""
    now = most = 0
    for task in tasks:
        now += {"F": 1, "I": 0}.get(task.kind, -1)
        most = max(most, now)
    assert now == 0
    return most


def any_order(home: Sequence[int], microbatches: int, draw: random.Random) -> Timetable:
    """Tasks in an order that ranks can compute, one drawn after the other among all that could be next; backward now
    whole, now in two.
    """
    last = len(home) - 1
    left = [
        Task(kind, s, m) for s in range(last + 1) for m in range(microbatches) for kind in draw.choice(("FB", "FIW"))
    ]
    found: list[list[Task]] = [[] for _ in range(1 + max(home))]
    done: set[tuple[str, int, int]] = set()
    while left:
        task = draw.choice([one for one in left if done.issuperset(computed_before(one, last))])
        left.remove(task)
        found[home[task.stage]].append(task)
        done.add((task.kind.replace("I", "B"), *task[1:]))
    return tuple(map(tuple, found))
