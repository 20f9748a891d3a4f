"""A worker's side of all parameter servers: tickets, pushes and pulls, which go on while the worker computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from shardwise.core.errors import ConfigError, check_value
from shardwise.core.frames import MAX_WORKERS, RAW, FrameError, Kind, Outcome, Shares, check_shares
from shardwise.core.tickets import LATER, NONE
from shardwise.runtime.secret import check_secret, run_digest
from shardwise.runtime.server_connection import Endpoint
from shardwise.runtime.server_link import Ack, ServerLink
from shardwise.runtime.staging import Part

Result = TypeVar("Result")


class Posted(Generic[Result]):
    """This is what all servers have been asked, and may not have answered yet."""

    def __init__(self, futures: Sequence[Future[Result]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Whether all servers have answered."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> tuple[Result, ...]:
        """Return the servers' answers in their order.

        Raises TimeoutError if one takes more than ``timeout`` seconds, ServerLost where a server is lost, and
        CancelledError after the client was closed.
        """
        return tuple(future.result(timeout) for future in self._futures)


class ServerClient:
    """This is one worker at all servers of a run; ``worker`` is its number, which no other live process may have.

    ``shares`` are those of each server, in the order of ``addresses``: together they tile each bucket.  The first
    server hands out the tickets.  A worker does, as often as it gets a ticket::

        ticket = client.ticket()
        versions = client.pull(parameters).wait()
        ...  # compute a gradient, and push() each bucket when it is there
        client.commit(ticket, versions).wait()

    Each server has a thread, which does what it is asked in order.  When a server breaks the connection (also as it
    restarts), its thread connects again, with pauses of 0.05 to 2 seconds, for up to ``patience`` seconds, and does
    again what was interrupted.  The worker has then left that server and joined it again.  A push that was under way is
    sent again as a whole, and the server applies it unless it has done so: see :meth:`commit`.

    A PING goes out every ``heartbeat`` seconds.  A server that is silent for ``timeout`` seconds is taken for lost, so
    that has to be longer than any update takes.  ``log`` gets a line for each connection that ends.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        shares: Sequence[Shares],
        secret: bytes,
        run: str,
        worker: int,
        *,
        heartbeat: float = 2.0,
        timeout: float = 30.0,
        patience: float = 60.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Connect to all servers.

        Raises :class:`ConfigError` for shares that do not tile the buckets, for a number or secret that is not legal,
        and where a server does not accept the secret or the run; ServerLost where one cannot be reached.
        """
        if len(addresses) != len(shares) or not addresses:
            raise ConfigError.on(
                "servers", f"{len(addresses)} addresses for {len(shares)} shares", "as many, at least 1"
            )
        check_value("worker", worker, 0 <= worker < MAX_WORKERS, f"a number from 0 to {MAX_WORKERS - 1}")
        check_value("heartbeat", heartbeat, 0 < heartbeat < timeout, "less than the timeout, and more than 0")
        check_secret("secret", secret)
        self._shares, self._sizes = tuple(shares), _tiled(shares)
        self._ticket: int | None = None
        self._joined = False
        self._pushed: dict[tuple[int, int], int] = {}  # elements since the last commit, by server and bucket
        digest = run_digest(run)
        self._links = [
            ServerLink(Endpoint(i, address, share, secret, digest, worker, heartbeat, timeout, patience), log)
            for i, (address, share) in enumerate(zip(addresses, shares, strict=True))
        ]
        try:
            Posted([link.post(lambda: None) for link in self._links]).wait()
        except BaseException:
            self.close()
            raise

    @property
    def clocks(self) -> tuple[int, ...]:
        """The worker's clock at each server: where it joined, and one more for each push since."""
        return tuple(link.clock for link in self._links)

    def join(self) -> None:
        """Be one of the workers that others wait for (under a bound); :meth:`ticket` does it too."""
        Posted([link.post(link.join) for link in self._links]).wait()
        self._joined = True

    def rest(self) -> None:
        """Hold nobody back until the next :meth:`join`; a pull is then answered at once, and a commit is refused."""
        self._joined = False
        Posted([link.post(link.rest) for link in self._links]).wait()

    def ticket(self) -> int | None:
        """Return the number of a batch that is this worker's, and join; or rest, and return None when all are done.

        While others have the last ones, this waits, and rests meanwhile: if one of them dies, its ticket is free.  A
        worker has one ticket at a time: raises ConfigError before the commit of the last one.
        """
        if self._ticket is not None:
            raise ConfigError.on("ticket", f"ticket {self._ticket} has not been committed", "one ticket at a time")
        first = self._links[0]
        found = first.post(partial(first.ask_ticket, False)).result()
        if found == LATER:
            self.rest()
            found = first.post(partial(first.ask_ticket, True)).result()
        if found == NONE:
            self.rest()
            return None
        self._ticket = found
        self.join()
        return found

    def push(self, bucket: int, gradient: object) -> None:
        """Send the whole gradient of a bucket, a contiguous buffer of its elements, to the servers that have it.

        This returns at once.  The buffer must not change before the push has been committed and that answered.  Raises
        :class:`ConfigError` for a buffer of another size.
        """
        data = self._bytes(bucket, gradient, "gradient")
        for server, shares in enumerate(self._shares):
            share = shares.get(bucket)
            if share is not None:
                size = share.gradient
                parts = [
                    Part(bucket, offset, count, RAW, data[(at := (share.start + offset) * size) : at + count * size])
                    for offset, count in share.cuts(size)
                ]
                self.push_parts(server, parts)

    def push_parts(self, server: int, parts: Sequence[Part]) -> None:
        """Send parts of a gradient, perhaps encoded, to one server; offsets count from where its range begins.

        The parts of a bucket come in order and as :meth:`~shardwise.core.frames.Share.cuts` cuts the range, those of a
        table without rows left out; no payload is longer than the raw part would be.  Payloads must not change before
        the push has been answered.  Raises :class:`ConfigError` for other parts.
        """
        where, legal = (
            f"push to server {server}",
            "the parts of each bucket once, in order, as `Share.cuts` cuts its range",
        )
        pushed = dict(self._pushed)
        for part in parts:
            place = server, part.bucket
            try:
                part.header().check({Kind.PART}, self._shares[server])
            except FrameError as error:
                raise ConfigError.on(where, str(error), legal) from None
            if not self._shares[server][part.bucket].may_follow(part.offset, pushed.get(place, 0)):
                raise ConfigError.on(where, f"bucket {part.bucket} from element {part.offset} on", legal)
            pushed[place] = part.offset + part.count
        if parts:
            self._pushed = pushed
            link = self._links[server]
            link.post(partial(link.push, list(parts)))

    def commit(self, ticket: int | None, versions: Sequence[int], weight: float = 1.0) -> Posted[Ack]:
        """Let all servers apply what has been pushed since the last commit, which has to be all of every bucket.

        ``versions`` are those that the gradient was computed at, by server; ``ticket`` is that which :meth:`ticket` has
        returned last, or None where there is none; ``weight`` is for the store.  This returns at once.

        With a ticket the first server is asked first: it refuses a ticket that it has given to another worker
        meanwhile, and then no server applies the push.  A server that dies before it answers gets the push again, with
        the same clock.  If it had applied the push, and still knows, it says DUPLICATE, and does nothing; if it
        restarts from a snapshot from before the push, it applies it now.  A push that it had answered before it died is
        not sent again; if its snapshot is older, the push is among the updates that it says are lost.

        A worker that dies before it has heard from the first server leaves nothing anywhere, or its push on the first
        server alone; the record of each server says what it has.  Raises :class:`ConfigError` for a worker that has
        not joined, for another ticket, and for a push that is not whole.
        """
        legal = f"{len(self._links)} versions, of 0 or more"
        check_value("commit: versions", versions, len(versions) == len(self._links) and min(versions) >= 0, legal)
        check_value("commit: weight", weight, math.isfinite(weight), "a finite number")
        check_value("commit: ticket", ticket, ticket == self._ticket, f"{self._ticket}, which this worker has")
        if not self._joined:
            raise ConfigError.on("commit", "this worker has not joined, or rests", "a commit after `join` or `ticket`")
        for server, shares in enumerate(self._shares):
            for bucket, share in shares.items():
                pushed = self._pushed.get((server, bucket), 0)
                wrong = f"{pushed} of {share.numel} elements of bucket {bucket} have been pushed to server {server}"
                if pushed != share.numel and not share.row:
                    raise ConfigError.on("commit", wrong, "all elements of all buckets")
        self._pushed, self._ticket = {}, None
        number = -1 if ticket is None else ticket
        first, *others = self._links
        decided = first.post(partial(first.commit, number, versions[0], weight))

        def follow(link: ServerLink, version: int) -> Ack:
            if number >= 0 and link.wait_for(decided).outcome == Outcome.REFUSED:
                return link.discard()
            return link.commit(number, version, weight)

        rest = [
            link.post(partial(follow, link, version)) for link, version in zip(others, versions[1:], strict=True)
        ]  # fmt: skip
        return Posted([decided, *rest])

    def pull(self, into: Mapping[int, object]) -> Posted[int]:
        """Receive all parameters into writable contiguous buffers of whole buckets; the answers are the versions.

        This returns at once; the buffers are written until the answer is there.  All that comes from one server is of
        one version.  Of a table come the rows that have changed since the last pull, so its buffer has to be the same.
        Under a bound a server answers when this worker is not too far ahead.  Raises :class:`ConfigError` for buffers
        of other sizes.
        """
        views = {bucket: self._bytes(bucket, into.get(bucket, b""), "parameter") for bucket in self._sizes}
        return Posted([
            link.post(partial(link.pull, {
                bucket: views[bucket][share.start * share.parameter : share.stop * share.parameter]
                for bucket, share in shares.items()
            }))
            for link, shares in zip(self._links, self._shares, strict=True)
        ])  # fmt: skip

    def close(self) -> None:
        """Leave all servers; what has not been answered is cancelled."""
        for link in self._links:
            link.close()

    def _bytes(self, bucket: int, buffer: object, what: str) -> memoryview:
        numel, gradient, parameter = self._sizes.get(bucket, (0, 0, 0))
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        needed = numel * (gradient if what == "gradient" else parameter)
        check_value(f"{what}s of bucket {bucket}: bytes", len(view), len(view) == needed, f"{needed}")
        return view


def _tiled(shares: Sequence[Shares]) -> dict[int, tuple[int, int, int]]:
    """Return (numel, bytes of a gradient's element, of a parameter's) of each bucket, of which all servers have parts.

    Raises :class:`ConfigError` where the parts have holes, overlap, or elements of different sizes.
    """
    found: dict[int, tuple[int, int, int]] = {}
    for server, held in enumerate(shares):
        check_shares(f"server {server}", held)
    for bucket in sorted({bucket for held in shares for bucket in held}):
        parts = sorted((held[bucket] for held in shares if bucket in held), key=lambda share: share.start)
        stop = 0
        for share in parts:
            same = (share.gradient, share.parameter) == (parts[0].gradient, parts[0].parameter)
            if share.start != stop or not same:
                wrong = f"elements {share.start} to {share.stop} follow {stop}, or have other sizes"
                raise ConfigError.on(f"shares of bucket {bucket}", wrong, "ranges that tile it, of the same elements")
            stop = share.stop
        found[bucket] = stop, parts[0].gradient, parts[0].parameter
    return found
