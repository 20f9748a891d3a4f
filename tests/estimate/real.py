"""What an engine's step really holds, instruction by instruction, beside what is predicted of the same program."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness import Unseen
from shardwise.capture.casts import cast_field
from shardwise.core.instruction import Instruction, Op
from shardwise.core.layout import shard_range
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.predict import Prediction, predict
from shardwise.estimate.timeline import total
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady_batches
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.measure.unit_memory import Profile, profile
from shardwise.parallel.data import batch_axes
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.units.trace import Trace

COMPUTING = (Op.COUNT, Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
STILL = OptimizerChoice("adamw", lr=0.0)


@dataclass
class Seen:
    """Bytes of one instruction: before it, the most while it ran, and the op that reached that."""

    instruction: Instruction
    before: int
    peak: int
    op: str


@dataclass
class Step:
    """The instructions of a rank's step, and what the rank held when its engine had been made."""

    made: int
    seen: list[Seen]

    @property
    def peak(self) -> int:
        return max(one.peak for one in self.seen)


def compiled(
    module: nn.Module, batch: Mapping[str, Tensor], loss: Any = None, precision: str = "fp32", microbatches: int = 1,
    recompute: str = "none",
) -> Compiled:  # fmt: skip
    return Compiled(module, Plan.of(microbatches=microbatches, recompute=recompute, precision=precision), batch, loss)


def predicted(
    subject: Compiled, batch: Mapping[str, Tensor], optimizer: OptimizerChoice = STILL, rank: int | None = 0,
    profiled: Callable[..., Profile] = profile,
) -> Prediction:  # fmt: skip
    ones = subject.masks if all(bool((batch[m] == 1).all()) for m in subject.masks) else ()
    rows = len(next(iter(batch.values())))
    return predict(
        lambda n: subject.trace_of(ones, n, rows), subject.plan, optimizer, rows=rows, rank=rank, profiled=profiled,
        split=lambda one, _: subject.stages_of(one),
    )  # fmt: skip


@functools.cache
def remembering() -> Callable[..., Profile]:
    """:func:`profile` that walks the units of a trace, which it holds, once for ranks and plans that differ in nothing
    that it is told.
    """
    known: dict[str, tuple[Trace, Profile]] = {}

    def profiled(one: Trace, *args: Any, **options: Any) -> Profile:
        key = repr((id(one), args, options))
        if key not in known:
            known[key] = one, profile(one, *args, **options)
        return known[key][1]

    return profiled


def measured(
    subject: Compiled, batch: Mapping[str, Tensor], optimizer: OptimizerChoice = STILL, clip_norm: float = 1e6
) -> list[Step]:
    """Of each rank's second step, the first having made what stays, with all that the rank holds; where batches
    overlap, of a window.
    """
    rows, number = len(next(iter(batch.values()))), steady_batches(subject.plan)

    def rank(comm: ThreadCommunicator) -> Step:
        tracker, own = StorageTracker("cpu"), rows_of(batch, subject.plan, comm.rank)
        seen: list[Seen] = []

        def look(_: int, one: Instruction) -> None:
            if seen:
                seen[-1].peak, seen[-1].op = tracker.peak, tracker.peak_op
            seen.append(Seen(one, tracker.mark(), 0, ""))

        with tracker:
            clip = None if subject.plan.stages_alone else clip_norm
            engine = Engine(subject, Unseen(comm, [tracker]), optimizer, clip_norm=clip)  # type: ignore[arg-type]
            for bucket in engine.memory.buckets.values():
                bucket.updates  # noqa: B018, otherwise made by the first step
                bucket.average  # noqa: B018
            made = tracker.mark()

            precision = subject.plan.numeric.precision

            def given() -> Iterator[tuple[dict[str, Tensor], int, bool]]:
                for _ in range(number):
                    yield {k: cast_field(v, precision).clone() for k, v in own.items()}, rows, False

            for progress in (None, look):
                engine.interpreter.progress = progress
                if number == 1:
                    engine.step(*next(given()))
                else:
                    deque(engine.steps(given(), number), 0)
        seen[-1].peak, seen[-1].op = tracker.peak, tracker.peak_op
        return Step(made, seen)

    return run_ranks(subject.plan.mesh, rank, timeout=60)


def rows_of(batch: Mapping[str, Tensor], plan: Plan, rank: int) -> dict[str, Tensor]:
    """A rank's rows of each microbatch, one after the other."""
    rows, axes = len(next(iter(batch.values()))), batch_axes(plan.mesh)
    parts, index = plan.mesh.axis_size(axes), plan.mesh.index(rank, axes)
    number = min(plan.microbatches, rows)
    index_of: list[int] = []
    for m in range(number):
        start, stop = shard_range(rows, number, m)
        low, high = shard_range(stop - start, parts, index)
        index_of += range(start + low, start + high)
    return {k: v[torch.tensor(index_of, dtype=torch.long)] for k, v in batch.items()}


def differences(
    subject: Compiled, batch: Mapping[str, Tensor], optimizer: OptimizerChoice = STILL, scalars: int = 0
) -> list[str]:
    """Where prediction and measurement of the computing instructions of any rank differ, all that the rank holds
    included, by more bytes than so many ``scalars`` have."""
    found = []
    # First, since what is captured only now would count as the engine's.
    profiled = remembering()
    expectations = [
        predicted(subject, batch, optimizer, rank, profiled).timeline for rank in range(subject.plan.mesh.size)
    ]
    for rank, (ours, truth) in enumerate(zip(expectations, measured(subject, batch, optimizer), strict=True)):
        for one, moment, real in zip(ours.instructions, ours.moments, truth.seen, strict=True):
            expected, actual = (total(moment.before), total(moment.peak)), (real.before, real.peak)
            off = tuple(a - e for e, a in zip(expected, actual, strict=True))
            if one.op in COMPUTING and max(map(abs, off)) > 8 * scalars:
                name = subject.general.units[one.unit].name if one.unit >= 0 else ""
                found.append(f"rank {rank}: {one} {name}: predicted {expected}, is {actual}, off by {off} ({real.op})")
    return found
