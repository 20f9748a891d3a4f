"""The simulation finds the time that a timetable takes from the seconds of each stage, with an event for every task.

Every rank computes its tasks in order, each as soon as the rank is free and what the task needs has arrived: for a
forward the output of the stage before, for a backward the gradient from the stage after, ``transfer`` seconds after it
was made if it comes from another rank.  Transfers overlap with computing: the sender goes on at once, and they do not
slow each other down.

Two definitions of *bubble* are in use.  With T the time of a step and w the seconds that a rank computes, it is (T - w)
/ T of **total** time, or (T - w) / w of **ideal** time, which the step would take if no rank ever waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, ShardwiseError, check_choice
from shardwise.core.timetable import Task, Timetable

NORMS = ("barrier", "post-validate")
"""Ranks take their optimizer step once the norm of all gradients is known, or each at the end of its own work."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of each stage for one microbatch.

    ``backward`` is the time of B, by default that of I and W.  ``transfer`` is the time from stage s to s + 1, or back,
    if they are on different ranks: one number less than there are stages, by default 0.  ``activations`` are the bytes
    held from F to the end of B, or of I; ``weight_activations`` those held from I to the end of W (by default as many).
    ``step`` is the time of the optimizer's step of a stage's parameters, ``norm`` that of the reduction of the global
    norm.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    backward: Sequence[float] = ()
    transfer: Sequence[float] = ()
    activations: Sequence[float] = ()
    weight_activations: Sequence[float] = ()
    step: Sequence[float] = ()
    norm: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.forward)
        activations = self.activations or (1.0,) * n
        default: dict[str, Sequence[float]] = {
            "backward": [i + w for i, w in zip(self.input, self.weight, strict=False)], "transfer": (0.0,) * (n - 1),
            "activations": activations, "weight_activations": activations, "step": (0.0,) * n,
        }  # fmt: skip
        for name in ("forward", "input", "weight", *default):
            values = tuple(float(x) for x in getattr(self, name) or default.get(name, ()))
            wanted = n - 1 if name == "transfer" else n
            if len(values) != wanted or not all(0.0 <= x < float("inf") for x in values):
                wrong = f"{values} is not legal for {n} stages"
                raise ConfigError.on(f"costs.{name}", wrong, f"{wanted} finite numbers of at least 0.")
            object.__setattr__(self, name, values)

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> dict[str, Sequence[float]]:
        """The seconds of each kind of task, by stage."""
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}


@dataclass(frozen=True)
class Simulation:
    """A step of a timetable: ``start`` and ``stop`` are the seconds of every task, one array per rank, in its order.

    ``seconds`` is the time of the step.  Under ``barrier`` it is from the first task to the end of the slowest
    optimizer step; under ``post-validate`` the longest that any rank takes from its first task to the end of its own
    optimizer step, as steps follow each other at that period.  ``work`` has the seconds that each rank computes, its
    optimizer step included.  ``peak_bytes`` is, for each rank, the most bytes of activations at once.  ``critical``
    is the path, as (rank, place in its list), of tasks that each started when the one before had ended or arrived; the
    last ends the step.
    """

    timetable: Timetable
    start: tuple[Floats, ...]
    stop: tuple[Floats, ...]
    seconds: float
    work: Floats
    peak_bytes: tuple[float, ...]
    critical: tuple[tuple[int, int], ...]

    @property
    def bubble_of_total(self) -> float:
        """The fraction of their whole time that ranks wait."""
        return 1.0 - float(self.work.sum()) / (len(self.work) * self.seconds)

    @property
    def bubble_of_ideal(self) -> float:
        """The time that ranks wait, divided by the time that they compute."""
        return len(self.work) * self.seconds / float(self.work.sum()) - 1.0

    @property
    def rank_bubbles_of_total(self) -> Floats:
        """:attr:`bubble_of_total` of each rank by itself."""
        return 1.0 - self.work / self.seconds

    @property
    def rank_bubbles_of_ideal(self) -> Floats:
        """:attr:`bubble_of_ideal` of each rank by itself."""
        return self.seconds / self.work - 1.0


def simulate(timetable: Timetable, costs: Costs, norm: str = "barrier") -> Simulation:
    """Simulate a timetable; a stage belongs to the rank whose list has it.

    Raises :class:`ConfigError` for costs of another number of stages, and :class:`ShardwiseError` for a timetable that
    cannot run, with the tasks that wait for each other.
    """
    check_choice("norm", norm, NORMS)
    places = {(task.stage, rank) for rank, tasks in enumerate(timetable) for task in tasks}
    home = dict(sorted(places))
    if len(home) < len(places):
        raise ShardwiseError(f"The timetable cannot run: a stage is on two ranks, of (stage, rank) {sorted(places)}.")
    if sorted(home) != list(range(costs.stages)):
        raise ConfigError(f"costs: those of {costs.stages} stages do not fit a timetable of stages {sorted(home)}.")
    events = _Events(timetable, costs, home)
    events.play()
    step = np.zeros(len(timetable))
    np.add.at(step, [home[stage] for stage in range(costs.stages)], costs.step)
    begin, end = (
        np.array([times[place] for times in lists]) for lists, place in ((events.start, 0), (events.stop, -1))
    )
    last = int((end if norm == "barrier" else end + step - begin).argmax())
    seconds = end[last] + costs.norm + step.max() if norm == "barrier" else end[last] + step[last] - begin[last]
    start, stop = tuple(map(np.array, events.start)), tuple(map(np.array, events.stop))
    table = costs.seconds
    work = step + [sum(table[kind][stage] for kind, stage, _ in tasks) for tasks in timetable]
    return Simulation(timetable, start, stop, float(seconds), work, _peaks(timetable, costs), events.path(last))


