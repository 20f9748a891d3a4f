"""What ranks have recorded of a step: when each instruction and each operation between ranks began and ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .instruction import Op


class Event(NamedTuple):
    """An event is an instruction from ``start`` to ``stop``, in seconds since the recording began on its rank.

    An operation that is only posted, such as a collective, stops where it has been waited for.  An instruction that is
    run again has an event for each time, and ``lasting`` says that it was not run again later.  ``peer`` is the rank at
    the other side of a message, else -1; ``text`` is the instruction in words.
    """

    op: Op
    lane: str
    stage: int
    microbatch: int
    peer: int
    start: float
    stop: float
    text: str
    lasting: bool = True


class Operation(NamedTuple):
    """An operation is a collective, or one side of a message, as one rank has seen it, with times as of an event.

    ``ranks`` are its members: of a message the sender and the receiver, of a collective those of its group in ascending
    order.  Of equal ``ranks`` and ``queue``, the n-th operation of one member is the n-th of each other.  It was
    ``posted`` by this rank, which from ``waited`` to ``arrived`` did nothing but wait for it; where the three are equal
    it did not wait.
    """

    kind: str
    ranks: tuple[int, ...]
    queue: str
    posted: float
    waited: float
    arrived: float


@dataclass(frozen=True)
class RankStep:
    """This is one rank's part of a step, which took ``seconds``; ``ranks`` is the number of all ranks.

    ``wall`` is when its recording began by its host's clock, in seconds since the epoch: it puts the ranks of a host on
    one time axis.  Ranks of several hosts began after a barrier.  ``pipeline`` is the first of the ranks that have the
    stages of one model together.  ``memory`` is the most bytes that the rank has held so far.  ``operations`` are those
    between ranks, in the order in which they were posted, also those that units make inside; between instructions the
    host has worked on them for ``moved`` seconds.
    """

    step: int
    rank: int
    ranks: int
    pipeline: int
    host: str
    wall: float
    seconds: float
    memory: int
    events: tuple[Event, ...]
    operations: tuple[Operation, ...] = ()
    moved: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the step as values for JSON; :meth:`from_dict` reads them back unchanged."""
        return vars(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RankStep:
        """Return the step that :meth:`to_dict` was called on; other values raise KeyError, TypeError or ValueError."""
        events = tuple(Event(Op(op), *rest) for op, *rest in values["events"])
        operations = tuple(Operation(kind, tuple(ranks), *rest) for kind, ranks, *rest in values.get("operations", ()))
        return RankStep(**{**values, "events": events, "operations": operations})
