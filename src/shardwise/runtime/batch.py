"""The state of a batch has its rows, the weights of its microbatches, its loss and norm, and what they decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.casts import cast_field
from shardwise.core.averaging import Averages
from shardwise.core.fields import has_rows, is_output
from shardwise.core.instruction import Instruction
from shardwise.core.layout import shard_range
from shardwise.core.structure import objects_of
from shardwise.ops.env import Env
from shardwise.parallel.data import SHARDS
from shardwise.runtime import collect
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.gathered import Gathered
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.numbers import Numbers
from shardwise.runtime.optimizer import Settings
from shardwise.runtime.rank_context import RankContext
from shardwise.runtime.step_sums import StepSums
from shardwise.shard.op_spec import Placement
from shardwise.units.trace import Trace

TURN = 0x9E3779B97F4A7C15  # far from the seeds that users choose; keys take it modulo 2**64


@dataclass
class StepInput:
    """This is one rank's part of a batch of ``rows`` rows in all: ``fields`` has its rows of each microbatch in turn.

    ``settings`` are the hyperparameters of the update by group.  ``stop``: this rank has been asked to stop after the
    step, or soon after.
    """

    fields: Mapping[str, Tensor]
    rows: int
    step: int
    settings: Settings
    stop: bool = False
    averages: Averages = ""  # what the update does to the average of the weights
    turn: int = 0  # of several batches of a step, which have other random numbers


class HostResult(NamedTuple):
    """This has the numbers of a :class:`StepResult` on the host, where they are plain Python values."""

    loss: float
    grad_norm: float
    skipped: bool
    weight: float
    stop: int
    halted: bool
    scale: float | None
    overflows: int | None


class KeptParts(NamedTuple):
    """This is what a rank has of a value that is kept for the user's loop: how it lies on the axes of the batch, and
    the ``parts`` of the microbatches, None where another stage has them."""

    placement: Placement
    parts: list[Tensor | None]


@dataclass
class StepResult:
    """This has 0-d device tensors of a step: the loss of the whole batch, the gradient norm before clipping, and
    whether the step was skipped (not 0).

    ``weight`` is the number that the loss is a mean over: the batch's targets for a mean cross-entropy, or the sum of
    their classes' weights, else its rows.
    ``stop`` is the number of ranks that have been asked to stop, the same on all.  Under fp16 ``scale`` is the factor
    on the loss, and ``overflows`` the number of skipped steps in a row.  ``repeated`` says whether the stages had
    wrongly updated by their own norms; it is None if they had not updated so.  ``halted`` is not 0 if no step is taken
    any more until the host has looked.  ``kept`` has what this rank has, in each microbatch, of the values that
    are kept beside the loss, by name: those at which a user's loop looks, and in an evaluation the model's outputs.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    weight: Tensor
    stop: Tensor
    scale: Tensor | None = None
    overflows: Tensor | None = None
    repeated: bool | None = None
    halted: Tensor | None = None
    kept: Mapping[str, KeptParts] = field(default_factory=dict)

    @property
    def outputs(self) -> list[Tensor] | None:
        """Return, in an evaluation that asks for them, what the model returns for this rank's rows besides the loss, on
        the ranks that have its last unit; None on others."""
        parts = [one.parts for name, one in self.kept.items() if is_output(name)]
        found = [[part for part in each if part is not None] for each in parts]
        return [torch.cat(each) for each in found] if all(found) and found else None

    def __post_init__(self) -> None:
        scaled = [] if self.scale is None or self.overflows is None else [self.scale, self.overflows]
        halted = self.skipped if self.halted is None else self.halted
        self._numbers = Numbers.of([self.loss, self.grad_norm, self.skipped, self.weight, self.stop, halted, *scaled])

    def on_host(self) -> HostResult:
        """Return the step's numbers; the host waits until this step is done, but not for the one issued after it."""
        loss, norm, skipped, weight, stop, halted, *scaling = self._numbers.read()
        scale, overflows = (scaling[0], int(scaling[1])) if scaling else (None, None)
        return HostResult(loss, norm, bool(skipped), weight, int(stop), bool(halted), scale, overflows)


