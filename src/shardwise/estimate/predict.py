"""The memory of a rank at each instruction of a step is predicted from trace, plan and optimizer alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.core.errors import ConfigError
from shardwise.core.instruction import OP_INFO, Buffer, Category, Instruction, Op
from shardwise.core.layout import shard_sizes
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.program import Program, class_of
from shardwise.core.tensor_options import tensor_axes
from shardwise.estimate.memory import ProgramSizes, accounts, bucket_widths, gradient_dtypes, rows_of
from shardwise.estimate.states import bucket_states
from shardwise.estimate.subject import Subject
from shardwise.estimate.timeline import Timeline, by_category, timeline
from shardwise.lower.outer import fullest_step
from shardwise.lower.stages import StageSplit
from shardwise.lower.step import lower
from shardwise.lower.versions import steady_batches
from shardwise.measure.unit_memory import Profile, profile
from shardwise.parallel.data import REPLICAS
from shardwise.parallel.pipeline import PIPELINE
from shardwise.units.share import Share
from shardwise.units.trace import Bucket, Trace

STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)


@dataclass(frozen=True)
class Prediction:
    """The memory of one rank in one step, or in a window of batches that overlap.

    ``timeline`` is that of its device; ``host`` has the bytes beside it on the host, by category and at most during
    updates (empty if the device is the host).  ``persistent`` has the bytes on the device from step to step, by buffer.
    ``at`` says in words which instruction reaches the peak.  ``unknown`` are the ops whose memory is a guess or left
    out, by unit.
    """

    rank: int
    program: Program
    timeline: Timeline
    persistent: Mapping[Buffer, int]
    host: Mapping[Category, int]
    at: str
    unknown: Mapping[str, tuple[str, ...]]

    @property
    def peak(self) -> Mapping[Category, int]:
        """The bytes at the highest peak, by category."""
        return self.timeline.peak

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def states(self) -> Mapping[Category, int]:
        """The bytes of model states on the device from step to step, with slots and the model's buffers."""
        return {category: n for category, n in by_category(self.persistent).items() if category in STATES}

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def predict(
    trace: Trace | Callable[[int], Trace],
    plan: Plan,
    choice: OptimizerChoice,
    *,
    rows: int,
    device: str = "cpu",
    rank: int | None = None,
    common: bool = False,
    profiled: Callable[..., Profile] = profile,
    split: Callable[[Trace, Plan], StageSplit] = StageSplit.of,
) -> Prediction:
    """Predict what ``rank`` holds during a step on a batch of ``rows`` rows; by default the rank that needs most.

    Args:
        trace: the trace of the model under ``plan``; if its batch dim is static, a function from the rows of a
            microbatch to their trace.
        device: "cpu" or "gpu", whichever is present here.
        common: whether ranks are processes of one host that have memory in common, where sharded parameters lie once
            for all of them.
        profiled: :func:`shardwise.measure.unit_memory.profile`, or one that remembers what it has found.
        split: returns the stages of a trace under a plan; by default they are balanced by what its units cost.

    What a process takes beside tensors is not counted (:class:`shardwise.estimate.devices.Reserve` has that of GPUs).
    :class:`ConfigError` is raised for numbers that do not fit the plan or the trace.
    """
    if rows < 1:
        raise ConfigError(f"memory: rows {rows} is not legal; legal: 1 or more")
    if rank is not None and not 0 <= rank < plan.mesh.size:
        raise ConfigError(f"memory: rank {rank} is not legal; legal: 0 to {plan.mesh.size - 1}")
    number = min(plan.microbatches, rows)
    plan = plan.replace(microbatches=number)
    sizes = shard_sizes(rows, number)
    by_size = {size: trace if isinstance(trace, Trace) else trace(size) for size in set(sizes)}
    general = by_size[sizes[0]]
    if general.precision != plan.numeric.precision:
        raise ConfigError(
            f"memory: the plan's precision is {plan.numeric.precision}, and the model was traced in {general.precision}"
        )
    cut = split(general, plan)
    batches = steady_batches(plan)
    programs = lower(general, plan, cut=cut, batches=batches, part=fullest_step(plan))
    traces = [by_size[n] for n in sizes]
    subject = _Memory(traces, plan, choice, rows, device, common, profiled, cut)
    ranks = fullest(general, plan, choice, rows, cut) if rank is None else [rank]
    each = (subject.predict(one, class_of(programs, plan.mesh, one)) for one in ranks)
    return max(each, key=lambda one: (one.peak_bytes, -one.rank))


