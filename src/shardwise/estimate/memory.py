"""The bytes of everything that a program names follow from the trace, the plan and the optimizer alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.capture.casts import COMPUTE_DTYPE
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.layout import rank_rows
from shardwise.core.numeric_options import scalar_bytes
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.estimate.states import (
    SCALAR,
    Widths,
    average_bytes,
    average_peak,
    bucket_states,
    changed,
    step_peak,
    whole_peak,
    widths,
)
from shardwise.estimate.tables import COPIES, TABLE_UPDATE, held_rows, looked_up, row_bytes
from shardwise.estimate.timeline import Made
from shardwise.measure.unit_memory import Flight, Profile, UnitMemory, Way
from shardwise.ops.env import Env
from shardwise.parallel.data import SHARDS, batch_axes, placement
from shardwise.units.share import Share
from shardwise.units.trace import Bucket, Trace

HOST = "cpu"
"""The device that is the host itself: both are then one memory."""


@dataclass
class HeldBytes:
    """The bytes that a rank holds in one memory from step to step, by buffer, and the peak of each bucket's STEP."""

    persistent: dict[Buffer, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    final: dict[int, int] = field(default_factory=dict)  # the bytes of each bucket's gradient that the optimizer takes
    changed: dict[int, int] = field(default_factory=dict)  # the bytes of each bucket that its STEP changes
    inboxes: dict[int, int] = field(default_factory=dict)  # the bytes that a server receives of each bucket's gradient
    exchanged: dict[int, int] = field(default_factory=dict)  # the bytes that exchanging the rows of a table takes

    def hold(self, buffer: Buffer, nbytes: int) -> None:
        if nbytes:
            self.persistent[buffer] = self.persistent.get(buffer, 0) + nbytes


def accounts(
    trace: Trace, plan: Plan, choice: OptimizerChoice, program: Program, rows: int, rank: int = 0, device: str = HOST,
    common: bool = False, buckets: Sequence[Bucket] | None = None,
) -> tuple[HeldBytes, HeldBytes]:  # fmt: skip
    """Return what ``rank`` holds from step to step on its device, and on the host (the same account if both are one).

    ``buckets`` are those of the rank, by default all; ``rows`` is the number in a batch; ``common`` is as in
    :func:`bucket_states`.  Masters are part of a bucket's ``state``.
    """
    on_device = HeldBytes()
    on_host = on_device if device == HOST else HeldBytes()
    own = trace.buckets if buckets is None else buckets
    _buckets(on_device, on_host, own, plan, choice, rank, device, common, bool(trace.optional))
    _pools(on_device, trace, plan, choice, program, rank, common)
    for bucket in own:
        if bucket.table:
            share = Share.of(bucket, plan, choice, rank, bool(trace.optional))
            _table(on_device, bucket, plan, choice, share, looked_up(trace, plan, bucket, rows))
    on_host.hold(BufferKind.UNUSED.of(), trace.beside.unused)
    on_device.hold(BufferKind.BUFFER.of(), trace.beside.buffers)
    on_device.hold(BufferKind.BATCH.of(), trace.beside.row * sum(rows_of(plan, rows, rank)))
    on_device.hold(BufferKind.SCALAR.of(), _scalars(plan.numeric.precision))
    return on_device, on_host


def rows_of(plan: Plan, rows: int, rank: int) -> list[int]:
    """Return the number of rows that ``rank`` has in each microbatch of a batch of ``rows`` rows."""
    axes = batch_axes(plan.mesh)
    parts, index = plan.mesh.axis_size(axes), plan.mesh.index(rank, axes)
    return [stop - start for start, stop in rank_rows(rows, min(plan.microbatches, rows), parts, index)]


def _buckets(
    on_device: HeldBytes, on_host: HeldBytes, buckets: Sequence[Bucket], plan: Plan, choice: OptimizerChoice, rank: int,
    device: str,
    common: bool, per_parameter: bool,
) -> None:  # fmt: skip
    offload = plan.memory.offloads_optimizer
    for bucket in buckets:
        share = Share.of(bucket, plan, choice, rank, per_parameter)
        each, wide = bucket_widths(choice, bucket), bucket.wide.itemsize
        both = bucket_states(share, each, learns=bucket.learns, offload=offload, common=common)
        for account, states in zip((on_device, on_host), both, strict=True):
            account.hold(BufferKind.PARAM.of(bucket.index), states.parameters)
            account.hold(BufferKind.GRAD.of(bucket.index), states.gradients)
            account.hold(BufferKind.STATE.of(bucket.index), states.optimizer)
        taker, where = (on_host, HOST) if offload else (on_device, device)
        if plan.local.steps and bucket.learns:
            each_of_outer = share.held.numel * bucket.wide.itemsize
            taker.hold(BufferKind.OUTER.of(bucket.index), 2 * each_of_outer)
            on_device.hold(BufferKind.DIFFERENCE.of(bucket.index), each_of_outer if plan.local.streams else 0)
        peak = max(
            (step_peak(choice, one.spans, each[one.part], wide, where, one.part) for one in share.updates), default=0
        )
        update, sent = whole_peak(share, choice, wide)
        peak = max(peak, update, sent if taker is on_device else 0)
        # What torch copies to a GPU in another dtype it converts on the host first.
        rounded = (
            share.held.numel * bucket.dtype.itemsize if taker is not on_device and bucket.dtype != bucket.wide else 0
        )
        averaged = average_peak(share.held.numel, each[0]) if bucket.learns else 0
        taker.steps[bucket.index] = max(peak, rounded, averaged)
        if taker is not on_device and sent:
            on_device.steps[bucket.index] = sent
        scaled = share.held.numel * bucket.wide.itemsize if plan.numeric.precision == "fp16" and not offload else 0
        taker.changed[bucket.index] = (
            sum(changed(one.spans, each[one.part], wide) for one in share.updates)
            + scaled
            + (average_bytes(share.held.numel, each[0]) if bucket.learns else 0)
        )
        on_device.final[bucket.index] = share.held.numel * bucket.wide.itemsize
        if share.rule.state == "O" and bucket.learns and not common:  # in common memory a server reads what ranks have
            dtype = COMPUTE_DTYPE.get(plan.data.reduce, bucket.wide)
            on_device.inboxes[bucket.index] = plan.mesh.axis_size(SHARDS) * share.held.numel * dtype.itemsize


def _table(
    account: HeldBytes, bucket: Bucket, plan: Plan, choice: OptimizerChoice, share: Share, mine: int
) -> None:  # fmt: skip
    """Add the gradient of a table by rows, of which every rank looks up ``mine``, and what its sum and its update take
    at most."""
    ranks = plan.mesh.axis_size(batch_axes(plan.mesh))
    held = held_rows(bucket, mine, ranks) * row_bytes(bucket)
    account.hold(BufferKind.GRAD.of(bucket.index), held)
    averaged = average_peak(share.held.numel, bucket_widths(choice, bucket)[0])
    account.steps[bucket.index] = max(TABLE_UPDATE * held, averaged)
    account.exchanged[bucket.index] = COPIES * ranks * mine * row_bytes(bucket)


def _pools(
    account: HeldBytes, trace: Trace, plan: Plan, choice: OptimizerChoice, program: Program, rank: int, common: bool
) -> None:  # fmt: skip
    """Add the slots, each as large as the largest bucket that it has to hold; parameters in common memory need none."""
    summed = COMPUTE_DTYPE.get(plan.data.reduce)
    numels = {
        b: trace.buckets[b].layout(choice, plan.mesh, rank).numel
        for held in (*program.slots, *program.unreduced, *program.stashes)
        for b in held
    }
    for k, held in enumerate(() if common else program.slots):
        account.hold(BufferKind.SLOT.of(k), max(numels[b] * trace.buckets[b].dtype.itemsize for b in held))
    for k, held in enumerate(program.stashes):
        account.hold(BufferKind.STASH.of(k), max(numels[b] * trace.buckets[b].dtype.itemsize for b in held))
    for k, held in enumerate(program.unreduced):
        account.hold(
            BufferKind.UNREDUCED.of(k), max(numels[b] * (summed or trace.buckets[b].wide).itemsize for b in held)
        )


def gradient_dtypes(trace: Trace, plan: Plan) -> dict[str, torch.dtype]:
    """Return the dtypes of the slots to which backward writes gradients, by parameter; the gradients of other
    parameters go to their buckets' buffers."""
    summed = COMPUTE_DTYPE.get(plan.data.reduce)
    names = (
        p.name
        for b in trace.buckets
        if placement(plan, b.parameters[0].name, b.table).grad == "S"
        for p in b.parameters
    )
    return {} if summed is None else dict.fromkeys(names, summed)


def _scalars(precision: str) -> int:
    """Return the bytes of the loss, the norm and the wish to stop; of whether steps are halted; and of the loss scale,
    its counters, and the scale of the step."""
    return 3 * scalar_bytes(precision) + 4 + (16 if precision == "fp16" else 0)


def bucket_widths(choice: OptimizerChoice, bucket: Bucket) -> list[Widths]:
    """Return the bytes that each element of a bucket takes, by what they are for, for each part of the choice."""
    return [widths(part, bucket.dtype.itemsize, bucket.wide.itemsize) for part in choice.parts]


def norms_of(trace: Trace) -> int:
    """Return the number of a rank's norms: one for each bucket, and in a model that was not captured also one for each
    parameter, which says whether it was reached."""
    learning = [b for b in trace.buckets if b.learns]
    return len(learning) + (0 if trace.opaque is None else sum(len(b.parameters) for b in learning))


def weights_at_once(program: Sequence[Instruction]) -> set[tuple[int, int]]:
    """Return the (unit, microbatch) of the BACKWARD_INPUTs whose BACKWARD_WEIGHT comes before the next unit computes
    backward for the microbatch."""
    found, last = set[tuple[int, int]](), dict[int, int]()
    for one in program:
        if one.op is Op.BACKWARD_WEIGHT and last.get(one.microbatch) == one.unit:
            found.add((one.unit, one.microbatch))
        elif one.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and one.lane is Lane.COMPUTE:
            last[one.microbatch] = one.unit
    return found


@dataclass
class ProgramSizes:
    """The :class:`~shardwise.estimate.timeline.BufferSizes` of a program over units that were profiled.

    Args:
        program: its instructions.
        traces: the trace of each microbatch, as the engine chooses them.
        profiles: the profile of each microbatch, for its own number of rows.
        account: what is there from step to step.
        parts: the number of ranks of a stage, over the batch and tensor-parallel axes: each has its norms.
        envs: this rank's place in each microbatch; only a rank of a pipeline needs it.
        microbatches: the number in a batch, by default all.
    """

    program: Sequence[Instruction]
    traces: Sequence[Trace]
    profiles: Sequence[Profile]
    account: HeldBytes = field(default_factory=HeldBytes)
    parts: int = 1
    envs: Sequence[Env] = ()
    microbatches: int = 0

    def __post_init__(self) -> None:
        self.recomputed = {(one.unit, one.microbatch) for one in self.program if one.op is Op.RECOMPUTE}
        self.at_once = weights_at_once(self.program)
        self.microbatches = self.microbatches or len(self.traces)
        self.producers = [{n: u.index for u in t.units for n in u.outputs} for t in self.traces]
        trace = self.traces[0]
        self.scalar = scalar_bytes(trace.precision)
        self.norms = self.scalar * norms_of(trace)  # the bytes of one rank's
        # The bytes of a batch's rows, loss, norm and wish to stop.
        self.batch = self.persistent.get(BufferKind.BATCH.of(), 0) + 3 * self.scalar
        # The first instruction of each batch → its number.  The rows of batch 0 are persistent, so it is left out.
        self.begins: dict[Instruction, int] = {}
        for one in self.program:
            batch = one.version if one.op is Op.COUNT else one.microbatch // self.microbatches
            if batch > 0 and batch not in self.begins.values():
                self.begins[one] = batch

    @property
    def persistent(self) -> Mapping[Buffer, int]:
        return self.account.persistent

    @property
    def sums(self) -> int:
        """The bytes of the sums that a step makes beforehand."""
        return self.profiles[0].sums * (1 if self.traces[0].cuts_batch else self.microbatches)

    def unit(self, one: Instruction) -> UnitMemory:
        """Return the bytes of an instruction's unit; the last microbatch runs backward first."""
        found = self.profiles[one.microbatch].units[one.unit]
        first = (one.microbatch + 1) % self.microbatches == 0
        return found if first or found.later is None else found.later

    def way(self, one: Instruction) -> Way:
        """Return how the unit goes from FORWARD to BACKWARD in its microbatch."""
        memory = self.unit(one)
        if (one.unit, one.microbatch) in self.recomputed:
            return memory.again
        saves = one.op is not Op.FORWARD or any(b.kind == BufferKind.SAVED for b in one.writes)
        return memory.none if saves else Way(memory.alone)

    def hosted(self) -> int:
        """Return the most bytes of offloaded activations that the host has at once."""
        now = most = 0
        for one in self.program:
            if any(b.kind == BufferKind.SAVED for b in one.writes):
                now += self.way(one).hosted
                most = max(most, now)
            elif one.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                now -= self.way(one).hosted
        return most

    def made(self, one: Instruction) -> Made:
        """Return the bytes that the instruction leaves, by buffer and part."""
        batch = {BufferKind.BATCH.of(version=self.begins[one]): {"": self.batch}} if one in self.begins else {}
        return {**self._made(one), **batch}

    def _made(self, one: Instruction) -> Made:
        u, m = one.unit, one.microbatch
        if one.lane is Lane.MOVE:
            return {one.frees[0]: {"": self.flight(one).posted}}
        match one.op:
            case Op.COUNT:
                return {b: {"sums": self.sums} for b in one.writes}
            case Op.FORWARD:
                return self.forward(one)
            case Op.RECOMPUTE if BufferKind.SAVED.of(u, m) in one.writes:  # autograd holds the outputs too
                live = {BufferKind.ACTIVATION.of(u, m): {"": self.way(one).remade}} if self.way(one).remade else {}
                return {BufferKind.SAVED.of(u, m): {"": self.way(one).saved}, **live}
            case Op.RECOMPUTE:
                return {b: {"": self.unit(one).outputs} for b in one.writes}
            case Op.BACKWARD:
                return self.gradients(one, self.unit(one).gradients)
            case Op.BACKWARD_INPUT:
                soon, way = (u, m) in self.at_once, self.way(one)
                deferred = {BufferKind.DEFERRED.of(u, m): {"": way.at_once if soon else way.deferred}}
                return {
                    **self.gradients(one, self.unit(one).gradients if soon else self.unit(one).input_gradients),
                    **deferred,
                }
            case Op.NORM:
                return {b: {"norms": self.norms * self.parts} for b in one.writes}
            case Op.PUSH if one.bucket not in self.account.exchanged:
                return {one.writes[-1]: {"": self.account.inboxes.get(one.bucket, 0)}}
            case Op.BACKUP:
                return {one.writes[0]: {"": self.account.changed.get(one.bucket, 0)}}
            case Op.RECEIVE if one.bucket < 0:
                return {
                    one.writes[0]: {name: self.traces[m].units[u].nbytes(name, self.envs[m]) for name in one.tensors}
                }
            case Op.RECEIVE if one.writes[0].kind == BufferKind.RECEIVED:
                return {one.writes[0]: {"": self.account.final.get(one.bucket, 0)}}
        return {}

    def flight(self, one: Instruction) -> Flight:
        """Return the bytes of what a unit of moves has under way."""
        memory = self.unit(one)
        return memory.back if one.op is Op.BACKWARD else memory.there

    def arrived(self, one: Instruction) -> tuple[Made, int]:
        """Return what is made when an instruction that communicates has been waited for, and the most bytes that this
        adds to what was alive before."""
        if one.lane is not Lane.MOVE:
            return {}, 0
        more = self.flight(one).arriving - self.flight(one).posted
        if one.op is Op.BACKWARD:
            return self.gradients(one, self.unit(one).gradients), more
        return {BufferKind.ACTIVATION.of(one.unit, one.microbatch): {"": self.unit(one).outputs}}, more

    def forward(self, one: Instruction) -> Made:
        memory, unit, batch = (
            self.unit(one),
            self.traces[one.microbatch].units[one.unit],
            one.microbatch // self.microbatches,
        )
        made: dict[Buffer, Mapping[str, int]] = {
            BufferKind.ACTIVATION.of(one.unit, one.microbatch): {"": memory.outputs - self.way(one).held}
        }
        made |= {b: {"": self.way(one).kept} for b in one.writes if b.kind in (BufferKind.SAVED, BufferKind.KEPT)}
        if memory.updates:
            made[BufferKind.UPDATE.of(one.unit)] = {"": memory.updates}
        if "loss" in unit.outputs and self.traces[0].weighs_targets:
            made[BufferKind.WEIGHT.of(version=batch)] = {"shares": self.scalar * self.microbatches}
        return made

    def gradients(self, one: Instruction, sizes: Sequence[int]) -> Made:
        m = one.microbatch
        made: dict[Buffer, dict[str, int]] = {}
        trace, unit = self.traces[m], self.traces[m].units[one.unit]
        places = [(n, k) for n in unit.inputs for k in unit.sources(n in trace.shared, m, self.microbatches)]
        for (name, at), size in zip(places, sizes, strict=False):
            if size:
                made.setdefault(BufferKind.GRADIENT.of(self.producers[m][name], at), {})[name] = size
        return made

    def peak(self, one: Instruction) -> int:
        """Return the most bytes that the instruction adds to what was alive before it."""
        return self._peak(one) + (self.batch if one in self.begins else 0)

    def _peak(self, one: Instruction) -> int:
        if one.unit >= 0 and self.traces[one.microbatch % self.microbatches].units[one.unit].moves is not None:
            memory = self.unit(one)
            posting = memory.none.backward if one.op is Op.BACKWARD else memory.alone
            return posting if one.lane is Lane.MOVE else max(posting, self.flight(one).arriving)
        match one.op:
            case Op.COUNT:
                count = max(p.count for p in self.profiles)
                if self.traces[0].cuts_batch or self.microbatches == 1:  # a microbatch's parts are added at once
                    return (self.sums if self.microbatches > 1 else 0) + count
                return max(self.sums - self.profiles[0].sums + count, 2 * self.sums)  # one by one, and then their stack
            case Op.FORWARD:
                return self.way(one).forward
            case Op.RECOMPUTE:
                return self.way(one).recompute
            case Op.BACKWARD:
                return self.way(one).backward
            case Op.BACKWARD_INPUT:
                return self.way(one).inputs
            case Op.BACKWARD_WEIGHT:
                return self.way(one).weights
            case Op.NORM:  # norms one by one, their stack, and then those of all ranks
                return self.norms + max(self.norms, self.norms * self.parts)
            case Op.STEP:
                return self.account.steps.get(one.bucket, 0)
            case Op.REDUCE | Op.PUSH | Op.GATHER | Op.PULL:
                return self.account.exchanged.get(one.bucket, 0)
        return SCALAR if one.op is Op.DECIDE else 0
