"""How all contenders of the benchmark of pipelines cut model and batch; the steps of shardwise's pipeline, and of its
ranks each by itself.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from alternate import Step
from task import Task, undivided


@dataclass(frozen=True)
class Kind:
    """A schedule: its name here and in torch (None if torch lacks it), and the number of stages of a rank, which go
    round over the ranks, or with ``v`` down and up again."""

    name: str
    torch: str | None
    stages_per_rank: int = 1
    v: bool = False

    def stages(self, rank: int, ranks: int) -> list[int]:
        """Return the stages of a rank."""
        if self.v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * turn for turn in range(self.stages_per_rank)]

    def microbatches(self, least: int, ranks: int) -> int:
        """Return at least ``least`` microbatches, and as many as shardwise and torch need: 1F1B and DualPipeV need one
        for each stage, interleaved a multiple of the ranks."""
        return max(least, ranks * (2 if self.v else 1))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("gpipe", "ScheduleGPipe"),
        Kind("1f1b", "Schedule1F1B"),
        Kind("interleaved", "ScheduleInterleaved1F1B", 2),
        Kind("zb-h1", None),
        Kind("zbv", "ScheduleZBVZeroBubble", 2, v=True),
        Kind("dualpipe-v", "ScheduleDualPipeV", 2, v=True),
    )
}


@dataclass(frozen=True)
class Pipeline:
    """A GPT in stages over ``ranks`` ranks, or over as many groups of ``dp`` × ``tp`` ranks.

    A step is a batch of ``task.rows`` rows for each of all ranks, in microbatches, of which ``dp`` pipelines have equal
    parts.  The shards of a stage over ``tp`` have the same rows.  With ``zero`` 3 those over ``dp`` have shards of it.
    """

    task: Task
    kind: Kind
    ranks: int
    microbatches: int
    dp: int = 1
    tp: int = 1
    zero: Literal[0, 3] = 0

    @property
    def all_ranks(self) -> int:
        return self.ranks * self.dp * self.tp

    @property
    def rows(self) -> int:
        return self.task.rows * self.all_ranks

    @property
    def keys(self) -> dict[str, Any]:
        """Return the keys of a config's ``[parallel]`` for this pipeline.

        Under ZeRO-3 what is gathered stays so for the step, and gradients are reduced once, as torch's pipelines do.
        """
        once = {"gathered": "step", "reduced": "step"} if self.zero == 3 else {}
        return {
            "pp": self.ranks, "dp": self.dp, "zero": self.zero, "tp": self.tp, "schedule": self.kind.name,
            "stages_per_rank": self.kind.stages_per_rank, "microbatches": self.microbatches,
            "stages": [len(units) for units in self.cut()], **once,
        }  # fmt: skip

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.ranks * self.kind.stages_per_rank - 1

    @property
    def units(self) -> int:
        """The number of units: the embedding, the blocks, and the norm with head and loss."""
        return self.task.layers + 2

    def cut(self) -> tuple[range, ...]:
        """Return the units of each stage.

        The slowest stage is as fast as possible, then the next slowest.  Where that leaves a choice, earlier stages get
        fewer units, since they keep most microbatches.  A unit's cost is its multiplications for a token.
        """
        task = self.task
        hidden = task.hidden or 4 * task.width
        # causality leaves half of attention's two products
        block = 4 * task.width**2 + 2 * task.width * hidden + task.sequence * task.width
        costs = [0, *[block] * task.layers, task.vocabulary * task.width]

        def ranges(starts: tuple[int, ...]) -> tuple[range, ...]:
            return tuple(itertools.starmap(range, itertools.pairwise((0, *starts, self.units))))

        def weight(parts: tuple[range, ...]) -> tuple[list[int], list[int]]:
            return sorted((sum(costs[i] for i in part) for part in parts), reverse=True), [len(part) for part in parts]

        return min(map(ranges, itertools.combinations(range(1, self.units), self.last)), key=weight)


def pipelined(rank: int, ranks: int, *, pipeline: Pipeline) -> Step:
    """Make the step of shardwise's pipeline."""
    trainer, given = _trainer(rank, pipeline)
    return lambda: trainer.step(given).loss