class BatchState:
    """This is the state of the batch ``given``, whose microbatches are numbered from 0 and have one trace each.

    ``scales`` are the loss scales by version of the weights, and ``version`` is the one that the batch uses; without
    loss scaling they are empty.
    """

    def __init__(
        self, owner: RankContext, traces: Sequence[Trace], given: StepInput, scales: Sequence[Tensor] = ()
    ) -> None:
        comm = owner.comm
        self.owner, self.traces, self.given, self.memory = owner, traces, given, owner.memory
        self.microbatches = len(traces)
        self.cuts = all(one.cuts_batch and one.rows in (None, given.rows) for one in traces)
        self.parts = comm.mesh.axis_size(owner.axes)
        self.index = comm.mesh.index(comm.rank, owner.axes)
        there = Backend.of(comm.device)
        self.fields = {
            k: cast_field(there.to_device(v, comm.device), traces[0].precision) for k, v in given.fields.items()
        }
        # A request to stop travels with the loss: all ranks learn of it in the same step, at no cost.
        self.shared = torch.zeros(2, dtype=self.wide, device=comm.device)
        self.loss, stop = self.shared
        if given.stop:
            stop.fill_(1.0)
        self.sums: StepSums | None = None
        self.weights: Tensor | None = None
        self.norm = torch.zeros((), dtype=self.wide, device=comm.device)
        # By rank and bucket, and then whether each parameter that is optional was reached.
        self.norms: Tensor | None = None
        self.coefficient: Tensor | None = None
        self.clip: Tensor | None = None  # the clipping factor, without the loss scale
        self.skip = self.memory.halted
        self.scales, self.version = scales, 0
        self.halted = self.memory.halted  # before the batch's update
        self.repeated: bool | None = None
        self.skips = False  # set by :meth:`validate`
        self.unreached: dict[str, Tensor] = {}  # 1 for a parameter, by name, that no rank has a gradient of
        self.kept = {
            name: KeptParts(place, [None] * self.microbatches) for name, place in self.traces[0].kept.items()
        }  # on every stage, though one of them computes it
        self.start: list[int] = []
        taken = 0
        for m in range(self.microbatches):
            self.start.append(taken)
            a, b = self.env(m).range()
            taken += b - a

    @property
    def scale(self) -> Tensor | None:
        """Return the factor on the loss, or None without loss scaling."""
        return self.scales[self.version] if self.scales else None

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.traces[0].precision == "fp64" else torch.float32

    def env(self, m: int) -> Env:
        """Return where and when a unit runs for microbatch ``m``."""
        owner = self.owner
        first, last = shard_range(self.given.rows, self.microbatches, m)
        rows, offset, window = (self.given.rows, 0, (first, last)) if self.cuts else (last - first, first, None)
        return Env(
            owner.comm, owner.axes, self.parts, self.index, rows, offset, window,
            seed=owner.seed + self.given.turn * TURN,
            step=self.given.step, counts=() if self.sums is None else self.sums.of(m), tensor=owner.place,
            objects=objects_of(self.given.fields),
        )  # fmt: skip

    def rows_of(self, name: str, m: int, env: Env) -> Tensor:
        """Return this rank's rows of a field in a microbatch; a field without rows is whole."""
        if not has_rows(name):
            return self.fields[name]
        a, b = env.range()
        return self.fields[name].narrow(0, self.start[m], b - a)

    def keep(self, name: str, m: int, value: Tensor) -> None:
        """Keep what this rank has in microbatch ``m`` of a value beside the loss."""
        self.kept[name].parts[m] = value

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def weight(self, m: int) -> Tensor:
        """Return w_m, a 0-d device tensor: 1 where microbatches compute parts of the batch's loss, else the
        microbatch's share of targets (by weight), or of rows."""
        counts = None if self.sums is None or self.cuts else self.sums.targets
        if counts is None:
            share = 1.0 if self.cuts else self.env(m).rows / self.given.rows
            return torch.full((), share, dtype=self.wide, device=self.owner.comm.device)
        if self.weights is None:
            weights = counts.to(self.wide, copy=True)
            total = weights.sum()
            weights += weights == 0  # as what divides the loss is not 0 either
            self.weights = weights.div_(total)
        return self.weights[m]

    def seed(self, m: int, value: Tensor) -> Tensor:
        """Return the gradient of a microbatch's loss, a 0-d tensor."""
        weight = self.weight(m)
        return (weight if self.scale is None else weight * self.scale).to(value.dtype)

    def count(self, gathered: Gathered) -> Iterator[tuple[Tensor, bool]]:
        """Make the sums that the microbatches need, in stages: yield this rank's part of each, 1-d, to be summed over
        ranks before the next is asked for, and whether it is the last."""
        self.sums = StepSums([t.sums for t in self.traces if t.sums is not None], self.cuts)
        for number in range(self.sums.stages):
            row = self.sums.take(self._added(m, number, gathered) for m in range(self.microbatches))
            yield row, number + 1 == self.sums.stages

    def _added(self, m: int, number: int, gathered: Gathered) -> tuple[Tensor, ...]:
        sums, env = self.traces[m].sums, self.env(m)
        assert sums is not None
        stage = sums.stages[number]
        values = [
            *(gathered[n] for n in stage.leaves),
            *(self.memory.buffers[n] for n in stage.buffers),
            *map(self.memory.resident, stage.constants),
        ]
        with torch.no_grad():
            return stage.function(env, *values, *(self.rows_of(n, m, env) for n in stage.fields))

    # ---- the update --------------------------------------------------------------------------------------------------

    def take_norm(self, gradients: Gradients) -> None:
        """Take the norms of this rank's own shards, whoever else has them: all kinds of data parallelism get the same
        bits.
        """
        if self.owner.hooks is not None:
            self.owner.hooks.apply(gradients, self.scale)
        owner, nothing = self.owner, torch.zeros((), dtype=self.wide, device=self.owner.comm.device)
        row = torch.stack([gradients.norm(b).to(self.wide) if b in owner.counted else nothing for b in owner.learning])
        if owner.optional:
            flags = [float(name in gradients.reached) for name in owner.optional]
            row = torch.cat([row, Backend.of(row.device).to_device(torch.tensor(flags, dtype=self.wide), row.device)])
        mesh, axes = owner.comm.mesh, (*owner.axes, *owner.tensor)
        self.norms = torch.zeros(mesh.axis_size(axes), row.numel(), dtype=self.wide, device=row.device)
        self.norms[mesh.index(owner.comm.rank, axes)] = row

    def _total(self) -> Tensor:
        """Return the norm over all parameters whose norms are here, each counted once, as it came out of backward."""
        assert self.norms is not None
        shards = self.owner.comm.mesh.axis_size((SHARDS, *self.owner.tensor))  # further rows belong to replicas
        norm: Tensor = torch.linalg.vector_norm(self.norms[:shards, : len(self.owner.learning)])
        return norm

    def decide(self) -> None:
        """Decide by the norm whether to clip or to skip, without the host."""
        assert self.norms is not None
        self.norm, scale, clip = self._total(), self.scale, self.owner.clip_norm
        bad = (~torch.isfinite(self.norm)).to(torch.float32)
        if scale is not None:
            self.norm = self.norm / scale
        self.clip = None if clip is None else (clip / (self.norm + 1e-6)).clamp(max=1.0)
        self.coefficient = self.clip
        if scale is not None:
            self.coefficient = scale.reciprocal() if self.clip is None else self.clip / scale
        self._skip_if(bad)
        self._judge()

    def decide_alone(self) -> None:
        """Let this stage take its step, unclipped, unless its own norm is not finite or training has halted."""
        self.halted = self.memory.halted.clone()
        bad = (~torch.isfinite(self._total())).to(torch.float32)
        self.skip = torch.maximum(self.memory.halted, bad)
        self._judge()
        self.coefficient = None if self.scale is None else self.scale.reciprocal()

    def validate(self) -> bool:
        """Decide by the norm over all stages, and return whether the update after :meth:`decide_alone` was right.  The
        host waits for the answer, which is the same on all ranks."""
        self.decide()
        wrong = self.skip if self.clip is None else torch.maximum(self.skip, (self.clip < 1).to(torch.float32))
        wrong = torch.minimum(wrong, 1 - self.halted)  # when training had halted no stage has taken a step
        self.repeated, self.skips = (bool(one) for one in torch.stack([wrong, self.skip]).tolist())
        return not self.repeated

    def _judge(self) -> None:
        """Note which parameters have no gradient: no rank has reached them, and none is left of an earlier step."""
        if self.owner.optional:
            assert self.norms is not None
            unreached = (self.norms[:, len(self.owner.learning) :].sum(0) == 0).to(torch.float32)
            if (had := self.memory.had) is not None:
                self.memory.had = torch.maximum(had, 1 - unreached)
                unreached = unreached * (1 - had) if self.memory.keeps_zeros else unreached
            self.unreached = dict(zip(self.owner.optional, unreached, strict=True))

    def _skip_if(self, bad: Tensor) -> None:
        """Skip the step if the norm is not finite (``bad``).  Without loss scaling that halts training; under fp16 the
        scale may be to blame: it goes down, and only ``patience`` skipped steps in a row halt training.
        """
        memory, scaling = self.memory, self.memory.loss_scale
        self.skip = torch.maximum(memory.halted, bad)
        if scaling is not None:
            scaling.update(self.skip)
            bad = (scaling.overflows >= scaling.choice.patience).to(torch.float32)
        torch.maximum(memory.halted, bad, out=memory.halted)

    def gradients(self, keeps: bool = True) -> dict[str, Tensor]:
        """Return the whole gradients of the parameters that were reached, by name, for comparisons; all ranks call it
        together, and one that does not keep them gets none."""
        found: dict[str, Tensor] = {}
        for b in self.memory.buckets.values():
            if b.learns:
                whole = collect.whole(b, b.held_gradient, f"gradients of bucket {b.bucket.index}", keeps)
                if self.scale is not None:
                    for gradient in whole.values():
                        gradient /= self.scale
                found |= {name: g for name, g in whole.items() if not bool(self.unreached.get(name, 0))}
        return found

    def update(self, one: Instruction, together: tuple[int, ...]) -> None:
        """Take the optimizer's step of the buckets ``together``: the instruction's own, several, or none where an
        earlier STEP has updated it.
        """
        bucket, value = self.memory.buckets[one.bucket], self.owner.clip_value
        if bucket.table is not None:
            bucket.update_rows(self.given.settings, self.coefficient, self.skip, value)
            self._average(bucket)
            return
        if len(together) > 1:
            self.memory.joined(together).step(self.given.settings, self.coefficient, self.skip, value)
        elif together:
            self._update_alone(bucket)
        self._average(bucket)
        bucket.publish()

    def _average(self, bucket: BucketMemory) -> None:
        """Let the average of a bucket take up its new masters, also those of parameters that nothing has reached."""
        if bucket.average is not None:
            bucket.average.update(self.given.averages, self.skip)

    def _update_alone(self, bucket: BucketMemory) -> None:
        coefficient, gradient = self.coefficient, bucket.optimizer_gradient
        assert gradient is not None
        if gradient.data_ptr() != bucket.held_gradient.data_ptr():  # the optimizer is offloaded to the host
            gradient.copy_(bucket.held_gradient)
        for optimizer, name in bucket.updates:
            skip = self.skip if name is None else torch.maximum(self.skip, self.unreached[name])
            factor = None if coefficient is None else coefficient.to(gradient.device)
            optimizer.step(self.given.settings, factor, skip.to(gradient.device), self.owner.clip_value)
        if bucket.whole is not None and not bool(self.skip):
            unreached, clip = {name for name, flag in self.unreached.items() if bool(flag)}, self.owner.clip_value
            bucket.whole.step(self.given.settings, bucket.master, gradient, coefficient, unreached, clip)

    def result(self, alone: bool) -> StepResult:
        """Return what all ranks know of the batch by now; ``alone`` says that each stage has decided for itself."""
        norm, skip = self.norm, self.skip.clone()
        if alone:
            norm = self._total()
            skip = torch.maximum(skip, (~torch.isfinite(norm)).to(torch.float32))
        scaling = self.memory.loss_scale
        overflows = None if scaling is None else scaling.overflows.clone()
        # torch.tensor would copy to the GPU, and the host would wait for that.
        rows = torch.full((), self.given.rows, device=self.owner.comm.device)
        targets = None if self.sums is None else self.sums.targets
        weight = rows if targets is None else targets.sum()
        halted = self.memory.halted.clone()
        return StepResult(
            self.loss, norm, skip, weight, self.shared[1], self.scale, overflows, self.repeated, halted, self.kept
        )  # fmt: skip


