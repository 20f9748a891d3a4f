"""Two network namespaces of this machine, joined by a link of limited speed, as two hosts would be."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

INTERFACE = "slow0"
"""The name of the link's end in each namespace."""


class Link(NamedTuple):
    """The ``namespaces`` at the ends of a link, and the ``address`` of the first."""

    namespaces: tuple[str, str]
    address: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables of processes that connect over the link."""
        return {"MASTER_ADDR": self.address, "GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def slow_link(megabits: int) -> Iterator[Link]:
    """Make two namespaces whose link carries so many megabits a second each way, and remove them at the end.

    It needs root, and raises :class:`subprocess.CalledProcessError` without.
    """
    link = Link(("shardwise-a", "shardwise-b"), "10.77.3.1")
    a, b = link.namespaces
    rate = f"rate {megabits}mbit burst 256kb latency 400ms"
    made = False
    try:
        _ip(f"netns add {a}")
        made = True
        _ip(f"netns add {b}")
        _ip(f"link add {INTERFACE} netns {a} type veth peer name {INTERFACE} netns {b}")
        for number, name in enumerate(link.namespaces, 1):
            _ip(f"-n {name} addr add 10.77.3.{number}/24 dev {INTERFACE}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {INTERFACE} up")
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", *f"qdisc add dev {INTERFACE} root tbf {rate}".split()], check=True
            )
        yield link
    finally:
        for name in link.namespaces if made else ():
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
