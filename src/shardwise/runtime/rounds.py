"""Run the rounds of a collective (``core/rounds.py``) by messages between ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.core.communicators import Members
from shardwise.core.instruction import CHANNELS
from shardwise.core.rounds import Message, Rounds
from shardwise.runtime.communicator import Communicator


def members(each: Iterable[Rounds]) -> list[Members]:
    """Return the communicators that rounds need, in the same order on all ranks."""
    pairs = dict.fromkeys((m.source, m.target) for rounds in each for one in rounds for m in one)
    return [Members(pair, CHANNELS[0], True) for pair in pairs if pair[0] != pair[1]]


def run(comm: Communicator, rounds: Rounds, x: Tensor) -> None:
    """Run the rounds on a rank's buffer ``x`` (blocks, elements of a block), in place; all ranks call it together."""
    for each in rounds:
        _run_round(comm, each, x)


def _run_round(comm: Communicator, each: tuple[Message, ...], x: Tensor) -> None:
    mine = [m for m in each if comm.rank in (m.source, m.target)]
    written = {b for m in mine if m.target == comm.rank and not m.adds for b in m.to}
    received: list[tuple[Message, Tensor]] = []
    under_way, copies = [], []
    for m in mine:
        if m.target == comm.rank and m.source != comm.rank:
            place = _blocks(x, m.to)
            fresh = place is None or m.adds or any(b in written for one in mine for b in one.at)
            into = torch.empty(len(m.to), x.shape[1], dtype=x.dtype, device=x.device) if fresh else place
            assert into is not None
            under_way.append(comm.receive(into, m.source))
            if fresh:
                received.append((m, into))
    for m in mine:
        if m.source == comm.rank:
            found = _blocks(x, m.at)
            values = x[list(m.at)] if found is None else found
            if m.target == comm.rank:
                copies.append((m, values.clone()))
            else:
                under_way.append(comm.send(values, m.target))
    for handle in under_way:
        handle.wait()
    for m, values in (*received, *copies):
        for b, value in zip(m.to, values, strict=True):
            x[b].add_(value) if m.adds else x[b].copy_(value)


def _blocks(x: Tensor, blocks: tuple[int, ...]) -> Tensor | None:
    """Return these blocks as a view, or None where they do not follow each other."""
    first = blocks[0]
    return x[first : first + len(blocks)] if blocks == tuple(range(first, first + len(blocks))) else None
