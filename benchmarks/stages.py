"""How all contenders of the benchmark of pipelines cut model and batch; shardwise's pipeline, and its ranks each by itself."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alternate import Step
from task import Task


@dataclass(frozen=True)
class Kind:
    """A schedule: its name here and in torch, if torch has it, and the stages of a rank, going round or in a V."""

    name: str
    torch: str | None
    stages_per_rank: int = 1
    v: bool = False

    def stages(self, rank: int, ranks: int) -> list[int]:
        """Those of a rank."""
        if self.v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * turn for turn in range(self.stages_per_rank)]

    def microbatches(self, least: int, ranks: int) -> int:
        """At least so many, as both sides allow it: one a stage (1F1B, DualPipeV), a multiple of the ranks (interleaved)."""
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
    """A GPT in stages over ``ranks`` ranks; a step is one batch of ``task.rows`` rows for each of them, in microbatches."""

    task: Task
    kind: Kind
    ranks: int
    microbatches: int

    @property
    def rows(self) -> int:
        return self.task.rows * self.ranks

    @property
    def last(self) -> int:
        """The last stage."""
        return self.ranks * self.kind.stages_per_rank - 1

    def cut(self) -> tuple[range, ...]:
        """The blocks of each stage.

        The slowest stage is as fast as can be, then the next; where that leaves a choice earlier stages get fewer, as they keep most
        microbatches.  A block's cost is its multiplications for a token; the last has the head's too.
        """
        task, stages = self.task, self.last + 1
        hidden = task.hidden or 4 * task.width
        # of attention's two products causality leaves half
        costs = [4 * task.width**2 + 2 * task.width * hidden + task.sequence * task.width] * task.layers
        costs[-1] += task.vocabulary * task.width
        if stages > task.layers:
            raise ValueError(f"{stages} stages of {task.layers} blocks: each needs one")

        def ranges(starts: tuple[int, ...]) -> tuple[range, ...]:
            return tuple(itertools.starmap(range, itertools.pairwise((0, *starts, task.layers))))

        def weight(parts: tuple[range, ...]) -> tuple[list[int], list[int]]:
            return sorted((sum(costs[i] for i in part) for part in parts), reverse=True), [len(part) for part in parts]

        return min(map(ranges, itertools.combinations(range(1, task.layers), stages - 1)), key=weight)

    def stages_of(self, name: str) -> set[int]:
        """The stages that read a parameter, or run a unit: both first and last have the embedding, which is the head's weight too."""
        outermost, _, rest = name.partition(".")
        if outermost == "blocks":
            at = int(rest.partition(".")[0])
            return {stage for stage, blocks in enumerate(self.cut()) if at in blocks}
        return {"wte": {0, self.last}, "wpe": {0}, "norm": {self.last}, "lm_head": {self.last}}[outermost]


def pipelined(rank: int, ranks: int, *, pipeline: Pipeline) -> Step:
    """Under shardwise."""
    trainer, given = _trainer(rank, pipeline)
    return lambda: trainer.step(given).loss


def _trainer(rank: int, pipeline: Pipeline, **options: Any) -> tuple[Any, Any]:
    """A Trainer, and the batch: every rank has all rows.  ``ValueError`` if the rank's stages are not those of the others."""
    from shardwise import OptimizerChoice, Plan, Trainer
    from shardwise.data.loader import Batch, rank_rows
    from shardwise.parallel.pipeline import pipeline as planned

    torch.set_float32_matmul_precision("medium")
    task, kind, ranks = pipeline.task, pipeline.kind, pipeline.ranks
    batch = task.batch(range(ranks))
    plan = Plan(precision=task.precision, microbatches=pipeline.microbatches)
    plan = planned(plan, ranks, schedule=kind.name, stages_per_rank=kind.stages_per_rank)
    choice = OptimizerChoice("adamw", lr=1e-4, decay="all")
    trainer = Trainer(task.model(), choice, plan, batch, clip_norm=task.clip_norm, **options)
    held = {p.name for memory in trainer.engine.memory.buckets for p in memory.bucket.parameters}
    names = dict(task.model().named_parameters())
    if held != (mine := {name for name in names if pipeline.stages_of(name) & set(kind.stages(rank, ranks))}):
        raise ValueError(f"rank {rank} has {sorted(held - mine)} and lacks {sorted(mine - held)}: other stages than its peer's")
    spans = rank_rows(pipeline.rows, pipeline.microbatches, 1, 0)
    return trainer, Batch(batch, pipeline.rows, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


KINDS_OF_TASKS = {"FORWARD": "F", "RECOMPUTE": "B", "BACKWARD": "B"}
"""What an instruction does for a schedule's task."""


@dataclass
class Alone:
    """The same program, of a rank that nobody talks to: what it sends is lost, what it receives is zeros.

    :meth:`measured` says how long its stages' tasks take: medians over steps, of a microbatch.
    """

    trainer: Any
    given: Any
    pipeline: Pipeline
    began: float = 0.0
    doing: str = ""
    spent: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)

    def __call__(self) -> float:
        self.began, self.doing, self.spent = time.perf_counter(), "rest", {}
        self.trainer.engine.step(self.given.fields, self.given.rows)  # the Trainer would look whether numbers are finite
        self._now("rest")
        self.steps.append(self.spent)
        return 0.0

    def before(self, position: int, instruction: Any) -> None:
        """Called before each instruction."""
        kind = KINDS_OF_TASKS.get(instruction.op.name)
        self._now("rest" if kind is None else f"{kind}{self._stage(instruction.unit)}")

    def _now(self, doing: str) -> None:
        now = time.perf_counter()
        self.spent[self.doing] = self.spent.get(self.doing, 0.0) + now - self.began
        self.began, self.doing = now, doing

    def _stage(self, unit: int) -> int:
        (stage,) = self.pipeline.stages_of(self.trainer.compiled.general.units[unit].name)
        return stage

    def measured(self) -> dict[str, float]:
        """Seconds of tasks ``F0``, ``B0``, …, a letter and a stage, for a microbatch; ``rest``: of all else in a step."""
        each = {what: statistics.median(step[what] for step in self.steps) for what in self.steps[-1]}
        return {what: seconds if what == "rest" else seconds / self.pipeline.microbatches for what, seconds in each.items()}


def alone(rank: int, ranks: int, *, pipeline: Pipeline) -> Alone:
    """A rank by itself."""
    one = Alone(None, None, pipeline)
    one.trainer, one.given = _trainer(rank, pipeline, comm=silent(rank, ranks), progress=one.before)
    return one


def silent(rank: int, ranks: int) -> Any:
    """The communicator of a rank that is by itself on a mesh of several."""
    from shardwise.core.mesh import Mesh
    from shardwise.runtime.communicator import BaseCommunicator, Call, Completed

    class Silent(BaseCommunicator):
        def _done(self, call: Call, *_: Any) -> Completed:
            return Completed()

        def _receive(self, call: Call, x: Tensor, from_rank: int) -> Completed:
            x.zero_()
            return Completed()

        def _barrier(self, call: Call) -> None:
            return None

        _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _send = _done

    return Silent(Mesh.of(pp=ranks), rank, torch.device("cpu"))
