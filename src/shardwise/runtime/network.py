"""This chooses the network interface that reaches the ranks on other hosts.

gloo takes the interface that this host's own name resolves to, which is the loopback on many hosts, and then connects
to itself.  The route to the address where the ranks meet is a better guide.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from contextlib import suppress
from ipaddress import ip_address

import psutil

from shardwise.core.errors import ShardwiseError
from shardwise.runtime.rendezvous import Rendezvous

INTERFACE_FORMS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a bare name as a prefix
DISCARD = 9  # the number of a port, to which nothing is sent


def choose_interfaces(met: Rendezvous, environment: MutableMapping[str, str]) -> None:
    """Tell gloo and NCCL by which interface to reach the ranks on other hosts; all ranks call it before they make a
    group.

    What the user has set stays, and where all ranks are on one host nothing is done.  On the host whose address is
    ``MASTER_ADDR``, that name may be the loopback: its ranks look for a route to a rank on another host instead.
    """
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        return
    source = source_towards(environment["MASTER_ADDR"])
    met.store.set(f"source/{met.rank}", source or "")
    wanted = [name for name in INTERFACE_FORMS if not environment.get(name)]
    if not wanted:
        return
    peers = (
        met.store.get(f"source/{rank}").decode() for rank in range(met.size) if source is None and rank != met.rank
    )
    source = source or next(filter(None, (source_towards(peer) for peer in peers if peer)), None)
    if source is None:
        return  # as far as can be seen, the ranks share one host
    interface = _owner(source)
    if interface is None:
        raise ShardwiseError(
            f"no network interface of this host has its own address {source}; set {' and '.join(wanted)} to the name "
            "of the one "
            "by which the hosts reach each other."
        )
    for name in wanted:
        environment[name] = INTERFACE_FORMS[name].format(interface)


def source_towards(address: str) -> str | None:
    """Return the IP address from which this host sends to ``address``; None for the loopback, or without a route."""
    with suppress(OSError, UnicodeError):  # a name that does not resolve, or cannot; an address without a route
        for family, kind, protocol, _, target in socket.getaddrinfo(address, DISCARD, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # chooses a route; a datagram socket sends nothing
                source = str(probe.getsockname()[0]).partition("%")[0]
                if not ip_address(source).is_loopback:
                    return source
    return None


def _owner(source: str) -> str | None:
    """Return the interface that has the address ``source``."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in addresses):
            return str(name)
    return None
