"""How far ahead gathers begin: by hand, against an independent simulation, and as the launcher chooses it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.core.links import OWN, LinkProfile, Measured
from shardwise.core.rates import Link, Rates
from shardwise.estimate.devices import Device
from shardwise.estimate.prefetch import MOST, forward_seconds
from shardwise.launch.forecast import Forecast
from shardwise.launch.subject import forecast, load_anywhere
from shardwise.lower import traced_model

FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.inner(x).relu()

class Net(nn.Module):
    # The last layer has as many weights as 32 blocks, and its gather hides only under several of them.
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))
        self.wide = nn.Linear(64, 2048)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.wide(x).square().mean()

def data():
    return [{"x": torch.full((64,), float(i))} for i in range(64)]
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A config of ten equal blocks and one wide layer under ZeRO-3 on four ranks."""
    path = tmp_path_factory.mktemp("wide") / "net.py"
    path.write_text(FACTORY)
    return [
        f"model.factory={path}:Net", f"data.factory={path}:data", "data.batch_size=64", "parallel.dp=4",
        "parallel.zero=3",
        "parallel.gathered=use",
    ]  # fmt: skip


def test_by_hand() -> None:
    # Each unit computes 4 s and is gathered in 3 s.  One ahead: only the first gather is seen.  None ahead: all are.
    assert forward_seconds([4, 4, 4], [3, 3, 3], 1) == 3 + 12
    # A large unit of 9 s behind two of 4 s: one ahead, 5 of its seconds are seen; two ahead, its gather begins as soon
    # as the link is free.
    assert forward_seconds([4, 4, 4], [1, 1, 9], 1) == 1 + 4 + 9 + 4
    assert forward_seconds([4, 4, 4], [1, 1, 9], 2) == 1 + 1 + 9 + 4
    assert forward_seconds([4, 4], [0, 0], 1) == 8


def test_against_a_simulation_in_small_steps() -> None:
    """The same rules, played second by second: one gather and one unit at a time."""

    def played(computes: list[int], gathers: list[int], ahead: int) -> int:
        begun: dict[int, int] = {}
        gathered, computed, now = 0, 0, 0
        link_free = compute_free = 0
        ready: dict[int, int] = {}
        while computed < len(computes):
            while gathered < len(gathers) and link_free <= now:
                if not gathers[gathered]:
                    ready[gathered] = 0
                elif gathered < ahead or gathered - ahead in begun:
                    ready[gathered] = link_free = now + gathers[gathered]
                else:
                    break
                gathered += 1
            if compute_free <= now and ready.get(computed, now + 1) <= now:
                begun[computed], compute_free = now, now + computes[computed]
                computed += 1
                continue
            now += 1
        return compute_free

    rng = random.Random(0)
    for _ in range(300):
        units = rng.randint(1, 7)
        computes = [rng.randint(1, 6) for _ in range(units)]
        gathers = [rng.choice((0, rng.randint(1, 9))) for _ in range(units)]
        ahead = rng.randint(1, 4)
        assert forward_seconds(computes, gathers, ahead) == played(computes, gathers, ahead), (computes, gathers, ahead)


def chosen(
    monkeypatch: pytest.MonkeyPatch, given: list[str], *more: str, budget: int = 1 << 40, kind: str = "gpu"
) -> Forecast:
    """Of a device that computes a block in 131 µs and gathers it in 62: all but the wide layer's gather, 2 ms, hide one
    unit ahead.
    """
    slow = Rates(flops=1e9, memory=1e18, link=Link(0.0, 2e8))
    monkeypatch.setattr(traced_model, "rates", lambda *_: slow)
    return forecast(load_anywhere(None, [*given, *more]), Device("a device", kind, budget, budget))


@pytest.mark.slow
def test_a_gpu_gathers_as_far_ahead_as_hides_it_and_fits(monkeypatch: pytest.MonkeyPatch, sharded: list[str]) -> None:
    found = chosen(monkeypatch, sharded)
    best = found.plan.data.prefetch
    assert 1 < best <= MOST and f"parallel.prefetch = {best}" in str(found.note)
    needs = [found.predict(found.plan.replace(prefetch=ahead)).peak_bytes for ahead in range(1, best + 1)]
    assert needs == sorted(needs) and needs[0] < needs[-1]
    ahead = next(a for a in range(1, best) if needs[a - 1] < needs[a])
    assert chosen(monkeypatch, sharded, budget=needs[ahead] - 1).plan.data.prefetch == ahead


def test_what_the_config_says_stays(monkeypatch: pytest.MonkeyPatch, sharded: list[str]) -> None:
    assert chosen(monkeypatch, sharded, "parallel.prefetch=1").plan.data.prefetch == 1
    assert chosen(monkeypatch, sharded, "parallel.prefetch=3").plan.data.prefetch == 3
    assert chosen(monkeypatch, sharded, kind="cpu").plan.data.prefetch == 1
    assert chosen(monkeypatch, sharded, "parallel.zero=0").plan.data.prefetch == 1


def test_links_that_were_measured_decide(monkeypatch: pytest.MonkeyPatch, sharded: list[str], tmp_path: Path) -> None:
    """Over links so fast that one unit ahead hides every gather."""
    fast = Rates(1.0, 1.0, Link(1e-9, 1e13))
    rows = [Measured("all-gather", OWN, 2, n, fast.collective("all_gather", n, ["dp"], 2)) for n in (64, 2**20)]
    path = tmp_path / "links.json"
    path.write_text(LinkProfile("gloo", "cpu", 8, tuple(rows)).to_json())
    assert chosen(monkeypatch, sharded).plan.data.prefetch > 1
    assert chosen(monkeypatch, sharded, f"parallel.links={path}").plan.data.prefetch == 1
