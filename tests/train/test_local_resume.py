"""Islands that train apart go on from a checkpoint, between two outer steps too, under any plan inside of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_between_plans import alone, difference, trained_by_ranks
from torch import Tensor

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import parameter_server
from shardwise.parallel.tensor import tensor_parallel

BASE = Plan.of(precision="fp64")
INSIDE = {
    "alone": BASE, "zero-1": data_parallel(BASE, 2, 1), "zero-3": data_parallel(BASE, 2, 3),
    "tp": tensor_parallel(BASE, 2), "pp": pipeline(BASE, 2), "server": parameter_server(data_parallel(BASE, 2)),
}  # fmt: skip
STEPS = 5


class Trained(NamedTuple):
    losses: list[list[float]]  # of each rank
    saved: dict[str, Tensor]


def trained(folder: Path, plan: Plan, stop: int) -> Trained:
    return Trained(*trained_by_ranks(folder, alone("qwen3").under(plan), stop))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("before", "after"),
    [("alone", "zero-1"), ("zero-3", "tp"), ("pp", "alone"), ("tp", "pp"), ("server", "zero-1"), ("zero-3", "server")],
)
@pytest.mark.parametrize(("stop", "fragments"), [(2, 1), (3, 2)])
def test_between_two_outer_steps(before: str, after: str, stop: int, fragments: int, tmp_path: Path) -> None:
    """Step 2 is in the midst of a round of three; with fragments something has always met lately."""
    one, other = (local_training(INSIDE[inside], 2, 3, fragments=fragments) for inside in (before, after))
    right = trained(tmp_path / "whole", local_training(INSIDE["alone"], 2, 3, fragments=fragments), STEPS)
    trained(tmp_path / "parts", one, stop)
    ours = trained(tmp_path / "parts", other, STEPS)
    error, name = difference(ours.saved, right.saved)
    assert error <= 1e-12, name
    for island in range(2):
        mine, theirs = ours.losses[island * other.mesh.size // 2], right.losses[island][stop:]
        assert mine == pytest.approx(theirs, rel=1e-12)


def test_each_island_has_its_own_state(tmp_path: Path) -> None:
    saved = trained(tmp_path, local_training(INSIDE["alone"], 2, 3), 2).saved
    names = [name for name in saved if name.startswith("model.") and saved[name].is_floating_point()]
    assert names and any(not torch.equal(saved[name], saved[f"island1.{name}"]) for name in names)
    assert all(f"outer.{name[6:]}.{key}" in saved for name in names for key in ("base", "momentum"))


def test_after_an_outer_step_islands_are_one(tmp_path: Path) -> None:
    saved = trained(tmp_path, local_training(INSIDE["zero-1"], 2, 2), 4).saved
    names = [name for name in saved if name.startswith("model.")]
    assert all(torch.equal(saved[name], saved[f"island1.{name}"]) for name in names)
    assert all(torch.equal(saved[f"outer.{n[6:]}.base"], saved[n]) for n in names if f"outer.{n[6:]}.base" in saved)


@pytest.mark.slow
def test_other_numbers_of_islands(tmp_path: Path) -> None:
    """One model becomes islands, these become three, and then one again: the first island's state goes on."""
    one = trained(tmp_path, data_parallel(BASE, 2, 1), 2).saved
    two = trained(tmp_path, local_training(BASE, 2, 2), 2).saved  # nothing is trained: what has come is saved again
    names = [name for name in one if name.startswith(("model.", "optimizer."))]
    assert all(torch.equal(two[f"{island}{name}"], one[name]) for name in names for island in ("", "island1."))
    trained(tmp_path, local_training(BASE, 2, 3), 4)
    three = trained(tmp_path, local_training(BASE, 3, 2), 4).saved
    assert all(torch.equal(three[f"island2.{name}"], three[name]) for name in names)
    last = trained(tmp_path, data_parallel(BASE, 3), 4).saved
    assert all(torch.equal(last[name], three[name]) for name in names)


def test_servers_save_and_read_what_they_have(tmp_path: Path) -> None:
    """From servers to ZeRO, to other servers, and to one device, as if none of them had stopped."""
    right = trained(tmp_path / "whole", BASE, STEPS)
    plans = [
        parameter_server(data_parallel(BASE, 3), 2), INSIDE["zero-3"], INSIDE["server"],
        parameter_server(pipeline(data_parallel(BASE, 2), 2), 2), BASE,
    ]  # fmt: skip
    for stop, plan in enumerate(plans, 1):
        ours = trained(tmp_path / "parts", plan, stop)
    error, name = difference(ours.saved, right.saved)
    assert error <= 1e-12, name