class BatchStates:
    """These are the batches of a program that are under way; each is taken from ``given`` when it begins."""

    def __init__(self, owner: RankContext, traces: Sequence[Trace], given: Iterator[StepInput]) -> None:
        self.owner, self.traces, self.given = owner, traces, given
        scaling = owner.memory.loss_scale
        self.scales = [] if scaling is None else [scaling.scale.clone()]  # by version of the weights
        self._under_way: dict[int, BatchState] = {}
        self._new(0, next(given))

    def _new(self, number: int, given: StepInput) -> BatchState:
        self._under_way[number] = batch = BatchState(self.owner, self.traces, given, self.scales)
        return batch

    def __getitem__(self, number: int) -> BatchState:
        return self._under_way[number] if number in self._under_way else self._new(number, next(self.given))

    def number(self, microbatch: int) -> int:
        """Return the batch of a microbatch; microbatches are numbered on from batch to batch."""
        return microbatch // len(self.traces)

    def first(self, microbatch: int) -> int:
        """Return the first microbatch of a microbatch's batch."""
        return microbatch - microbatch % len(self.traces)

    def place(self, microbatch: int) -> tuple[BatchState, int]:
        """Return a microbatch's batch, and its number within that batch."""
        return self[self.number(microbatch)], microbatch % len(self.traces)

    def again(self, number: int) -> None:
        """Start a batch over, if it has begun."""
        if number in self._under_way:
            self._new(number, self._under_way[number].given)

    def rescale(self) -> None:
        """Let the next version of the weights use the present loss scale."""
        if self.owner.memory.loss_scale is not None:
            self.scales.append(self.owner.memory.loss_scale.scale.clone())

    def end(self, number: int) -> BatchState:
        """Remove a batch that is over, and return it."""
        return self._under_way.pop(number)