@dataclass(frozen=True)
class _Memory(Subject):
    """What the predictions for the ranks of a plan have in common."""

    device: str
    common: bool
    profiled: Callable[..., Profile]
    cut: StageSplit

    def predict(self, rank: int, program: Program) -> Prediction:
        plan, trace, mesh = self.plan, self.traces[0], self.plan.mesh
        envs = self.envs(rank)
        parts, split = envs[0].parts, any(one.op is Op.BACKWARD_INPUT for one in program.instructions)
        options = {
            "microbatches": len(self.sizes), "batch": self.rows, "index": envs[0].index, "split": split,
            "gradient_dtypes": gradient_dtypes(trace, plan),
            "tensor": envs[0].tensor, "recompute": plan.memory.recompute,
            "offload": plan.memory.offloads_activations,
        }  # fmt: skip
        by_size = dict(zip(self.sizes, self.traces, strict=True))
        profiles = {n: self.profiled(one, n, parts, self.device, **options) for n, one in by_size.items()}
        own = self.cut.own(trace.buckets, mesh.index(rank, PIPELINE))
        on_device, on_host = accounts(trace, plan, self.choice, program, self.rows, rank, self.device, self.common, own)
        times, alike = program.batches, [profiles[n] for n in self.sizes]
        walked = ProgramSizes(
            program.instructions,
            [*self.traces] * times,
            alike * times,
            on_device,
            parts * mesh.axis_size(tensor_axes(mesh)),
            envs * times,
            len(self.sizes),
        )
        found = timeline(program.instructions, walked)
        host: dict[Category, int] = {} if on_host is on_device else by_category(on_host.persistent)
        if host:
            kept = sum(on_host.changed.values()) if plan.post_validates and program.batches > 1 else 0
            host[Category.TEMPORARY] = max(on_host.steps.values(), default=0) + kept
            host[Category.ACTIVATIONS] = walked.hosted()
        unknown = {u.name: u.unknown for u in profiles[self.sizes[0]].units if u.unknown}
        at = describe(found.instructions[found.at], trace)
        return Prediction(rank, program, found, on_device.persistent, host, at, unknown)


def describe(one: Instruction, trace: Trace) -> str:
    """Return an instruction in words: what it does, to which unit or bucket, in which microbatch."""
    words = [OP_INFO[one.op].does]
    if one.unit >= 0:
        words.append(f"of {trace.units[one.unit].name}")
    if one.bucket >= 0:
        names = [trace.units[u].name for u in trace.buckets[one.bucket].units]
        words.append(f"of {' and '.join(names)}")
    if one.op is Op.REDUCE:
        words.append(f"over {', '.join(one.axes)}")
    if one.microbatch >= 0:
        words.append(f"in microbatch {one.microbatch}")
    return " ".join(words)


def fullest(trace: Trace, plan: Plan, choice: OptimizerChoice, rows: int, cut: StageSplit) -> list[int]:
    """Return the rank that needs most memory at each place along the pipeline axis.  Ranks with the most rows of a
    microbatch that are last along the tensor-parallel axes have the most of everything; of these it is the one with the
    largest model states and batch."""
    each = [rows_of(plan, rows, rank) for rank in range(plan.mesh.size)]
    most = max(map(max, each))
    per_parameter = bool(trace.optional)
    alike: dict[object, list[Bucket]] = {}
    for b in trace.buckets:
        names = [p.name for p in b.parameters]
        shapes = tuple((p.placed, choice.group_of(p.name, p.shape)) for p in b.parameters)
        turn = b.index if choice.any_whole else 0  # ranks own the whole tensors of a bucket in turn
        alike.setdefault((shapes, b.dtype, b.learns, plan.data.rule(names[0]), cut.holders(b), turn), []).append(b)

    @functools.cache
    def states(rank: int) -> int:
        total = 0
        for same in alike.values():
            if plan.mesh.index(rank, PIPELINE) not in cut.holders(same[0]):
                continue
            share = Share.of(same[0], plan, choice, rank, per_parameter)
            held = bucket_states(share, bucket_widths(choice, same[0]), learns=same[0].learns)
            total += len(same) * sum(s.total for s in held)
        return total

    def needs(rank: int) -> tuple[int, int]:
        first = plan.mesh.group(rank, REPLICAS)[0]  # replicas have the same
        return states(first) + trace.beside.row * sum(each[rank]), -rank

    found, last = [], tuple((axis, plan.mesh.axis_size(axis) - 1) for axis in tensor_axes(plan.mesh))
    for pipe in range(cut.ranks):
        ranks = plan.mesh.members((*last, *(((PIPELINE, pipe),) if cut.ranks > 1 else ())))
        served = any(rule.servers for rule in plan.data.parameters)  # a server has more than ranks with more rows
        found.append(max((r for r in ranks if served or max(each[r]) == most), key=needs))
    return found
