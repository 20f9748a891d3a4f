"""What an engine's step really holds, instruction by instruction, beside what is predicted of the same program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.core.instruction import Instruction, Op
from shardwise.core.layout import shard_range
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.memory import ProgramSizes, states, steps
from shardwise.estimate.timeline import Timeline, timeline, total
from shardwise.runtime.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.trace.profile import profile
from shardwise.trace.tracker import StorageTracker

COMPUTING = (Op.COUNT, Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD)


@dataclass
class Seen:
    """Bytes above those before the step: (before the instruction, the most while it ran, the op that reached that)."""

    instruction: Instruction
    before: int
    peak: int
    op: str


def compiled(
    module: nn.Module, batch: Mapping[str, Tensor], loss: Any = None, precision: str = "fp32", microbatches: int = 1,
    recompute: str = "none",
) -> Compiled:  # fmt: skip
    plan = Plan(Mesh.of(dp=1), microbatches, recompute, precision)  # type: ignore[arg-type]
    return Compiled(module, plan, batch, loss)


def predicted(subject: Compiled, batch: Mapping[str, Tensor], optimizer: OptimizerChoice | None = None) -> Timeline:
    """Of what the step makes; with an ``optimizer``, of model states and its updates too."""
    rows, plan = len(next(iter(batch.values()))), subject.plan
    number = plan.microbatches
    sizes = [b - a for a, b in (shard_range(rows, number, m) for m in range(number))]
    ones = subject.masks if all(bool((batch[m] == 1).all()) for m in subject.masks) else ()
    traces = [subject.trace(ones, size) for size in sizes]
    profiles = {size: profile(subject.trace(ones, size), size, microbatches=number) for size in set(sizes)}
    program = subject.programs(traces[0], number)[0].instructions
    persistent = {} if optimizer is None else states(traces[0], plan, optimizer)
    updates = {} if optimizer is None else steps(traces[0], plan, optimizer)
    return timeline(program, ProgramSizes(program, traces, [profiles[s] for s in sizes], persistent, updates))


def measured(subject: Compiled, batch: Mapping[str, Tensor]) -> list[Seen]:
    """Of the second step, the first having made what stays."""
    fields = dict(batch)

    def rank(comm: Any) -> list[Seen]:
        engine = Engine(subject, comm, OptimizerChoice("adamw", lr=0.0))
        rows = len(next(iter(fields.values())))
        engine.step(fields, rows)
        seen: list[Seen] = []
        tracker = StorageTracker()

        def look(_: int, one: Instruction) -> None:
            if seen:
                seen[-1].peak, seen[-1].op = tracker.peak, tracker.peak_op
            seen.append(Seen(one, tracker.mark(), 0, ""))

        engine.interpreter.progress = look
        with tracker:
            engine.step(fields, rows)
        seen[-1].peak = tracker.peak
        return seen

    return run_ranks(subject.plan.mesh, rank, timeout=60)[0]


def differences(subject: Compiled, batch: Mapping[str, Tensor]) -> list[str]:
    """Where prediction and measurement of the computing instructions differ."""
    ours, truth = predicted(subject, batch), measured(subject, batch)
    base = truth[0].before
    found = []
    for one, moment, real in zip(ours.instructions, ours.moments, truth, strict=True):
        if one.op in COMPUTING:
            expected = total(moment.before), total(moment.peak)
            actual = real.before - base, real.peak - base
            if expected != actual:
                name = subject.general.units[one.unit].name if one.unit >= 0 else ""
                found.append(f"{one} {name}: predicted {expected}, is {actual} ({real.op})")
    return found