class _Events:
    """The start and stop of each task of a timetable, by rank and place, and the task whose arrival it waited for.

    Tasks are numbered by kind, stage and microbatch, B like I.  A backward needs only the backward of the next stage,
    which has not run unless the forward of this stage has.
    """

    def __init__(self, timetable: Timetable, costs: Costs, home: dict[int, int]) -> None:
        self.timetable, self.home = timetable, home
        self.start: list[list[float]] = [[] for _ in timetable]
        self.stop: list[list[float]] = [[] for _ in timetable]
        self.cause: list[list[int]] = [[] for _ in timetable]  # a task's number, or -1 if the rank was busy until then
        self.microbatches = 1 + max(task.microbatch for tasks in timetable for task in tasks)
        # The rank and place of each task, by number.
        self.where: list[tuple[int, int]] = [(-1, -1)] * (3 * costs.stages * self.microbatches)
        # A kind and stage has the number of its task of microbatch 0 and of the one that this needs (negative: none),
        # the seconds between the two, and its own seconds.
        self.kinds: dict[tuple[str, int], tuple[int, int, float, float]] = {}
        seconds, n = costs.seconds, costs.stages
        for stage in range(n):
            before, after = (
                costs.transfer[edge] if 0 <= edge < n - 1 and home[edge] != home[edge + 1] else 0.0
                for edge in (stage - 1, stage)
            )
            back = n + stage + 1 if stage < n - 1 else stage
            rows = {"F": (0, stage - 1, before), "B": (1, back, after), "I": (1, back, after), "W": (2, n + stage, 0.0)}
            for kind, (row, need, delay) in rows.items():
                first = (row * n + stage) * self.microbatches
                self.kinds[kind, stage] = (first, need * self.microbatches, delay, seconds[kind][stage])

    def play(self) -> None:
        """Let each rank run until it waits for a task that has not run; that task wakes it."""
        ended: list[float | None] = [None] * len(self.where)
        waits: dict[int, int] = {}  # the rank that waits for each task
        kinds, where, ready = self.kinds, self.where, list(range(len(self.timetable)))
        while ready:
            rank = ready.pop()
            tasks, start, stop, cause = self.timetable[rank], self.start[rank], self.stop[rank], self.cause[rank]
            now = stop[-1] if stop else 0.0
            for place in range(len(stop), len(tasks)):
                kind, stage, microbatch = tasks[place]
                first, need, delay, seconds = kinds[kind, stage]
                number, need, because = first + microbatch, need + microbatch, -1
                if need >= 0:
                    arrival = ended[need]
                    if arrival is None:
                        waits[need] = rank
                        break
                    if arrival + delay > now:
                        now, because = arrival + delay, need
                if ended[number] is not None:
                    raise ShardwiseError(f"The timetable cannot run: {_words(tasks[place])} is in it twice.")
                start.append(now)
                now += seconds
                stop.append(now)
                cause.append(because)
                ended[number], where[number] = now, (rank, place)
                if number in waits:
                    ready.append(waits.pop(number))
        if waits:
            raise ShardwiseError(f"The timetable cannot run: {self._circle()}.")

    def _circle(self) -> str:
        """Return which ranks wait for each other in a circle, in words, or which task that one waits for nobody has."""
        first = {
            r: tasks[len(self.stop[r])] for r, tasks in enumerate(self.timetable) if len(self.stop[r]) < len(tasks)
        }
        rank, chain, words = min(first), list[int](), list[str]()
        while rank not in chain:
            chain.append(rank)
            begin, need, _, _ = self.kinds[first[rank][:2]]
            row, rest = divmod(need + first[rank].microbatch, len(self.where) // 3)
            stage, microbatch = divmod(rest, self.microbatches)
            after = self.home[stage]
            there = [
                t for t in self.timetable[after] if t[1:] == (stage, microbatch) and t.kind in ("F", "BI", "W")[row]
            ]
            if not there:
                missing = Task("FBW"[row], stage, microbatch)
                return f"{_words(first[rank])} on rank {rank} waits for {_words(missing)}, which no rank computes"
            words.append(
                f"rank {rank} has {_words(first[rank])} next, which waits for {_words(there[0])} on rank {after}"
            )
            rank = after
        return "; ".join(words[chain.index(rank) :])

    def path(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the tasks that determine when a rank ends, as (rank, place), the first task of the path first."""
        at, found = (rank, len(self.stop[rank]) - 1), []
        while at[1] >= 0:
            found.append(at)
            cause = self.cause[at[0]][at[1]]
            at = (at[0], at[1] - 1) if cause < 0 else self.where[cause]
        return tuple(reversed(found))


def _words(task: Task) -> str:
    return f"{task.kind} of stage {task.stage} and microbatch {task.microbatch}"


def _peaks(timetable: Timetable, costs: Costs) -> tuple[float, ...]:
    """Return each rank's most bytes of activations at once: F takes them, B or W releases them."""
    taken = {"F": costs.activations, "W": [-x for x in costs.weight_activations], "B": [-x for x in costs.activations]}
    taken["I"] = [kept - held for kept, held in zip(costs.weight_activations, costs.activations, strict=True)]
    return tuple(max(accumulate(taken[kind][stage] for kind, stage, _ in tasks)) for tasks in timetable)
