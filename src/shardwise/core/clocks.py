"""The clocks of workers decide who may read parameters from a server: the stale-synchronous rule, as pure data.

A worker's clock counts the pushes that a server has applied for it.  Under a bound s a worker of clock c may read when
c ≤ (the least clock of all live workers) + s, so what it reads holds every push of clock below c − s of each live
worker (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013,
section 3).  Without a bound everybody may read at once (Downpour SGD: Dean et al., "Large Scale Distributed Deep
Networks", NIPS 2012, section 4.1).

Each server has clocks of its own.  The rule still holds for all of them together, because a worker goes on only when
every server has answered it: it obeys the strictest of them, and each parameter lies on one server alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.core.errors import check_count

Released = tuple[int, ...]
"""The workers whose read may now be answered, in ascending order."""


@dataclass(frozen=True)
class Clocks:
    """These are the clocks of one server.  Every transition returns the clocks after it and who is released by it.

    ``bound`` is s, or None where nobody waits.  ``live`` has the clock of every live worker.  ``floor`` is the greatest
    least clock that there has been; it never falls, even if all workers leave.  ``pushed`` has the clock of the last
    push of every worker that has ever pushed, so that no worker uses a clock twice.  ``waiting`` are the live workers
    that have asked to read and may not yet.
    """

    bound: int | None = None
    live: Mapping[int, int] = field(default_factory=dict)
    floor: int = 0
    pushed: Mapping[int, int] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.bound is not None:
            check_count("stale", self.bound, least=0)

    def join(self, worker: int, clock: int = 0) -> tuple[Clocks, Released]:
        """Make a worker live, at the least clock of the live workers.

        It begins later where it has been there before: after its last push, or at the ``clock`` that it claims.  A
        later clock only makes a worker wait longer.  One that is live already keeps at least its clock.
        """
        begins = max(self.floor, clock, self.pushed.get(worker, -1) + 1, self.live.get(worker, 0))
        return self._now(live={**self.live, worker: begins})

    def leave(self, worker: int) -> tuple[Clocks, Released]:
        """Take a worker out, so that it holds nobody back; one that is not live changes nothing."""
        return self._now(
            live={other: clock for other, clock in self.live.items() if other != worker},
            waiting=self.waiting - {worker},
        )

    def push(self, worker: int, clock: int) -> tuple[Clocks, Released]:
        """Count the push that a live worker has made at ``clock``.

        Its clock is then at least one more.  Raises ValueError unless :meth:`is_new` and the worker's clock is not
        behind ``clock``.
        """
        if not self.is_new(worker, clock) or clock > self.live.get(worker, -1):
            raise ValueError(f"worker {worker}: a push at clock {clock}, where its clock is {self.live.get(worker)}")
        return self._now(
            live={**self.live, worker: max(self.live[worker], clock + 1)}, pushed={**self.pushed, worker: clock}
        )

    def read(self, worker: int) -> tuple[Clocks, Released]:
        """Let a worker ask to read; it is released now, or by a later transition.

        A worker that is not live is released at once: it has no clock that could be too far ahead.
        """
        if worker not in self.live:
            return self, (worker,)
        return self._now(waiting=self.waiting | {worker})

    def is_new(self, worker: int, clock: int) -> bool:
        """Whether a push of this worker and clock has not been counted yet."""
        return clock > self.pushed.get(worker, -1)

    def alone(self) -> Clocks:
        """Return these clocks without live workers: those of a server that starts again."""
        return replace(self, live={}, waiting=frozenset())

    def _now(
        self,
        live: Mapping[int, int] | None = None,
        pushed: Mapping[int, int] | None = None,
        waiting: Iterable[int] | None = None,
    ) -> tuple[Clocks, Released]:
        """Return the clocks with these changes, without those that are released, and who these are."""
        live = self.live if live is None else live
        least = min(live.values(), default=0)
        asked = frozenset(self.waiting if waiting is None else waiting)
        released = [worker for worker in asked if self.bound is None or live[worker] <= least + self.bound]
        found = replace(
            self,
            live=live,
            floor=max(self.floor, least),
            pushed=self.pushed if pushed is None else pushed,
            waiting=asked.difference(released),
        )
        return found, tuple(sorted(released))
