"""This module has the options of a plan for parameter servers: how workers and servers wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError
from shardwise.core.options import check_options, count, number, word

Server = Literal["none", "sync", "async", "stale"]
Rate = Literal["fixed", "staleness"]
Push = Literal["whole", "bf16", "int8", "top-k"]

APART: tuple[Server, ...] = ("async", "stale")
"""Under these, workers do not wait for each other, and servers are processes of their own."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """These options say who waits for whom where servers update the parameters.

    Under "sync" every server waits for the gradients of all ranks: the ranks train as one device.  Under "async" each
    worker computes on batches of its own, and a server applies each gradient as it comes (Downpour SGD: Dean et al.
    2012, section 4.1).  Under "stale" the fastest worker is at most ``staleness`` pushes ahead of the slowest (Ho et
    al. 2013, SSP).  A worker pulls parameters before every ``pull_every``-th push.  The gradients of several batches
    in one push are those of microbatches.

    ``servers`` is the number of servers, and ``workers`` that of workers, where servers are apart.  With ``rate``
    "staleness" the learning rate of an update is divided by one more than the number of updates since its parameters
    were pulled (Zhang et al. 2015, arXiv 1511.05950, section 3).  ``push`` says how gradients are compressed on their
    way to servers (``runtime/compression.py``); of "top-k" a ``push_share`` of each part is sent.
    """

    kind: Server = word("none", get_args(Server), key="server")
    servers: int = count(1, key="server_ranks")
    workers: int = count(1)
    staleness: int = count(0, least=0)
    pull_every: int = count(1)
    rate: Rate = word("fixed", get_args(Rate), key="server_rate")
    push: Push = word("whole", get_args(Push))
    push_share: float = number(0.01, most=1.0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.staleness and self.kind != "stale":
            wrong = f'{self.staleness} is not legal with server = "{self.kind}"'
            raise ConfigError.on("staleness", wrong, '0, or server = "stale"')
        plain = {"workers": self.workers == 1, "pull_every": self.pull_every == 1, "server_rate": self.rate == "fixed"}
        plain |= {"push": self.push == "whole"}
        if not self.apart and (key := next((key for key, is_plain in plain.items() if not is_plain), "")):
            wrong = f'not legal with server = "{self.kind}", whose ranks wait for each other'
            raise ConfigError.on(key, wrong, 'left out, or server = "async" or "stale"')
        if self.kind == "none" and self.servers > 1:
            raise ConfigError.on("server_ranks", f"{self.servers} are not legal without a server", "1")

    @property
    def apart(self) -> bool:
        """Return whether workers do not wait for each other: each is a run of its own beside the servers."""
        return self.kind in APART

    @property
    def bound(self) -> int | None:
        """Return how many pushes the fastest worker may be ahead; None if any number."""
        return self.staleness if self.kind == "stale" else None
