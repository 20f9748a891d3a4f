"""When islands that train apart meet, in which parts, and which plans they cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.local_options import LocalOptions, fragments_of
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.local import island_rows, local_training, most_rows


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_all_parameters_meet_at_the_end_of_a_round(steps: int) -> None:
    options = LocalOptions(steps)
    assert [step for step in range(3 * steps) if options.due(step)] == [steps - 1, 2 * steps - 1, 3 * steps - 1]
    assert options.first_due == (0,)


@pytest.mark.parametrize(("steps", "fragments"), [(2, 2), (5, 3), (10, 4), (7, 7), (100, 8)])
def test_each_fragment_meets_once_in_a_round(steps: int, fragments: int) -> None:
    options = LocalOptions(steps, fragments)
    assert options.due(0) == ()
    for first in range(1, steps + 2):
        met = [fragment for step in range(first, first + steps) for fragment in options.due(step)]
        assert sorted(met) == list(range(fragments))
    busiest = max(len(options.due(step)) for step in range(1, 3 * steps))
    assert busiest == 1  # no two at once


def test_without_local_steps_nothing_is_due() -> None:
    assert not any(LocalOptions().due(step) for step in range(20)) and LocalOptions().first_due == ()


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_fragments_are_balanced(fragments: int) -> None:
    sizes = [50, 1, 7, 7, 7, 7, 7, 30, 0]
    found = fragments_of(sizes, fragments)
    held = [sum(size for size, place in zip(sizes, found, strict=True) if place == k) for k in range(fragments)]
    assert set(found) == set(range(fragments))
    assert max(held) <= max(50, sum(sizes) / fragments + 30)
    with pytest.raises(ConfigError, match="10 are more than the 9 blocks"):
        fragments_of(sizes, 10)


def test_rows_of_islands_are_the_whole_batch() -> None:
    mesh = Mesh.of(islands=3, dp=2)
    parts = [island_rows(mesh, rank, 11) for rank in range(6)]
    assert parts == [(0, 3), (0, 3), (3, 7), (3, 7), (7, 11), (7, 11)]
    assert most_rows(mesh, 11) == 4 == max(stop - start for start, stop in parts)


TWO = {"local_steps": 2, "microbatches": 2}


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ({"dp": 2}, {"local_steps": 3}, "local_steps: 3 is not legal with 1 group of ranks"),
        ({"islands": 2}, {}, "local_steps: 0 is not legal with 2 groups of ranks"),
        ({"islands": 2}, {"local_steps": 2, "local_fragments": 3}, "local_fragments: 3 are more than local_steps = 2"),
        ({"islands": 2}, {"local_steps": 2, "outer_momentum": 1.0}, "outer_momentum: 1.0 is not legal"),
        ({"islands": 2}, {"local_steps": 2, "local_mix": -0.1}, "local_mix: -0.1 is not legal"),
        ({"islands": 2, "pp": 2}, {**TWO, "schedule": "pipedream-2bw"}, "batches overlap"),
        ({"islands": 2, "pp": 2}, {**TWO, "norm": "post-validate"}, "batches overlap"),
        (
            {"islands": 2}, {"local_steps": 2, "local_fragments": 2, "offload": "optimizer"},
            "local_fragments: 2 are not legal with an optimizer on the host",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(mesh: dict[str, int], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Plan.of(Mesh.of(**mesh), **options)


def test_a_plan_is_written_and_read() -> None:
    plan = local_training(Plan.of(Mesh.of(dp=2)), 3, 10, fragments=4, mix=0.25, outer_lr=1.0, outer_momentum=0.0)
    assert plan.mesh.shape == (3, 2) and plan.mesh.names == ("islands", "dp")
    assert Plan.from_toml(plan.to_toml()) == plan
