"""The ranks of a pipeline send and receive these messages while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, BufferKind, Instruction
from shardwise.ops.collectives import in_memory
from shardwise.ops.env import Env
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.handles import Handle
from shardwise.units.trace import Trace

Live = MutableMapping[tuple[str, int], Tensor]
"""Tensors by (name, microbatch)."""


@dataclass(frozen=True, slots=True)
class _Several:
    """This handle waits for several operations, and keeps the tensors that they send alive."""

    handles: Sequence[Handle]
    values: Sequence[Tensor]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


@dataclass
class Messages:
    """A live tensor is sent as it is, and is live on the receiver; its gradient waits in ``received`` for the backward
    that reads it.  For a bucket that another rank has too, the whole gradient or this rank's shard of it is sent.

    ``strict`` fills the tensors of units with NaN until they are received.
    """

    comm: Communicator
    gradients: Gradients
    traces: Sequence[Trace]
    live: Live
    pending: Live
    received: MutableMapping[Buffer, dict[str, Tensor]]
    strict: bool = False

    def send(self, one: Instruction, env: Env | None) -> Handle:
        """Post the sends of all that the instruction carries; a gradient that no backward has produced is zero.

        Raises :class:`ShardwiseError` where that would move parameters of another stage, which one device does not."""
        m, kind = one.microbatch, one.reads[0].kind
        if one.bucket >= 0:
            values = {"gradient": self.gradients.held(one.bucket)}
        elif kind == BufferKind.ACTIVATION:
            values = {name: self.live[name, m] for name in one.tensors}
        else:
            grads = {name: self.pending.pop((name, m), None) for name in one.tensors}
            if self.traces[m].skips and any(grad is None for grad in grads.values()):
                wrong = "in this step the loss does not depend on what earlier stages compute, by a branch in Python"
                raise ShardwiseError(f"pp: {wrong}; legal: pp = 1, or a loss that depends on all stages in each step")
            values = {
                name: self._empty(one, name, env).zero_() if grad is None else grad for name, grad in grads.items()
            }
        values = {name: in_memory(value.detach()) for name, value in values.items()}
        return self._post(one, values, self.comm.send)

    def receive(self, one: Instruction, env: Env | None) -> Handle:
        """Post the receives of all that the instruction carries."""
        place = one.writes[0]
        if one.bucket >= 0:
            goal = self.gradients.held(one.bucket)
            values = {"gradient": goal if place.kind == BufferKind.GRAD else torch.empty_like(goal)}
        else:
            values = {name: self._empty(one, name, env) for name in one.tensors}
        if place.kind == BufferKind.RECEIVED:
            self.received[place] = values
        elif place.kind == BufferKind.ACTIVATION:
            unit = self.traces[one.microbatch].units[one.unit]
            grads = dict(zip(unit.outputs, unit.output_grads, strict=True))
            for name, value in values.items():
                self.live[name, one.microbatch] = value.detach().requires_grad_(grads[name])
        return self._post(one, values, self.comm.receive)

    def free(self, place: Buffer) -> None:
        """Drop what was received: it has been read."""
        self.received.pop(place, None)

    def _post(self, one: Instruction, values: Mapping[str, Tensor], post: Callable[..., Handle]) -> Handle:
        assert one.peer is not None
        there = self.comm.mesh.offset(self.comm.rank, *one.peer, wrap=True)
        kind = (one.reads or one.writes)[0].kind
        where = f"bucket {one.bucket}" if one.bucket >= 0 else f"of microbatch {one.microbatch}"
        handles = [
            post(value, there, lane=str(one.lane), what=f"{kind} {name} {where}", channel=one.channel)
            for name, value in values.items()
        ]
        return _Several(handles, tuple(values.values()))

    def _empty(self, one: Instruction, name: str, env: Env | None) -> Tensor:
        """Return memory for this rank's rows of a live tensor, or for their gradient."""
        assert env is not None
        shape, dtype = self.traces[one.microbatch].units[one.unit].local(name, env)
        found = torch.empty(shape, dtype=dtype, device=self.comm.device)
        return found.fill_(float("nan")) if self.strict and dtype.is_floating_point else found
