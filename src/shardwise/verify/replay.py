"""Replay what parameter servers have recorded on one device, by ordinary autograd and ``torch.optim``.

Each push is a gradient of one batch, of parameters as they were at the versions that its worker had pulled, one a
server.  The replay computes it on the whole module from those parameters, and lets each server's own optimizer take its
steps in the order of that server's record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.verify.oracle import Fields, Oracle, plain_optimizer


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` - 1 of a parameter, counted as it lies in memory; a server has them from element
    ``at`` of its range of ``bucket`` on, which has ``size`` elements."""

    name: str
    start: int
    stop: int
    bucket: int
    at: int
    size: int


class Applied(NamedTuple):
    """A push as one server has recorded it: ``key`` is the same in all records."""

    key: tuple[int, int, int]  # worker, ticket, and how often the worker had pushed that ticket before
    read: int
    weight: float
    version: int


Received = Callable[[int, int, Tensor], Tensor]


@dataclass
class Gradient:
    """What one device computes for a push."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass
class Replayed:
    """The masters at the end, whole and by name, and the loss and the norm of each push, by its key."""

    parameters: dict[str, Tensor]
    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    norms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    weights: dict[tuple[int, int, int], float] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)


def pushes(record: Iterable[str]) -> list[Applied]:
    """Return the pushes of a server's record, in the order in which they were applied."""
    found: list[Applied] = []
    seen: Counter[tuple[int, int]] = Counter()
    for one in map(json.loads, record):
        if one["event"] == "push":
            place = one["worker"], one["ticket"]
            found.append(Applied((*place, seen[place]), one["read"], one["weight"], one["version"]))
            seen[place] += 1
    return found


class _Server:
    """One server's slices: their values by version, and an optimizer of their own."""

    def __init__(
        self, slices: Sequence[Slice], values: Mapping[str, Tensor], choice: OptimizerChoice, applied: list[Applied]
    ) -> None:
        self.slices, self.choice, self.applied, self.next = slices, choice, applied, 0
        self.own = [values[s.name].reshape(-1)[s.start : s.stop].clone().requires_grad_() for s in slices]
        groups: dict[int, list[Tensor]] = {}
        for one, p in zip(slices, self.own, strict=True):
            groups.setdefault(choice.group_of(one.name, tuple(values[one.name].shape)), []).append(p)
        self.optimizer = plain_optimizer(choice)([{"params": each, "number": n} for n, each in groups.items()])
        self.history = [[p.detach().clone() for p in self.own]]

    def apply(
        self, gradients: Mapping[str, Tensor], one: Applied, by_staleness: bool, received: Received | None
    ) -> int:
        """Take the step of a push; return how stale it was.  ``received`` gives what a server receives of a worker's
        gradients, if they are compressed."""
        stale = one.version - 1 - one.read
        settings = self.choice.settings(one.version - 1)
        for group in self.optimizer.param_groups:
            group.update(settings[group["number"]])
            group["lr"] /= 1 + stale if by_staleness else 1
        flat = {part.bucket: self.own[0].detach().new_zeros(part.size) for part in self.slices}
        for part in self.slices:
            whole = gradients.get(part.name)  # none of a parameter that the batch's loss does not depend on
            if whole is not None:
                flat[part.bucket][part.at : part.at + part.stop - part.start] = whole.reshape(-1)[
                    part.start : part.stop
                ]
        if received is not None:
            flat = {bucket: received(one.key[0], bucket, values) for bucket, values in flat.items()}
        for part, p in zip(self.slices, self.own, strict=True):
            p.grad = flat[part.bucket][part.at : part.at + part.stop - part.start] * one.weight
        self.optimizer.step()
        self.history.append([p.detach().clone() for p in self.own])
        self.next += 1
        return stale


def replay(
    oracle: Oracle, batch_of: Callable[[int], Fields], records: Sequence[Sequence[str]],
    slices: Sequence[Sequence[Slice]], choice: OptimizerChoice, by_staleness: bool = False,
    received: Sequence[Received] = (),
) -> Replayed:  # fmt: skip
    """Return what one device has after all pushes of the ``records``, one for each server; its ``slices`` are those of
    each server, ``batch_of`` gives the batch of a ticket, and ``oracle`` has no optimizer.  ``received`` has, for each
    server, a function of (worker, bucket, gradient) that compresses as workers do, if they do.

    Raises :class:`ShardwiseError` where a record does not follow from anything.
    """
    masters = {name: p.detach().clone() for name, p in oracle.masters.items()}
    servers = [
        _Server(own, masters, choice, pushes(record)) for own, record in zip(slices, records, strict=True)
    ]  # fmt: skip
    reads = [{one.key: one.read for one in server.applied} for server in servers]
    found, known, left = Replayed(masters), dict[tuple[int, int, int], Gradient](), Counter[tuple[int, int, int]]()
    while any(server.next < len(server.applied) for server in servers):
        moved = False
        for server in servers:
            while server.next < len(server.applied):
                one = server.applied[server.next]
                if one.key not in known:
                    wanted = [read.get(one.key) for read in reads]
                    if any(w is None or w >= len(s.history) for w, s in zip(wanted, servers, strict=True)):
                        break  # a version that another server has yet to make
                    known[one.key] = _computed(oracle, batch_of(one.key[1]), one.key[1], servers, wanted)
                    found.losses[one.key], found.norms[one.key] = known[one.key].loss, known[one.key].norm
                    found.weights[one.key] = one.weight
                how = received[servers.index(server)] if received else None
                found.staleness[server.apply(known[one.key].gradients, one, by_staleness, how)] += 1
                left[one.key] += 1
                if left[one.key] == len(servers):
                    known[one.key] = Gradient(0.0, 0.0, {})  # nobody needs it any more
                moved = True
        if not moved:
            raise ShardwiseError("the records do not follow: a push was computed from versions that no server has made")
    with torch.no_grad():
        for server in servers:
            for part, p in zip(server.slices, server.own, strict=True):
                masters[part.name].view(-1)[part.start : part.stop] = p
    return found


def _computed(
    oracle: Oracle, batch: Fields, ticket: int, servers: Sequence[_Server], versions: Sequence[int | None]
) -> Gradient:  # fmt: skip
    """Return the gradient of a batch at these versions of the servers' parameters."""
    with torch.no_grad():
        for server, version in zip(servers, versions, strict=True):
            assert version is not None
            for part, value in zip(server.slices, server.history[version], strict=True):
                oracle.masters[part.name].view(-1)[part.start : part.stop] = value
    oracle.step_index = ticket
    step = oracle.step(batch)
    return Gradient(step.loss, step.grad_norm, step.gradients)


def bound_holds(record: Iterable[str], bound: int) -> bool:
    """Return whether no worker was sent parameters while it was more than ``bound`` pushes ahead of a live one."""
    live: dict[int, int] = {}
    for one in map(json.loads, record):
        event, worker = one["event"], one.get("worker")
        if event == "join":
            live[worker] = one["clock"]
        elif event == "leave":
            live.pop(worker, None)
        elif event == "push":
            live[worker] = one["clock"] + 1
        elif event == "pull" and worker in live and live[worker] > min(live.values()) + bound:
            return False
    return True
