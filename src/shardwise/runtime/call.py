"""A call is one operation between ranks in words: it tells operations apart, and names the one that fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.core.communicators import Members
from shardwise.core.errors import ShardwiseError


class CommunicationError(ShardwiseError):
    """An operation failed: a peer is gone, or the ranks do not agree on what they do.

    ``rank`` is the rank that noticed, ``operation`` the call in words, ``what`` the caller's name for it,
    ``missing`` the ranks that had not arrived, as far as they are known.
    """

    def __init__(
        self, reason: str, *, rank: int = -1, operation: str = "", what: str = "", missing: Iterable[int] = ()
    ) -> None:
        self.rank, self.operation, self.what, self.missing = rank, operation, what, tuple(missing)
        absent = f" (not arrived: rank {', '.join(map(str, self.missing))})" if self.missing else ""
        place = f"rank {rank}: {operation}: " if operation else ""
        super().__init__(f"{place}{reason}{absent}")


class CommunicationTimeout(CommunicationError):
    """A wait took longer than the communicator's time-out."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group has the ranks of a collective, in group order, and the position of this rank among them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def before(self) -> int:
        """The index of the member before this one; before the first is the last."""
        return (self.index - 1) % self.size

    @property
    def after(self) -> int:
        """The index of the member after this one; after the last is the first."""
        return (self.index + 1) % self.size


@dataclass(frozen=True, slots=True)
class Call:
    """A call describes one posted operation, for error messages and to tell two operations apart."""

    kind: str
    group: Group
    lane: str
    what: str
    channel: str = ""  # the channel of a message

    @property
    def pair(self) -> bool:
        """Return whether it is a message from one rank to another."""
        return self.channel != ""

    @property
    def queue(self) -> str:
        """Return the name of the queue, of those of its group, in whose order it runs."""
        return f"message {self.channel}" if self.channel else self.lane

    @property
    def members(self) -> Members:
        """Return the communicator that the operation belongs to."""
        if self.channel:
            return Members(self.group.ranks, self.channel, True)
        return Members(tuple(sorted(self.group.ranks)), self.lane)

    def error(
        self, reason: str, rank: int, missing: Iterable[int] = (), kind: type[CommunicationError] = CommunicationError
    ) -> CommunicationError:
        """Return the error that ``rank`` raises where the operation has failed."""
        return kind(reason, rank=rank, operation=str(self), what=self.what, missing=missing)

    def __str__(self) -> str:
        name = f" of {self.what}" if self.what else ""
        over = f" over {','.join(self.group.axes)}" if self.group.axes else ""
        return f"{self.kind}{name}{over} among ranks {list(self.group.ranks)} on lane {self.lane}"
