"""The profile of links: bandwidths after nccl-tests, the fit, and files."""

from __future__ import annotations

import json

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.links import OWN, LinkProfile, Measured, bus_factor
from shardwise.core.rates import Link, Rates


def made(link: Link, ranks: tuple[int, ...] = (2, 4), noise: float = 1.0, host: int = 8) -> LinkProfile:
    rates = Rates(1.0, 1.0, link)
    rows = [
        Measured(kind, OWN, n, size, rates.collective(kind.replace("-", "_"), size, ["x"], n) * (noise if i % 2 else 1))
        for n in ranks
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        for i, size in enumerate((1024, 65536, 2**22, 2**26))
    ]
    return LinkProfile("gloo", "cpu", host, tuple(rows))


@pytest.mark.parametrize("link", [Link(50e-6, 2e9), Link(0.0, 1e8), Link(1e-3, 1e11)])
def test_a_link_is_found_again(link: Link) -> None:
    found = made(link).link(2)
    assert found is not None
    assert found.latency == pytest.approx(link.latency, rel=1e-6, abs=1e-12)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)


def test_noise_moves_it_little() -> None:
    found = made(Link(50e-6, 2e9), noise=1.1).link(4)
    assert found is not None
    assert found.bandwidth == pytest.approx(2e9, rel=0.1) and found.latency == pytest.approx(50e-6, rel=0.15)


def test_the_nearest_number_of_ranks_counts() -> None:
    slow, fast = made(Link(1e-3, 1e8), (2,)), made(Link(1e-5, 1e10), (8,))
    both = LinkProfile("gloo", "cpu", 8, (*slow.rows, *fast.rows))
    assert both.link(2) == slow.link(2) and both.link(6) == fast.link(8) and both.link(64) == fast.link(8)


def test_links_of_a_host_and_between_hosts() -> None:
    """Measured over two hosts of two ranks each, and on one of them."""
    slow, fast = made(Link(1e-3, 1e8), (4,), host=2), made(Link(1e-5, 1e10), (2,), host=2)
    both = LinkProfile("gloo", "cpu", 2, (*slow.rows, *fast.rows))
    assert both.link(4) == fast.link(2) and both.link(2, between=True) == slow.link(4, between=True)
    assumed = Rates(3.0, 5.0, Link(1.0, 1.0), {"tp": Link(2.0, 2.0)})
    assert both.applied(assumed, 4) == Rates(3.0, 5.0, both.link(4), {"tp": both.link(4, between=True)})
    assert fast.applied(assumed, 4) == Rates(3.0, 5.0, fast.link(2), {"tp": Link(2.0, 2.0)})
    assert slow.applied(assumed, 4).link == Link(1.0, 1.0)


def test_nothing_measured_is_no_link() -> None:
    row = Measured("broadcast", "ring", 2, 1024, 1e-3, 1024)
    assert LinkProfile("gloo", "cpu", 2, (row,)).link(2) is None


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("all-to-all", 0.75), ("broadcast", 1.0),
     ("reduce", 1.0), ("point-to-point", 1.0)],
)  # fmt: skip
def test_bus_bandwidth(collective: str, factor: float) -> None:
    """As nccl-tests defines it."""
    assert bus_factor(collective, 4) == factor
    row = Measured(collective, OWN, 4, 4000, 2.0)
    assert (row.algorithm_bandwidth, row.bus_bandwidth) == (2000.0, 2000.0 * factor)


def test_a_file_says_the_same() -> None:
    profile = made(Link(50e-6, 2e9))
    assert LinkProfile.of_json(profile.to_json(), "x") == profile


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"rows": 3}, {"rows": [{"a": 1}]}, {"backend": None, "host": "x"}, {"rows": None}],
)
def test_other_files_are_refused(change: dict[str, object]) -> None:
    values = json.loads(made(Link(50e-6, 2e9)).to_json()) | change
    with pytest.raises(ConfigError, match="parallel.links"):
        LinkProfile.of_json(json.dumps(values), "parallel.links")
    with pytest.raises(ConfigError, match="bench collectives --out"):
        LinkProfile.of_json("[1", "parallel.links")
