"""An optimizer over whole tensors: those of a bucket are put together on their owners, which take the step.

A rank sends its pieces of gradients and masters to the owner of each parameter, and gets pieces of the new masters
back; both are one all-to-all.  Where a rank has every parameter whole it takes views of its buffers, and nothing is
sent.  The optimizer is that of one device, on tensors of the shapes that the user's module has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.instruction import Lane
from shardwise.core.layout import Box
from shardwise.core.optim import OptimizerChoice
from shardwise.parallel.data import SHARDS, held_range
from shardwise.runtime.boxes import boxes
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.optimizer import Settings, arrange, torch_optimizer
from shardwise.runtime.own_optimizer import Kept, OwnOptimizer
from shardwise.units.share import Share, WholeTensor
from shardwise.units.trace import Bucket

LANE = str(Lane.REDUCE)


class Piece(NamedTuple):
    """A box of the whole parameter called ``name``, which the rank number ``owner`` of the group puts together."""

    name: str
    box: Box
    owner: int

    @property
    def numel(self) -> int:
        return self.box.numel


class WholeTensors:
    """What updates the parameters of ``share.whole``, on this rank those that it owns.

    ``device`` is where masters and state are.  State is made at once, as that of all these optimizers begins with
    zeros; a user's own optimizer makes its state in its first step.
    The host looks whether a step is skipped, as the scalars of these optimizers are on the host.
    """

    def __init__(
        self, bucket: Bucket, share: Share, comm: Communicator, choice: OptimizerChoice, device: torch.device
    ) -> None:
        self.bucket, self.share, self.comm, self.choice, self.device = bucket, share, comm, choice, device
        self.axes = share.parted
        self._shapes = {one.name: one.shape for one in share.whole}
        # Stand-ins for the parameters: they have memory only while a step is taken.
        self._parameters = {one.name: self._empty(one.name) for one in share.owned}
        # Each has an optimizer of its own: what that keeps besides state, such as a count of its steps, is then right.
        self._optimizers = {one.name: self._optimizer(one) for one in share.owned}

    def _optimizer(self, one: WholeTensor) -> torch.optim.Optimizer:
        parameter, own = self._parameters[one.name], self._own(one)
        if own is not None:
            made = own.over({own.group: [parameter]})
            made.param_groups[0]["number"] = one.group
            return made
        options = {"foreach": False} if self.choice.parts[one.part].name == "adafactor" else {}
        optimizer = torch_optimizer(self.choice, [(parameter, one.group)], one.part, **options)
        optimizer.state[parameter] = {
            key: torch.zeros(shape, dtype=self.bucket.wide, device=self.device) if shape else torch.tensor(0.0)
            for key, shape in self.choice.parts[one.part].whole_state(one.shape).items()
        }
        return optimizer

    def _own(self, one: WholeTensor) -> OwnOptimizer | None:
        found: OwnOptimizer | None = self.choice.parts[one.part].own
        return found

    def _new(self, name: str) -> Tensor:
        return torch.empty(self._shapes[name], dtype=self.bucket.wide, device=self.device)

    def _empty(self, name: str) -> Tensor:
        return torch.zeros((), dtype=self.bucket.wide, device=self.device).expand(self._shapes[name])

    # ---- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, settings: Settings, masters: Tensor, gradient: Tensor, scale: Tensor | None, unreached: Collection[str],
        clip_value: float | None = None,
    ) -> None:  # fmt: skip
        """Update the held range of ``masters`` by that of the ``gradient``, both flat, which counts as ``scale`` times
        what it is, and then within ``clip_value`` of 0; parameters that are ``unreached`` have no gradient.  All ranks
        of the group call it together."""
        values, gradients = self._put_together(masters, gradient)
        for name, optimizer in self._optimizers.items():
            own = gradients.pop(name)
            if name not in unreached:
                arrange(optimizer, settings)
                own = own if scale is None else own.mul_(scale.to(self.device))
                self._update(name, values[name], own if clip_value is None else own.clamp_(-clip_value, clip_value))
        if self.axes:
            self._send_back(values, masters)

    def _update(self, name: str, value: Tensor, gradient: Tensor) -> None:
        """Update a whole ``value`` in place."""
        parameter = self._parameters[name]
        parameter.data, parameter.grad = value, gradient
        self._optimizers[name].step()
        if parameter.data_ptr() != value.data_ptr():  # an optimizer may have put another tensor there
            value.copy_(parameter)
        parameter.data, parameter.grad = self._empty(name), None

    def _put_together(self, masters: Tensor, gradient: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the masters and the gradients of the owned parameters, whole, by name."""
        if not self.axes:
            entries = {e.name: slice(e.offset, e.stop) for e in self.share.layout.entries if e.name in self._parameters}
            both = ({n: flat[at].view(self._shapes[n]) for n, at in entries.items()} for flat in (masters, gradient))
            return next(both), next(both)
        sent = [
            piece
            for owner in range(len(self._places))
            for flat in (gradient, masters)
            for piece in self._pieces(flat, owner)
        ]
        sizes = [[2 * n for n in row] for row in self._sizes]
        inbox = iter(torch.split(self._exchanged(sent, sizes, "whole gradients"), self._lengths(2)))
        gradients, values = ({name: self._new(name) for name in self._parameters} for _ in range(2))
        for places in self._places:
            for goals in (gradients, values):
                for one in self._mine(places):
                    goals[one.name][one.box.slices] = next(inbox).view(one.box.shape)
        return values, gradients

    def _send_back(self, values: Mapping[str, Tensor], masters: Tensor) -> None:
        """Send pieces of the owned parameters to the ranks that hold them, and take those of the others."""
        sent = [values[one.name][one.box.slices] for places in self._places for one in self._mine(places)]
        inbox = self._exchanged(sent, [list(row) for row in zip(*self._sizes, strict=True)], "whole parameters")
        goals = [goal for owner in range(len(self._places)) for goal in self._pieces(masters, owner)]
        for goal, piece in zip(goals, torch.split(inbox, [goal.numel() for goal in goals]), strict=True):
            goal.copy_(piece.view(goal.shape))

    def _exchanged(self, sent: Sequence[Tensor], sizes: Sequence[Sequence[int]], what: str) -> Tensor:
        """Return what the ranks of the group have sent here, flat, by rank."""
        there, index = self.comm.device, self.share.place
        outbox = torch.cat([piece.reshape(-1) for piece in sent]) if sent else torch.empty(0, dtype=self.bucket.wide)
        inbox = torch.empty(sum(row[index] for row in sizes), dtype=self.bucket.wide, device=there)
        what = f"{what} of bucket {self.bucket.index}"
        self.comm.all_to_all(inbox, outbox.to(there), self.axes, lane=LANE, what=what, sizes=sizes).wait()
        return inbox.to(self.device)

    # ---- who has what ------------------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> list[list[Piece]]:
        """The pieces that each rank of the group holds, in the order of its bucket."""
        mesh, owners = self.comm.mesh, {one.name: one.owner for one in self.share.whole}
        found = []
        for rank in mesh.group(self.comm.rank, self.axes):
            layout = self.bucket.layout(self.choice, mesh, rank)
            held = held_range(self.share.rule, layout, mesh.axis_size(SHARDS), mesh.index(rank, SHARDS))
            flat = torch.empty(held.numel, device="meta")
            every = boxes(self.bucket, layout, mesh, rank, flat, held.start, held.start, held.stop)
            found.append([Piece(p.name, box, owners[p.name]) for p, box, _ in every if p.name in owners])
        return found

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """The number of elements that each rank of the group has of what each owns."""
        number = range(len(self._places))
        return [[sum(one.numel for one in places if one.owner == owner) for owner in number] for places in self._places]

    def _mine(self, places: Sequence[Piece]) -> Iterator[Piece]:
        return (one for one in places if one.owner == self.share.place)

    def _lengths(self, times: int) -> list[int]:
        """Return the sizes of the pieces of what is owned, rank by rank, each rank's list so many ``times``."""
        return [one.numel for places in self._places for _ in range(times) for one in self._mine(places)]

    def _pieces(self, flat: Tensor, owner: int) -> Iterator[Tensor]:
        """Yield views of the held range of a flat tensor: the pieces of what ``owner`` owns."""
        held, owners = self.share.held, {one.name for one in self.share.whole if one.owner == owner}
        every = boxes(
            self.bucket, self.share.layout, self.comm.mesh, self.comm.rank, flat, held.start, held.start, held.stop
        )
        return (values for parameter, _, values in every if parameter.name in owners)

    # ---- state -------------------------------------------------------------------------------------------------------

    def states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each owned parameter and its live state, by torch's names; that of a user's own optimizer is there
        after its first step, with numbers as copies."""
        for name, optimizer in self._optimizers.items():
            state = optimizer.state[self._parameters[name]]
            yield name, {key: Kept.tensor(value) for key, value in state.items()}

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Have memory in place of the state of users' own optimizers, for a checkpoint to fill, in this context."""
        own = {one.name: kept.kept(one.shape) for one in self.share.owned if (kept := self._own(one)) is not None}
        for name, each in own.items():
            parameter = self._parameters[name]
            self._optimizers[name].state[parameter] = {key: kept.empty(parameter) for key, kept in each.items()}
        try:
            yield
        except BaseException:
            for name in own:
                self._optimizers[name].state.clear()
            raise
        for name, each in own.items():
            state = self._optimizers[name].state[self._parameters[name]]
            state.update({key: kept.kind(state[key].item()) for key, kept in each.items() if kept.kind is not None})