def _trainer(rank: int, pipeline: Pipeline, **options: Any) -> tuple[Any, Any]:
    """Make a Trainer and the batch, of which every rank has all rows."""
    from shardwise import Plan
    from shardwise.parallel.pipeline import pipeline as planned

    task, kind, ranks = pipeline.task, pipeline.kind, pipeline.ranks
    plan = Plan.of(precision=task.precision, microbatches=pipeline.microbatches)
    plan = planned(plan, ranks, schedule=kind.name, stages_per_rank=kind.stages_per_rank)
    return undivided(task, plan.replace(stages=tuple(map(len, pipeline.cut()))), ranks, **options)


TASKS = {"FORWARD": "F", "BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
"""The task of a schedule that an instruction is part of."""


REST = "rest"
"""The name for everything in a step that is no task."""
Doing = tuple[str, int, int]
"""A task, as its letter, stage and microbatch."""


@dataclass
class Alone:
    """The step of a rank that runs the same program by itself: what it sends is lost, what it receives is zeros.

    ``measured`` has for every step the mean seconds over microbatches of each task ``F0``, ``B0``, … (a letter and a
    stage), and the seconds of all else in the step (:data:`REST`).
    """

    trainer: Any
    given: Any
    began: float = 0.0
    doing: Doing | None = None  # None where no task runs
    spent: Counter[Doing | None] = field(default_factory=Counter)
    measured: list[dict[str, float]] = field(default_factory=list)

    def __call__(self) -> float:
        self.began, self.doing, self.spent = time.perf_counter(), None, Counter()
        self.trainer.engine.step(
            self.given.fields, self.given.rows
        )  # not the Trainer's step, which would check whether numbers are finite
        self._now(None)
        self.measured.append(self._means())
        return 0.0

    def before(self, position: int, instruction: Any) -> None:
        """Note that an instruction begins; the interpreter calls this before each."""
        task = TASKS.get(instruction.op.name)
        stage = -1 if task is None else self.trainer.engine.cut.stage[instruction.unit]  # -1 for units of no stage
        self._now(None if task is None or stage < 0 else (task, stage, instruction.microbatch))

    def _now(self, doing: Doing | None) -> None:
        now = time.perf_counter()
        self.spent[self.doing] += now - self.began
        self.began, self.doing = now, doing

    def _means(self) -> dict[str, float]:
        """Return the seconds of the last step; a whole backward counts as I where its stage has an I too, since some of
        its units have no weight gradients that can wait."""
        tasks: Counter[Doing] = Counter()
        for doing, seconds in self.spent.items():
            if doing is not None:
                task, *where = doing
                tasks["I" if task == "B" and ("I", *where) in self.spent else task, where[0], where[1]] += seconds
        found: dict[str, list[float]] = {REST: [self.spent[None]]}
        for (task, stage, _), seconds in tasks.items():
            found.setdefault(f"{task}{stage}", []).append(seconds)
        return {what: statistics.mean(each) for what, each in found.items()}


def alone(rank: int, ranks: int, *, pipeline: Pipeline) -> Alone:
    """Make the step of a rank by itself."""
    from shardwise.core.mesh import Mesh
    from shardwise.runtime.alone import AloneCommunicator

    one = Alone(None, None)
    one.trainer, one.given = _trainer(
        rank, pipeline, comm=AloneCommunicator(Mesh.of(pp=ranks), rank, torch.device("cpu")), progress=one.before
    )
    return one


def costs(measured: Sequence[Sequence[Mapping[str, float]]]) -> list[dict[str, float]]:
    """Return for each rank the median seconds of each task over its measured steps."""
    return [{what: statistics.median(step[what] for step in steps) for what in steps[0]} for steps in measured]


def simulated(pipeline: Pipeline, each: Sequence[Mapping[str, float]]) -> float:
    """Return the seconds of a step without communication, simulated from the ranks' :func:`costs`."""
    from shardwise.estimate.simulate import Costs, simulate
    from shardwise.parallel.schedule import timetable

    kind, ranks, stages = pipeline.kind, pipeline.ranks, range(pipeline.last + 1)
    seconds = {what: spent for rank in each for what, spent in rank.items() if what != REST}
    forward, backward, inputs, weight = ([seconds.get(f"{task}{stage}", 0.0) for stage in stages] for task in "FBIW")
    step = [0.0 for _ in stages]
    for rank, one in enumerate(each):
        step[kind.stages(rank, ranks)[0]] = one[REST]  # the simulator adds up the stages of a rank
    found = Costs(forward, inputs, weight, backward=backward, step=step)
    return simulate(timetable(kind.name, ranks, pipeline.microbatches, kind.stages_per_rank), found).seconds
