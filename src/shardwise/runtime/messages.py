"""What a rank of a pipeline sends to others and receives of them while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.instruction import Buffer, BufferKind, Instruction
from shardwise.ops.collectives import Env, in_memory
from shardwise.runtime.communicator import Communicator, Handle
from shardwise.runtime.gradients import Gradients
from shardwise.units.trace import Trace

Live = MutableMapping[tuple[str, int], Tensor]
"""By name and microbatch."""


@dataclass(frozen=True, slots=True)
class _Several:
    """Operations that are waited for together.  They keep what they send."""

    handles: Sequence[Handle]
    values: Sequence[Tensor]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


@dataclass
class Messages:
    """Live tensors go from rank to rank as they are, and are live there; their gradients wait in ``received`` for the
    backward that reads them; the gradient of a bucket that another rank has too goes there as a whole, or this rank's
    shard of it.

    ``strict``: what is to be received is NaN until then.
    """

    comm: Communicator
    gradients: Gradients
    traces: Sequence[Trace]
    live: Live
    pending: Live
    received: MutableMapping[Buffer, dict[str, Tensor]]
    strict: bool = False

    def send(self, one: Instruction, env: Env | None) -> Handle:
        """Post all that the instruction carries; a live tensor that nothing has given a gradient has one of zeros."""
        m, kind = one.microbatch, one.reads[0].kind
        if one.bucket >= 0:
            values = {"gradient": self.gradients.final(one.bucket)}
        elif kind == BufferKind.ACTIVATION:
            values = {name: self.live[name, m] for name in one.tensors}
        else:
            grads = {name: self.pending.pop((name, m), None) for name in one.tensors}
            values = {
                name: self._empty(one, name, env).zero_() if grad is None else grad for name, grad in grads.items()
            }
        values = {name: in_memory(value.detach()) for name, value in values.items()}
        return self._post(one, values, self.comm.send)

    def receive(self, one: Instruction, env: Env | None) -> Handle:
        """Post the receives of all that the instruction carries."""
        place = one.writes[0]
        if one.bucket >= 0:
            goal = self.gradients.final(one.bucket)
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
        """What was received has been read."""
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
        """For a live tensor of this rank's rows."""
        assert env is not None
        shape, dtype = self.traces[one.microbatch].units[one.unit].local(name, env)
        found = torch.empty(shape, dtype=dtype, device=self.comm.device)
        return found.fill_(float("nan")) if self.strict and dtype.is_floating_point else found
