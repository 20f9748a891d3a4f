"""A worker's buckets at parameter servers that are other processes: what PULL, PUSH and COMMIT do there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.core.flat import FlatShard
from shardwise.core.frames import Share, Shares
from shardwise.core.server_options import ServerOptions
from shardwise.runtime.compression import Feedback, encode_rows
from shardwise.runtime.handles import Completed, Handle
from shardwise.runtime.staging import Part
from shardwise.runtime.tables import Rows


class Posted(Protocol):
    """What has been asked of all servers, and may not have been answered."""

    def wait(self, timeout: float | None = None) -> tuple[Any, ...]: ...


class Client(Protocol):
    """What :class:`~shardwise.runtime.server_client.ServerClient` offers."""

    def pull(self, into: Mapping[int, object]) -> Posted: ...
    def push(self, bucket: int, gradient: object) -> None: ...
    def push_parts(self, server: int, parts: Sequence[Part]) -> None: ...
    def commit(self, ticket: int | None, versions: Sequence[int], weight: float = 1.0) -> Posted: ...


@dataclass
class _Pulled:
    """The handle of a pull, which all buckets of a step share."""

    worker: ServedWorker
    posted: Posted
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.done = True
            self.worker.versions = self.posted.wait()


@dataclass
class _Committed:
    """The handle of a commit."""

    worker: ServedWorker
    posted: Posted

    def wait(self) -> None:
        self.worker.committed = self.posted.wait()


@dataclass
class ServedWorker:
    """This is one worker's connection to all servers, for the parameters of its ``buckets``, by index.

    ``ticket`` is that of the present batch.  ``versions`` are those of the servers' parameters that are here, and
    ``committed`` are the answers to the last commit.  Tensors are on the CPU.
    """

    client: Client
    options: ServerOptions
    shares: Sequence[Shares] = ()  # what each server has, for gradients that are compressed
    parameters: Mapping[int, Tensor] = field(default_factory=dict)
    ticket: int | None = None
    versions: tuple[int, ...] = ()
    committed: tuple[Any, ...] = ()
    _steps: int = 0  # since the last pull
    _pulled: _Pulled | None = None

    def begin(self, ticket: int | None) -> None:
        """Begin a batch; its first PULL pulls all parameters, if it is time."""
        due = not self.versions or self._steps >= self.options.pull_every
        self.ticket, self._steps = ticket, 1 if due else self._steps + 1
        self._pulled = None if due else self._pulled

    def fresh(self) -> None:
        """Let the next PULL pull, whatever is here."""
        self._pulled = None

    def pull(self) -> Handle:
        """Post the receipt of all parameters, once a batch."""
        if self._pulled is None:
            into = {bucket: as_bytes(tensor) for bucket, tensor in self.parameters.items()}
            self._pulled = _Pulled(self, self.client.pull(into))
        return self._pulled

    def push(self, bucket: int, gradient: Tensor) -> Handle:
        """Send the gradient of a bucket; it must not change until the commit has been answered."""
        if self.options.push == "whole":
            self.client.push(bucket, as_bytes(gradient))
            return Completed()
        for server, shares in enumerate(self.shares):
            if (share := shares.get(bucket)) is not None:
                self.client.push_parts(server, self._compressed(server, bucket, gradient, share))
        return Completed()

    def push_rows(self, bucket: int, rows: Rows) -> Handle:
        """Send the rows of a table's gradient, each to the server that has it, as they are."""
        for server, shares in enumerate(self.shares):
            if (share := shares.get(bucket)) is not None:
                self.client.push_parts(server, parts_of(bucket, share, rows, share.gradient))
        return Completed()

    def _compressed(self, server: int, bucket: int, whole: Tensor, share: Share) -> list[Part]:
        found, gradient = [], whole[share.start : share.stop]
        for offset, count in share.cuts(gradient.itemsize):
            encoding, payload = self.feedback.encoded((server, bucket, offset), gradient[offset : offset + count])
            found.append(Part(bucket, offset, count, encoding, payload.numpy().data))
        return found

    @cached_property
    def feedback(self) -> Feedback:
        """Return what compresses this worker's gradients."""
        return Feedback(self.options.push, self.options.push_share)

    def commit(self, weight: float) -> Handle:
        """Let the servers apply what has been pushed, times ``weight``."""
        return _Committed(self, self.client.commit(self.ticket, self.versions, weight))


def parts_of(bucket: int, share: Share, rows: Rows, itemsize: int) -> list[Part]:
    """Return the parts of a share of a table that hold any of the ``rows``, whose numbers are those of the table."""
    found, first = [], share.start // share.row
    for offset, count in share.cuts(itemsize):
        start = first + offset // share.row
        mine = rows.between(FlatShard(start * share.row, start * share.row + count))
        if len(mine.numbers):
            encoding, payload = encode_rows(mine.numbers - start, mine.values, count)
            found.append(Part(bucket, offset, count, encoding, payload.numpy().data))
    return found


def as_bytes(x: Tensor) -> memoryview:
    """Return a 1-d contiguous CPU tensor's memory as bytes."""
    return x.detach().view(torch.uint8).numpy().data
