"""The bytes that each instruction of a step hands to the communicator follow from trace, plan and optimizer alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.capture.casts import COMPUTE_DTYPE
from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.local_options import ISLANDS
from shardwise.core.numeric_options import scalar_bytes
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.program import Program, class_of
from shardwise.core.tensor_options import tensor_axes
from shardwise.estimate.memory import norms_of
from shardwise.estimate.subject import Subject
from shardwise.estimate.tables import looked_up, table_traffic
from shardwise.lower.outer import fullest_step
from shardwise.lower.step import lower
from shardwise.lower.versions import steady_batches
from shardwise.measure.unit_traffic import Traffic, UnitTraffic, traffic
from shardwise.parallel.data import SHARDS, batch_axes
from shardwise.parallel.pipeline import PIPELINE
from shardwise.units.batch_sums import SUM_BYTES
from shardwise.units.share import Share
from shardwise.units.trace import NOT_CAPTURED, Trace

_OPAQUE = UnitTraffic(unknown=(NOT_CAPTURED,))


@dataclass(frozen=True)
class TrafficMoment:
    """What one instruction hands to the communicator; ``unknown`` is as in :class:`UnitTraffic`.  ``sent`` are bytes
    that the rank sends, where they do not follow from ``traffic``: what servers do, others do not."""

    instruction: Instruction
    traffic: tuple[Traffic, ...]
    unknown: tuple[str, ...] = ()
    sent: float | None = None


def step_traffic(
    traces: Sequence[Trace], plan: Plan, choice: OptimizerChoice, *, rows: int, rank: int = 0,
    programs: Sequence[Program] = ()
) -> list[TrafficMoment]:  # fmt: skip
    """Return what ``rank`` communicates in a step on a batch of ``rows`` rows, or in a window of batches that overlap:
    one moment for each of its instructions, in order.  Of islands that train apart it is a step in which they meet.

    ``traces`` has one for each microbatch, as the engine chooses them; ``programs`` are by default those of the first.
    A message over the pipeline has a kind of its own, send or receive.  What is asked before a step (whether masks are
    all ones) and the second run of what a VALIDATE undoes are left out.
    """
    plan = plan.replace(microbatches=len(traces))
    programs = programs or lower(traces[0], plan, batches=steady_batches(plan), part=fullest_step(plan))
    program = class_of(programs, plan.mesh, rank)
    ours = _RankTraffic(Subject(list(traces), plan, choice, rows), rank)
    return [TrafficMoment(one, ours.of(one), ours.unknown(one), ours.served(one)) for one in program.instructions]


class _RankTraffic:
    """The traffic of the instructions of ``rank``."""

    def __init__(self, subject: Subject, rank: int) -> None:
        self.subject, self.rank = subject, rank
        self.traces, self.plan = subject.traces, subject.plan
        self.envs = subject.envs(rank)
        self.scalar = scalar_bytes(self.traces[0].precision)
        self._units: dict[tuple[int, int, int], UnitTraffic] = {}
        self._shares: dict[int, Share] = {}

    def of(self, one: Instruction) -> tuple[Traffic, ...]:
        """Return what an instruction communicates, without what is over no axis or has no bytes."""
        size = self.plan.mesh.axis_size
        found = (t._replace(axes=tuple(a for a in t.axes if size(a) > 1)) for t in self._of(one))
        return tuple(t for t in found if t.axes and t.nbytes)

    def unknown(self, one: Instruction) -> tuple[str, ...]:
        return self.unit(one).unknown if OP_INFO[one.op].runs_unit else ()

    def _of(self, one: Instruction) -> Sequence[Traffic]:
        if one.bucket >= 0 and self.traces[0].buckets[one.bucket].table:
            return self.of_table(one)
        match one.op:
            case Op.COUNT:
                return self.counted(one)
            case Op.FORWARD:
                return self.unit(one).forward
            case Op.RECOMPUTE:
                return self.unit(one).again
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                return self.unit(one).backward
            case Op.GATHER:
                nbytes = self.share(one.bucket).layout.numel * self.traces[0].buckets[one.bucket].dtype.itemsize
                return [Traffic("all_gather", (SHARDS,), nbytes)]
            case Op.PUSH:
                return [self.reduced(one)]
            case Op.PULL:
                share, each = self.share(one.bucket), self.traces[0].buckets[one.bucket].dtype.itemsize
                ranges = (share.layout.served(share.rule.servers, k) for k in range(share.rule.servers))
                return [Traffic("broadcast", (SHARDS,), held.numel * each) for held in ranges]
            case Op.REDUCE if one.bucket >= 0 and one.axes == (ISLANDS,):
                nbytes = self.share(one.bucket).held.numel * self.traces[0].buckets[one.bucket].wide.itemsize
                return [Traffic("all_reduce", one.axes, nbytes)]
            case Op.REDUCE if one.bucket >= 0:
                return [self.reduced(one)]
            case Op.REDUCE:
                number = 1 if one.axes == (ISLANDS,) else 2
                if one.writes[0].kind == BufferKind.NORM:
                    number = norms_of(self.traces[0]) * self.plan.mesh.axis_size(
                        (*batch_axes(self.plan.mesh), *tensor_axes(self.plan.mesh))
                    )
                return [Traffic("all_reduce", one.axes, self.scalar * number)]
            case Op.SEND | Op.RECEIVE:
                return self.message(one)
            case Op.STEP:
                return self.of_whole_tensors(one)
        return []

    def unit(self, one: Instruction) -> UnitTraffic:
        m = one.microbatch % len(self.traces)
        key, unit = (id(self.traces[m]), self.subject.sizes[m], one.unit), self.traces[m].units[one.unit]
        if key not in self._units:
            env = unit.place(self.envs[m], len(self.traces))
            self._units[key] = _OPAQUE if unit.graph is None else traffic(unit.graph, env, unit.output_grads)
        return self._units[key]

    def counted(self, one: Instruction) -> list[Traffic]:
        """Return what the sums over the batch communicate."""
        both = [(trace.sums, env) for trace, env in zip(self.traces, self.envs, strict=True)]
        graphs = [(stage.graph, env) for sums, env in both if sums is not None for stage in sums.stages]
        found = [t for graph, env in graphs for t in traffic(graph, env).forward]
        sums, env = self.traces[0].sums, self.subject.whole(self.rank)
        each = 1 if self.traces[0].cuts_batch else len(self.traces)
        assert sums is not None
        return found + [Traffic("all_reduce", one.axes, SUM_BYTES * stage.numel(env) * each) for stage in sums.stages]

    def share(self, bucket: int) -> Share:
        if bucket not in self._shares:
            self._shares[bucket] = self.subject.share(bucket, self.rank)
        return self._shares[bucket]

    def served(self, one: Instruction) -> float | None:
        """Return the bytes that this rank sends to servers in a PUSH, or, as a server, to the other ranks in a PULL."""
        if one.op not in (Op.PUSH, Op.PULL):
            return None
        share, ranks = self.share(one.bucket), self.plan.mesh.axis_size(SHARDS)
        if self.traces[0].buckets[one.bucket].table:
            return self.served_rows(one, share)
        if one.op is Op.PUSH:
            whole = self.reduced(one).nbytes
            return whole * (1 - share.held.numel / share.layout.numel)
        return float((ranks - 1) * share.held.numel * self.traces[0].buckets[one.bucket].dtype.itemsize)

    def served_rows(self, one: Instruction, share: Share) -> float:
        """Return what :meth:`served` does of the rows of a table, which are taken to be spread evenly."""
        own = share.held.numel / share.layout.numel
        if one.op is Op.PUSH:
            return sum(t.nbytes for t in self.of_table(one) if t.kind == "all_to_all") * (1 - own)
        updated = sum(t.nbytes for t in self.of_table(one) if t.axes == (SHARDS,)) * own
        return updated * (self.plan.mesh.axis_size(SHARDS) - 1)

    def reduced(self, one: Instruction) -> Traffic:
        """Return the traffic of a gradient: the whole, or in an all-reduce after a reduce-scatter the shard."""
        served = one.op is Op.PUSH
        share, wide = self.share(one.bucket), self.traces[0].buckets[one.bucket].wide
        dtype = wide if one.slot < 0 else COMPUTE_DTYPE.get(self.plan.data.reduce, wide)
        numel = share.layout.numel if one.scatters or served or share.rule.state == "R" else share.held.numel
        return Traffic(
            "all_to_all" if served else "reduce_scatter" if one.scatters else "all_reduce",
            (SHARDS,) if one.scatters else one.axes,
            numel * dtype.itemsize,
        )

    def looked_up(self, bucket: int) -> int:
        """Return the most rows of a table that a rank looks up in a step."""
        return looked_up(self.traces[0], self.plan, self.traces[0].buckets[bucket], self.subject.rows)

    def of_table(self, one: Instruction) -> Sequence[Traffic]:
        """Return what an instruction on the rows of a table communicates, at most."""
        if one.op not in (Op.REDUCE, Op.PUSH, Op.GATHER, Op.PULL):
            return []
        bucket, share = self.traces[0].buckets[one.bucket], self.share(one.bucket)
        return table_traffic(one, bucket, share, self.looked_up(one.bucket), self.plan)

    def of_whole_tensors(self, one: Instruction) -> list[Traffic]:
        """Return what a step by whole tensors sends: gradients and masters to the owners, and masters back."""
        share, wide = self.share(one.bucket), self.traces[0].buckets[one.bucket].wide
        owned = sum(tensor.numel for tensor in share.owned)
        return [Traffic("all_to_all", one.axes, n * wide.itemsize) for n in (2 * share.held_of_whole, owned)]

    def message(self, one: Instruction) -> list[Traffic]:
        if one.bucket >= 0:
            sizes = [self.share(one.bucket).held.numel * self.traces[0].buckets[one.bucket].wide.itemsize]
        else:
            m = one.microbatch % len(self.traces)
            sizes = [self.traces[m].units[one.unit].nbytes(name, self.envs[m]) for name in one.tensors]
        return [Traffic(one.op.lower(), (PIPELINE,), n) for n in sizes]
