"""The compute instructions of one rank: FORWARD, RECOMPUTE and BACKWARD of the units of its tasks, in their order.

A task runs the units of its stage block by block; what a block does in one direction is a *turn*. Under recomputation a
turn of a backward first runs the block's forward again, from what other blocks left. Two tasks of different
microbatches may run as a pair (``parallel/overlap.py``): their turns are interleaved at what they exchange, so that one
computes while the other one's values are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, zip_longest

from shardwise.core.instruction import OP_INFO, Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.mesh import joined
from shardwise.core.plan import Plan
from shardwise.core.timetable import Task
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.stages import EVERYWHERE, StageSplit
from shardwise.lower.versions import Versions
from shardwise.parallel.overlap import Group, neighbours, together
from shardwise.units.trace import Bucket, Trace

Turn = list[Instruction]


def interleaved(first: Sequence[Turn], second: Sequence[Turn]) -> list[Turn]:
    """Return the turns of two tasks, in which each task goes on with what the other one has posted under way; they
    begin where those of the first task do, and then those that only the second one has."""
    found: list[Turn] = []
    for each in zip_longest(_pieces(first), _pieces(second), fillvalue=()):
        leading = bool(each[0])
        for piece, leads in zip(each, (leading, not leading), strict=True):
            for begins, one in piece:
                if (begins and leads) or not found:
                    found.append([])
                found[-1].append(one)
    return found


def _pieces(turns: Sequence[Turn]) -> Iterator[list[tuple[bool, Instruction]]]:
    """Cut a task after what it posts, and say of each instruction whether a turn begins with it."""
    piece: list[tuple[bool, Instruction]] = []
    for turn in turns:
        for at, one in enumerate(turn):
            if piece and piece[-1][1].lane is Lane.MOVE and one.lane is not Lane.MOVE:
                yield piece
                piece = []
            piece.append((at == 0, one))
    yield piece


@dataclass
class Compute:
    """Makes the compute instructions of one rank of the pipeline.

    ``used`` has the buckets of each unit's parameters; ``stage_axes`` are those over which the ranks of one stage
    differ: collectives inside units run over them.
    """

    trace: Trace
    plan: Plan
    cut: StageSplit
    rank: int
    versions: Versions
    training: bool
    used: Sequence[Sequence[Bucket]]
    stage_axes: tuple[str, ...]
    written: set[tuple[int, int]] = field(default_factory=set)  # (bucket, batch) of gradients that some backward writes
    _begun: set[tuple[int, int]] = field(default_factory=set)  # (unit, microbatch) of forwards of units without a stage

    @cached_property
    def units(self) -> tuple[int, ...]:
        return self.cut.of_rank[self.rank]

    @cached_property
    def read(self) -> list[set[int]]:
        """The units of this rank that read what each unit makes."""
        found: list[set[int]] = [set() for _ in self.trace.units]
        for u in self.units:
            for producer in self.cut.producers[u]:
                found[producer].add(u)
        return found

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def groups(self) -> Sequence[Group]:
        """Return what the rank does, one after the other: tasks, and pairs of tasks."""
        if self.training:
            return self.versions.groups(self.rank)
        if self.trace.shared:
            return [(task,) for task in self.versions.tasks(self.rank) if task.kind == "F"]
        stages = [s for s in range(self.cut.stages) if self.cut.home[s] == self.rank]
        tasks = [Task("F", s, m) for m in range(self.plan.microbatches) for s in stages]
        if self.plan.tensor.overlap == "none":
            return [(task,) for task in tasks]
        return [*neighbours(together(tasks))]

    def add(self, group: Group, draft: ProgramDraft) -> None:
        """Append the turns of a task, or those of a pair, interleaved, to a draft."""
        each = [list(self.turns(task, draft)) for task in group]
        for turn in interleaved(*each) if len(each) > 1 else each[0]:
            draft.turns.append(len(draft.compute))
            draft.compute += self.first(turn)

    def turns(self, task: Task, draft: ProgramDraft) -> Iterator[Turn]:
        """Yield FORWARD, or RECOMPUTE and BACKWARD, of the units of a task's stage, by block."""
        units, m = self.cut.of_stage(task.stage), task.microbatch
        if m % self.plan.microbatches:  # what exchanges runs once a batch, for the first microbatch
            units = [u for u in units if not self.trace.units[u].exchanges]
        blocks = [list(each) for _, each in groupby(units, self.trace.blocks.__getitem__)]
        if task.kind == "F":
            free = [u for u in self.units if self.cut.stage[u] == EVERYWHERE]
            if free and (free[0], m) not in self._begun:
                self._begun |= {(u, m) for u in free}
                yield [self.forward(u, m) for u in free]
            yield from ([self.forward(u, m) for u in block] for block in blocks)
            return
        for block in reversed(blocks):
            learning = [u for u in block if self.trace.units[u].differentiable]
            if task.kind == "W":
                yield [one for u in reversed(learning) for one in self.backward_weight(u, m)]
                continue
            again = [] if self.saved_by_forward(block, m, draft) else self.again(block, m)
            yield [*again, *self.block_backward(learning, m, task.kind)]

    def first(self, turn: Turn) -> Turn:
        """Fill in ``first``: the gradients that each of these instructions is the first to write."""
        found = []
        for one in turn:
            batch = self.versions.batch(one.microbatch)
            new = tuple(
                b.index for b in one.writes if b.kind == BufferKind.GRAD and (b.index, batch) not in self.written
            )
            self.written |= {(index, batch) for index in new}
            found.append(replace(one, first=new) if new else one)
        return found

    # ---- one block -------------------------------------------------------------------------------------------------

    def saved_by_forward(self, block: Sequence[int], m: int, draft: ProgramDraft) -> bool:
        """Return whether the forward of a block saves what its backward needs; if it has just run, let it do so:
        recomputation would save nothing."""
        if self.plan.memory.recompute == "none" or self.trace.units[block[0]].exchanges:
            return True
        turn = range(draft.turns[-1], len(draft.compute))
        places = {(draft.compute[i].unit, draft.compute[i].microbatch): i for i in turn}
        mine = [places.get((u, m), -1) for u in block]
        if any(i < 0 or draft.compute[i].op is not Op.FORWARD for i in mine):
            return False
        for u, i in zip(block, mine, strict=True):
            draft.compute[i] = self.forward(u, m, saves=True)
        return True

    def again(self, block: Sequence[int], m: int) -> Turn:
        """Return the RECOMPUTEs of those units of a block that its backward needs."""
        needed: set[int] = set()
        for u in reversed(block):
            unit = self.trace.units[u]
            if (unit.differentiable and unit.moves is None) or (unit.closed and self.read[u] & needed):
                needed.add(u)
        return [self.recompute(u, m) for u in block if u in needed]

    def block_backward(self, learning: Sequence[int], m: int, kind: str) -> Turn:
        """Return the BACKWARDs of a block. Before moves the weight gradients wait, to be computed under them."""
        found: Turn = []
        late: Turn = []
        for u in reversed(learning):
            moves = self.trace.units[u].moves
            if late and (moves is None or not moves.back):
                found, late = [*found, *late], []
            under = any(self.moves_back(p) for p in self.cut.producers[u] if p in learning)
            found += [self.backward(u, m, whole=kind == "B" and not under)]
            if kind == "B" and under and moves is None:
                late += self.backward_weight(u, m)
        return [*found, *late]

    def moves_back(self, u: int) -> bool:
        moves = self.trace.units[u].moves
        return moves is not None and moves.back

    # ---- one unit --------------------------------------------------------------------------------------------------

    def where(self, u: int, forward: bool) -> tuple[tuple[str, ...], Lane]:
        """Return the axes over which a unit communicates in forward or backward, and its lane."""
        unit = self.trace.units[u]
        if unit.moves is None:
            return self.stage_axes if unit.collectives else (), Lane.COMPUTE
        if not (unit.moves.there if forward else unit.moves.back):
            return (), Lane.COMPUTE
        return joined(unit.moves.axes), Lane.MOVE

    def under_way(self, u: int, m: int, lane: Lane, back: bool) -> tuple[Buffer, ...]:
        """Return the buffer of what a unit has under way: it is there from the post to the arrival."""
        return (BufferKind.MOVING.of(u, m, int(back)),) if lane is Lane.MOVE else ()

    def forward(self, u: int, m: int, saves: bool | None = None) -> Instruction:
        """Return the FORWARD of a unit; ``saves`` says that autograd saves what backward needs, without RECOMPUTE."""
        unit = self.trace.units[u]
        if saves is None:
            saves = self.plan.memory.recompute == "none" or unit.exchanges
        reads = [BufferKind.PARAM.of(b.index) for b in self.used[u]]
        reads += [BufferKind.ACTIVATION.of(p, k) for p in self.cut.producers[u] for k in self.sources(p, u, m)]
        if unit.reads_sums or ("loss" in unit.outputs and self.trace.weighs_targets):
            reads.append(BufferKind.WEIGHT.of(version=self.versions.batch(m)))
        writes = [BufferKind.ACTIVATION.of(u, m)]
        if self.training and unit.differentiable and unit.moves is None:
            writes += [BufferKind.SAVED.of(u, m)] if saves else self.kept(u, m)
        if "loss" in unit.outputs:
            writes.append(BufferKind.LOSS.of(version=self.versions.batch(m)))
        (axes, lane), version = self.where(u, forward=True), self.version(u, m)
        moving = self.under_way(u, m, lane, back=False)
        return Instruction(
            Op.FORWARD, unit=u, microbatch=m, version=version, axes=axes, lane=lane, reads=tuple(reads),
            writes=(*writes, *moving), frees=moving,
        )  # fmt: skip

    def sources(self, producer: int, u: int, m: int) -> range:
        """Return the microbatches of ``producer`` that unit ``u`` reads in microbatch ``m``."""
        units = self.trace.units
        return units[u].sources(units[producer].exchanges, m, self.plan.microbatches)

    def version(self, u: int, m: int) -> int:
        """Return the version of the weights that a unit uses for a microbatch; a unit without a stage uses no weights,
        and has the version of the rank's first stage.
        """
        stage = self.cut.stage[u]
        own = (
            stage
            if stage != EVERYWHERE
            else min((s for s in (self.cut.stage[v] for v in self.units) if s != EVERYWHERE), default=0)
        )
        return self.versions.version(m, own)

    def recompute(self, u: int, m: int) -> Instruction:
        """Return RECOMPUTE; what it makes for other units of its block is there again."""
        unit, again = self.trace.units[u], self.forward(u, m)
        writes = [BufferKind.SAVED.of(u, m)] if unit.differentiable and unit.moves is None else []
        writes += [BufferKind.ACTIVATION.of(u, m)] if unit.closed else []
        kept = self.kept(u, m) if writes and unit.moves is None and unit.differentiable else []
        return replace(again, op=Op.RECOMPUTE, reads=(*again.reads, *kept), writes=(*writes, *again.frees))

    def kept(self, u: int, m: int) -> list[Buffer]:
        """Return the buffer that FORWARD leaves for RECOMPUTE: what selective recomputation keeps."""
        return [BufferKind.KEPT.of(u, m)] if self.plan.memory.recompute == "selective" else []

    def backward(self, u: int, m: int, whole: bool) -> Instruction:
        """Return BACKWARD, or BACKWARD_INPUT if it is not to be ``whole`` and the unit has products."""
        unit = self.trace.units[u]
        whole = whole or not unit.products
        reads = [BufferKind.SAVED.of(u, m)] if unit.moves is None else []
        reads += [BufferKind.PARAM.of(b.index) for b in self.used[u]]
        each = [(p, k) for p in self.cut.producers[u] for k in self.sources(p, u, m)]
        # Autograd saves inputs; the way back of a move reads only what says where things go.
        held = set(unit.inputs) - set(unit.moves.inputs if unit.moves is not None else ())
        reads += [BufferKind.ACTIVATION.of(p, k) for p, k in each if held.intersection(self.trace.units[p].outputs)]
        reads += [BufferKind.WEIGHT.of(version=self.versions.batch(m))] if "loss" in unit.outputs else []
        reads += [BufferKind.GRADIENT.of(u, m)] if self.read[u] else []
        writes = self.grads(u, unit.parameters if whole else unit.inside)
        passed = {name for name, grad in zip(unit.inputs, unit.input_grads, strict=True) if grad}
        writes += [BufferKind.GRADIENT.of(p, k) for p, k in each if passed.intersection(self.trace.units[p].outputs)]
        writes += [] if whole else [BufferKind.DEFERRED.of(u, m)]
        op, (axes, lane) = Op.BACKWARD if whole else Op.BACKWARD_INPUT, self.where(u, forward=False)
        moving = self.under_way(u, m, lane, back=True)
        return Instruction(
            op, unit=u, microbatch=m, version=self.version(u, m), axes=axes, lane=lane, reads=tuple(reads),
            writes=(*writes, *moving), frees=moving,
        )  # fmt: skip

    def backward_weight(self, u: int, m: int) -> list[Instruction]:
        """Return BACKWARD_WEIGHT if the unit has products; it reads their operands, some of which are live tensors."""
        unit = self.trace.units[u]
        if not unit.products:
            return []
        held = [p for p in (*self.cut.producers[u], u) if set(self.trace.units[p].outputs) & set(unit.held)]
        reads = (BufferKind.DEFERRED.of(u, m), *(BufferKind.ACTIVATION.of(p, m) for p in held))
        writes = tuple(self.grads(u, unit.products))
        return [Instruction(Op.BACKWARD_WEIGHT, unit=u, microbatch=m, reads=reads, writes=writes)]

    def grads(self, u: int, names: Sequence[str]) -> list[Buffer]:
        """Return the gradient buffers of those of a unit's parameters ``names`` that learn."""
        wanted = set(names)
        return [
            BufferKind.GRAD.of(b.index)
            for b in self.used[u]
            if b.learns and any(p.name in wanted for p in b.parameters)
        ]

    # ---- the end of what is made -----------------------------------------------------------------------------------

    def free_activations(self, draft: ProgramDraft) -> None:
        """Free each buffer of a microbatch after its last use, and a unit's outputs not before the unit's backward,
        whose graph holds them; what RECOMPUTE makes again was freed after its last use before."""
        last: dict[Buffer, int] = {}
        ends: list[tuple[Buffer, int]] = []
        for position, one in enumerate(draft.compute):
            live = BufferKind.ACTIVATION.of(one.unit, one.microbatch)
            if one.op is Op.RECOMPUTE and live in one.writes:
                ends.append((live, last.pop(live)))
            for buffer in (*one.reads, *one.writes):
                if buffer.microbatch >= 0 and buffer not in one.frees:
                    last |= dict.fromkeys((buffer, *self.memory_of(buffer)), position)
            if not OP_INFO[one.op].runs_unit:
                continue
            unit = self.trace.units[one.unit]
            if unit.moves is None and not unit.passing and (one.op is not Op.RECOMPUTE or live in last):
                last[live] = position
        for buffer, position in (*ends, *last.items()):
            draft.edit(position, add_frees=(buffer,))

    def memory_of(self, buffer: Buffer) -> Iterator[Buffer]:
        """Yield the buffers whose memory one of live tensors shares: moves that only move gradients copy nothing."""
        if buffer.kind != BufferKind.ACTIVATION or (moves := self.trace.units[buffer.index].moves) is None:
            return
        for producer in () if moves.there else self.cut.producers[buffer.index]:
            if set(self.trace.units[producer].outputs) & set(moves.inputs):
                shared = BufferKind.ACTIVATION.of(producer, buffer.microbatch)
                yield shared
                yield from self.memory_of(shared)
