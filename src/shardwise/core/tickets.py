"""Tickets share out the batches of an epoch among workers of any speed: numbers 0 … total − 1, each handed out once.

A ticket is *done* when the first server has applied the push of its batch.  A worker sends a push to the first server
before any other, so a ticket that is not done has been applied nowhere.  When its worker leaves before that, the ticket
is free, and goes to the next worker that asks (with ``again``), or is dropped (without).  A worker that only lost its
connection claims its ticket when it is back, and keeps it unless another worker has it by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.core.errors import check_count

NONE = -1
"""The answer where no ticket is left, nor will be."""
LATER = -2
"""The answer where none is free, but other workers have some that may become free."""

Answers = Mapping[int, int]
"""What is answered to workers that asked: a ticket, :data:`NONE` or :data:`LATER` by worker."""


@dataclass(frozen=True)
class Tickets:
    """These are the tickets of one run.  Every transition returns the tickets after it and what it answers to whom.

    ``next`` is the first number that has never been handed out; ``held`` has the ticket of each worker that has one;
    ``free`` have come back, and ``dropped`` were left by workers without ``again``.  All others below ``next`` are
    done.  ``waiting`` are the workers that wait for a free one, in the order in which they asked.
    """

    total: int
    again: bool = True
    next: int = 0
    held: Mapping[int, int] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    waiting: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count("tickets", self.total, least=0)

    def ask(self, worker: int, waits: bool = False) -> tuple[Tickets, Answers]:
        """Let a worker without a ticket ask for one; where it ``waits`` it is not answered :data:`LATER`, but later.

        Raises ValueError for a worker that has a ticket, or asks twice.
        """
        if worker in self.held or worker in self.waiting:
            raise ValueError(f"worker {worker} asks for a ticket, and has ticket {self.held.get(worker)} or waits")
        found, answers = replace(self, waiting=(*self.waiting, worker))._served()
        if worker in answers or waits:
            return found, answers
        return replace(found, waiting=self.waiting), {worker: LATER}

    def done(self, worker: int) -> tuple[Tickets, Answers]:
        """Count the ticket of a worker as done."""
        return replace(self, held=self._without(worker))._served()

    def leave(self, worker: int) -> tuple[Tickets, Answers]:
        """Take the ticket back from a worker that leaves, and do not let it wait any more."""
        waiting = tuple(other for other in self.waiting if other != worker)
        back = {self.held[worker]} if worker in self.held else frozenset()
        found = replace(self, held=self._without(worker), waiting=waiting)
        changed = replace(found, free=self.free | back) if self.again else replace(found, dropped=self.dropped | back)
        return changed._served()

    def claim(self, worker: int, ticket: int) -> Tickets:
        """Return the tickets after a worker has said that it still has ``ticket``.

        It has it unless the ticket is done or another worker's.  A number that was never handed out, as after a restart
        from an old snapshot, makes all numbers before it free or dropped: other workers may claim theirs, too.
        """
        if not 0 <= ticket < self.total or ticket in self.held.values() or self.is_done(ticket):
            return self
        between = frozenset(range(self.next, ticket))
        return replace(
            self,
            next=max(self.next, ticket + 1),
            held={**self.held, worker: ticket},
            free=(self.free | between if self.again else self.free) - {ticket},
            dropped=(self.dropped if self.again else self.dropped | between) - {ticket},
        )

    def is_done(self, ticket: int) -> bool:
        """Whether the push of this ticket has been applied."""
        open_ones = ticket in self.free or ticket in self.dropped or ticket in self.held.values()
        return 0 <= ticket < self.next and not open_ones

    def all_done(self) -> bool:
        """Whether nothing is left to hand out or to come back."""
        return self.next == self.total and not self.free and not self.held

    def alone(self) -> Tickets:
        """Return these tickets without workers: those of a server that starts again."""
        held = frozenset(self.held.values())
        return replace(
            self,
            held={},
            waiting=(),
            free=self.free | held if self.again else self.free,
            dropped=self.dropped if self.again else self.dropped | held,
        )

    def _without(self, worker: int) -> Mapping[int, int]:
        return {other: ticket for other, ticket in self.held.items() if other != worker}

    def _served(self) -> tuple[Tickets, Answers]:
        """Give tickets to those that wait, as long as there are any; answer :data:`NONE` if there never will be."""
        found, answers = self, {}
        while found.waiting and (found.free or found.next < found.total):
            worker, *rest = found.waiting
            ticket = min(found.free, default=found.next)
            answers[worker] = ticket
            found = replace(
                found,
                next=max(found.next, ticket + 1),
                free=found.free - {ticket},
                held={**found.held, worker: ticket},
                waiting=tuple(rest),
            )
        if found.waiting and not (found.held and found.again):
            answers.update(dict.fromkeys(found.waiting, NONE))
            found = replace(found, waiting=())
        return found, answers
