"""The interpreter runs the program of one rank, instruction by instruction.  There is no other control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.instruction import BufferKind, Instruction, Op
from shardwise.core.local_options import ISLANDS
from shardwise.core.program import Program
from shardwise.core.repeat import of_norm
from shardwise.runtime.batch import BatchStates, StepInput, StepResult
from shardwise.runtime.computing import Computing
from shardwise.runtime.gathered import Gathered
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.handles import Handle
from shardwise.runtime.messages import Messages
from shardwise.runtime.rank_context import RankContext
from shardwise.runtime.together import joint_key, joint_updates
from shardwise.units.trace import Trace

Executor = Callable[[Instruction], None]
"""A function that executes an instruction."""


SUMS = "sums over the batch"
DIFFERENCE = "difference over islands"


class Recording(Protocol):
    """A recorder is told when each instruction of a step runs."""

    def run(self, position: int, one: Instruction, operate: Executor) -> None:
        """Run an instruction by ``operate``, and note when it began and ended."""

    def arrived(self, position: int) -> None:
        """Note that the operation posted by the instruction at ``position`` has been waited for."""

    def move(self, work: Callable[[], None]) -> None:
        """Let the host do its ``work`` for operations under way."""


@dataclass
class Interpreter(RankContext):
    """This runs the programs of a rank, each as one of ``runs``; ``recorder`` is told when each instruction runs."""

    runs: type[Run] = field(kw_only=True)
    recorder: Recording | None = None
    commits: bool = True  # whether what forwards write into buffers lasts
    gradients: Gradients | None = None  # those of a step whose parts are several programs
    # By the id of the program, which is kept so that no other program gets that id.
    _updated: dict[int, tuple[Program, Mapping[int, tuple[int, ...]]]] = field(default_factory=dict)

    def updated(self, program: Program) -> Mapping[int, tuple[int, ...]]:
        """Return the buckets that are updated at each STEP of a program, by the position of the STEP."""
        if id(program) not in self._updated:
            self._updated[id(program)] = (
                program,
                joint_updates(program, lambda bucket: joint_key(self.memory.buckets[bucket])),
            )
        return self._updated[id(program)][1]

    def run(self, traces: Sequence[Trace], program: Program, given: StepInput) -> StepResult:
        """Execute a ``program`` of one batch; ``traces`` has one trace for each microbatch, and these differ only in
        static numbers of rows.
        """
        (result,) = self.results(traces, program, iter([given]))
        return result

    def results(self, traces: Sequence[Trace], program: Program, given: Iterator[StepInput]) -> Iterator[StepResult]:
        """Execute a program of several batches, and yield each batch's result once it is known.

        A batch is taken from ``given`` when it begins, and ``traces`` has one trace for each of its microbatches.  The
        caller must take all results: other ranks wait for this one.
        """
        self.memory.reserve(program)
        return self.runs(self, traces, program, given).run()


@dataclass
class Run:
    """A run of a program has its batches, what has been computed of them, and the operations under way."""

    owner: Interpreter
    traces: Sequence[Trace]  # one for each microbatch of a batch
    program: Program
    given: Iterator[StepInput]
    handles: dict[int, tuple[Instruction, Handle]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm, owner, instructions = self.owner.comm, self.owner, self.program.instructions
        self.memory = memory = owner.memory
        self.batches = BatchStates(owner, self.traces, self.given)
        self.gathered = Gathered(memory, comm, instructions, owner.strict, owner.offload, owner.servers)
        self.gradients = owner.gradients or Gradients(memory, comm, owner.strict)
        each = [*self.traces] * self.program.batches  # one for each microbatch of all batches
        self.computing = values = Computing(owner, each, self.batches, self.gathered, self.gradients)
        self.messages = Messages(comm, self.gradients, each, values.live, values.pending, values.received, owner.strict)
        # A stage that decides by its own norm sums the norms of all stages only after that.
        norms = [one for one in instructions if one.op is Op.DECIDE or of_norm(one)]
        self.alone = bool(norms) and norms[-1].op is Op.REDUCE
        self.updated = owner.updated(self.program)
        self.skip = memory.halted  # not 0 if what forwards have written into buffers is dropped

    def operations(self) -> Mapping[Op, Executor]:
        """Map each kind of instruction to the function that executes it."""
        computing = self.computing
        return {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.forward, Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward,
            Op.BACKWARD_WEIGHT: computing.backward_weight, Op.COUNT: self.count, Op.GATHER: self.gather,
            Op.ROUND: self.gradients.round, Op.PUSH: self.push, Op.PULL: self.gather, Op.COMMIT: self.commit,
            Op.REDUCE: self.reduce, Op.ADD: self.add, Op.NORM: self.take_norm, Op.DECIDE: self.decide,
            Op.STASH: self.gathered.stash,
            Op.STEP: self.update, Op.DIFFER: self.differ, Op.OUTER: self.outer_step,
            Op.SEND: self.post, Op.RECEIVE: self.post, Op.REPORT: self.report,
        }  # fmt: skip

    def run(self) -> Iterator[StepResult]:
        owner = self.owner
        # Not an attribute: a reference cycle would hold the batch and the buffers' new values until it is collected.
        run_op = self.operations()
        for position in self.positions():
            one = self.program.instructions[position]
            if owner.progress is not None:
                owner.progress(position, one)
            for at in one.waits:
                self.wait(at)
            self.computing.position = position
            if owner.recorder is None:
                run_op[one.op](one)
            else:
                owner.recorder.run(position, one, run_op[one.op])
            if position not in self.handles:
                self.free(one)
            if self.handles:
                if owner.recorder is None:
                    owner.comm.progress()
                else:
                    owner.recorder.move(owner.comm.progress)
            if one.op is Op.REPORT:
                yield self.batches.end(one.version).result(self.alone)  # a name for it would keep its rows
        self.wait_for_all()
        self.commit_buffers()

    def positions(self) -> Iterator[int]:
        """Return the positions of the instructions, in the order in which they are executed."""
        return iter(range(len(self.program.instructions)))

    def wait(self, at: int) -> None:
        """Wait for an instruction and all before it in its queue: of each queue, ``waits`` names only the latest."""
        queue = self.program.instructions[at].queue
        for earlier in [p for p, (one, _) in self.handles.items() if p <= at and one.queue == queue]:
            one, handle = self.handles.pop(earlier)
            handle.wait()
            if self.owner.recorder is not None:
                self.owner.recorder.arrived(earlier)
            self.free(one)

    def wait_for_all(self) -> None:
        """Wait for everything that has been posted."""
        for at in list(self.handles):
            self.wait(at)

    def free(self, one: Instruction) -> None:
        """Free the buffers whose content ends with a completed instruction."""
        for buffer in one.frees:
            if buffer.kind in (BufferKind.SLOT, BufferKind.STASH):
                self.gathered.free(buffer)
            elif buffer.kind == BufferKind.UNREDUCED:
                self.gradients.free(buffer)
            elif buffer.kind == BufferKind.ACTIVATION:
                self.computing.free(buffer)
            elif buffer.kind == BufferKind.RECEIVED:
                self.messages.free(buffer)

    # ---- units ------------------------------------------------------------------------------------------------------

    def forward(self, one: Instruction) -> None:
        if (handle := self.computing.forward(one)) is not None:
            self.handles[self.computing.position] = (one, handle)

    def backward(self, one: Instruction) -> None:
        if (handle := self.computing.backward(one)) is not None:
            self.handles[self.computing.position] = (one, handle)

    # ---- messages, reductions, the update ----------------------------------------------------------------------------

    def post(self, one: Instruction) -> None:
        """Post a message between stages."""
        env = None
        if one.microbatch >= 0:  # a bucket's gradient belongs to no microbatch
            batch, m = self.batches.place(one.microbatch)
            env = batch.env(m)
        handle = self.messages.send(one, env) if one.op is Op.SEND else self.messages.receive(one, env)
        self.handles[self.computing.position] = (one, handle)

    def add(self, one: Instruction) -> None:
        """Add to a bucket's gradient what is in a slot or has come from another rank."""
        if one.slot >= 0:
            self.gradients.add_slot(one)
        else:
            (value,) = self.messages.received[one.reads[0]].values()
            self.gradients.held(one.bucket).add_(value)

    def gather(self, one: Instruction) -> None:
        self.handles[self.computing.position] = (one, self.gathered.gather(one))

    def reduce(self, one: Instruction) -> None:
        over_islands = one.axes == (ISLANDS,)
        if one.bucket >= 0 and over_islands:
            self.sum_over(one, self.memory.buckets[one.bucket].outer.difference, DIFFERENCE)
            return
        if one.bucket >= 0:
            self.handles[self.computing.position] = (one, self.gradients.reduce(one))
            return
        batch = self.batches[one.version]
        x = batch.norms if one.writes[0].kind == BufferKind.NORM else batch.shared
        assert x is not None
        if over_islands:  # each island reports its own loss, but they stop together
            x = batch.shared[1:]
        self.sum_over(one, x, one.writes[0].kind)

    def push(self, one: Instruction) -> None:
        self.handles[self.computing.position] = (one, self.gradients.push(one, self.owner.servers))

    def commit(self, one: Instruction) -> None:
        """Let servers apply the gradients, clipped, unless the norm is not finite; the host waits for the norm."""
        batch, servers = self.batches[one.version], self.owner.servers
        assert servers is not None
        weight = 1.0 if batch.coefficient is None else float(batch.coefficient)
        if not bool(batch.skip):
            self.handles[self.computing.position] = (one, servers.commit(weight))
        for bucket in self.owner.learning:
            self.gradients.updated(bucket)
            self.gathered.updated(bucket)

    def sum_over(self, one: Instruction, x: Tensor, what: str) -> None:
        if one.axes:
            self.handles[self.computing.position] = (
                one,
                self.owner.comm.all_reduce(x, one.axes, lane=str(one.lane), what=what),
            )

    def report(self, one: Instruction) -> None:
        """Take the verdict on a finished batch for the model's buffers too, if the program has no other batch.

        Where batches overlap, the verdict on one says nothing about buffers, which others have written too.
        """
        if self.program.batches == 1:
            self.skip = self.batches[one.version].skip

    def count(self, one: Instruction) -> None:
        for row, last in self.batches[one.version].count(self.gathered):
            if last:
                self.sum_over(one, row, SUMS)
            elif one.axes:  # the next stage reads it
                self.owner.comm.all_reduce(row, one.axes, lane=str(one.lane), what=SUMS).wait()

    def take_norm(self, one: Instruction) -> None:
        self.batches[one.version].take_norm(self.gradients)

    def decide(self, one: Instruction) -> None:
        self.reach_verdict(one)
        if self.owner.keep_gradients is not None:
            self.owner.keep_gradients.append(self.batches[one.version].gradients(self.owner.needs_gradients))

    def reach_verdict(self, one: Instruction) -> None:
        """Decide whether a batch is clipped or skipped."""
        self.batches[one.version].decide()
        self.rescale(one)

    def rescale(self, one: Instruction) -> None:
        """Let the next version of the weights use the loss scale that follows from a batch."""
        if one.version + 1 < self.program.batches:
            self.batches.rescale()

    def update(self, one: Instruction) -> None:
        if self.memory.keeps_zeros:
            self.gradients.settle(one.bucket)
        self.batches[one.version].update(one, self.updated[self.computing.position])
        self.gradients.updated(one.bucket)
        self.gathered.updated(one.bucket)

    def differ(self, one: Instruction) -> None:
        self.memory.buckets[one.bucket].outer.differ()

    def outer_step(self, one: Instruction) -> None:
        bucket = self.memory.buckets[one.bucket]
        bucket.outer.step()
        bucket.publish()

    @torch.no_grad()
    def commit_buffers(self) -> None:
        """Write the buffers' new values unless the step was skipped or, after several batches, training has halted."""
        for name, value in self.computing.updates.items() if self.owner.commits else ():
            buffer = self.memory.buffers[name]
            buffer.copy_(torch.where(self.skip != 0, self.old_buffer(name), value))

    def old_buffer(self, name: str) -> Tensor:
        """Return the value that a buffer of the model has if the step was skipped."""
        return self.memory.buffers[name]
