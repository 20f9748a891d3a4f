"""A draft of a timetable leaves W out, and a filler puts W where ranks would wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.core.timetable import Task, Timetable
from shardwise.estimate.simulate import Costs


@dataclass(frozen=True)
class PlanDraft:
    """For each rank, the forwards and the backwards in order (B, or I with a W to follow), the number of forwards
    ``ahead`` of each backward, and the ``least`` number that it needs, up to its own forward."""

    forwards: tuple[tuple[Task, ...], ...]
    backwards: tuple[tuple[Task, ...], ...]
    ahead: tuple[tuple[int, ...], ...]
    least: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, timetable: Timetable, kind: str) -> PlanDraft:
        """Return the draft of a timetable, with backwards of ``kind``, B or I."""
        parts = []
        for tasks in timetable:
            forwards = tuple(task for task in tasks if task.kind == "F")
            backwards = tuple(Task(kind, *task[1:]) for task in tasks if task.kind in "BI")
            done = accumulate(task.kind == "F" for task in tasks)
            place = {task[1:]: at for at, task in enumerate(forwards, 1)}
            ahead = tuple(n for task, n in zip(tasks, done, strict=True) if task.kind in "BI")
            parts.append((forwards, backwards, ahead, tuple(accumulate((place[task[1:]] for task in backwards), max))))
        return cls(*zip(*parts, strict=True))


class _Rank:
    """What a rank has done of a draft, and what it still has to do."""

    __slots__ = ("ahead", "backwards", "begin", "done", "due", "forwards", "limit", "now", "tasks", "used")

    def __init__(
        self,
        forwards: Sequence[Task],
        backwards: Sequence[Task],
        ahead: Iterable[int],
        least: Iterable[int],
        shift: int,
        limit: float,
    ) -> None:
        self.limit = limit
        self.forwards, self.backwards = deque(forwards), deque(backwards)
        self.ahead = deque(min(max(n + shift, low), len(forwards)) for n, low in zip(ahead, least, strict=True))
        self.due: deque[Task] = deque()
        self.tasks: list[Task] = []
        self.done = 0  # the number of forwards
        self.used = self.now = 0.0
        self.begin = -1.0


class Filler:
    """Makes timetables from drafts, for these costs and with at most ``limits`` bytes of activations on each rank;
    ``home`` is the rank of each stage."""

    def __init__(self, costs: Costs, home: Mapping[int, int], microbatches: int, limits: Sequence[float]) -> None:
        self.costs, self.limits, n, m = costs, [limit * (1 + 1e-12) for limit in limits], costs.stages, microbatches
        # Tasks are numbered: F by stage and microbatch, then all backwards.  Each kind and stage has the seconds and
        # bytes of a task, the numbers of its task of microbatch 0 and of the task that needs its result, and the
        # seconds until that arrives there.
        self.kinds: dict[tuple[str, int], tuple[float, float, int, int, float]] = {}
        self.numbers = 2 * n * m
        moved = [costs.transfer[edge] if home[edge] != home[edge + 1] else 0.0 for edge in range(n - 1)]
        for s, (held, kept) in enumerate(zip(costs.activations, costs.weight_activations, strict=True)):
            after, delay = (s + 1, moved[s]) if s < n - 1 else (n + s, 0.0)
            self.kinds["F", s] = (costs.forward[s], held, s * m, after * m, delay)
            after, delay = (n + s - 1, moved[s - 1]) if s else (2 * n, 0.0)
            self.kinds["I", s] = (costs.input[s], kept - held, (n + s) * m, after * m, delay)
            self.kinds["B", s] = (costs.backward[s], -held, (n + s) * m, after * m, delay)
        self.microbatches = m

    def fill(
        self, draft: PlanDraft, fit: float, shifts: Sequence[int]
    ) -> tuple[Timetable, list[float], list[float]] | None:
        """Return the timetable, and the seconds at which each rank begins and ends; None if no such order fits the
        memory.

        A W is put before a task whose input arrives after the rank is free, if at least the fraction ``fit`` of the W
        is over by then, and before a task that needs its memory.  Rank r runs ahead by ``shifts[r]`` more forwards than
        in the draft, if there are any; a forward for which there is no memory waits for the next backward.
        """
        ranks = [
            _Rank(*parts)
            for parts in zip(
                draft.forwards, draft.backwards, draft.ahead, draft.least, shifts, self.limits, strict=True
            )
        ]
        # The last numbers stand for what the backwards of the first stage hand on, which no task needs.
        arrived: list[float | None] = [0.0] * self.microbatches + [None] * self.numbers
        waits: dict[int, int] = {}
        ready = list(range(len(ranks)))
        while ready:
            rank = ready.pop()
            number = self._run(ranks[rank], fit, arrived, waits, ready)
            if number >= 0:
                waits[number] = rank
        if any(one.backwards for one in ranks):
            return None
        for one in ranks:
            one.tasks.extend(one.due)
            one.now += sum(self.costs.weight[task.stage] for task in one.due)
        return tuple(tuple(one.tasks) for one in ranks), [one.begin for one in ranks], [one.now for one in ranks]

    def _run(self, one: _Rank, fit: float, arrived: list[float | None], waits: dict[int, int], ready: list[int]) -> int:
        """Run a rank up to a task whose input has not been computed, and return that task's number; -1 if the rank has
        ended or has no memory left."""
        kinds, due, weight, kept = self.kinds, one.due, self.costs.weight, self.costs.weight_activations
        while one.backwards:
            forward = one.done < one.ahead[0]
            task = (one.forwards if forward else one.backwards)[0]
            kind, stage, microbatch = task
            seconds, taken, first, after, delay = kinds[kind, stage]
            begin = arrived[first + microbatch]
            if begin is None:
                return first + microbatch
            while due and (one.used + taken > one.limit or one.now + fit * weight[due[0].stage] <= begin):
                filler = due.popleft()
                one.tasks.append(filler)
                one.now += weight[filler.stage]
                one.used -= kept[filler.stage]
            if one.used + taken > one.limit:
                if not forward:
                    return -1
                one.ahead[0] = one.done
                continue
            if one.begin < 0:
                one.begin = begin
            one.now = max(one.now, begin) + seconds
            one.used += taken
            one.tasks.append(task)
            if forward:
                one.forwards.popleft()
                one.done += 1
            else:
                one.backwards.popleft()
                one.ahead.popleft()
                if kind == "I":
                    due.append(Task("W", stage, microbatch))
            arrived[after + microbatch] = one.now + delay
            if after + microbatch in waits:
                ready.append(waits.pop(after + microbatch))
        return -1
