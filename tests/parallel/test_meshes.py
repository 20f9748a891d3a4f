"""The mesh that parallelisms make together: the same in whatever order they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.tensor_options import tensor_axes
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

MADE: tuple[Callable[[Plan], Plan], ...] = (
    lambda plan: pipeline(plan, 2),
    lambda plan: data_parallel(plan, 6, zero=2, replicas=3),
    lambda plan: tensor_parallel(plan, 4, "1d-sp"),
)


@pytest.mark.parametrize("order", list(itertools.permutations(MADE)))
def test_a_pipeline_is_around_replicas_and_a_layer_is_innermost(order: tuple[Callable[[Plan], Plan], ...]) -> None:
    plan = Plan.of()
    for make in order:
        plan = make(plan)
    assert plan.mesh == Mesh.of(pp=2, dp_replicate=3, dp=2, tp=4)
    assert tensor_axes(plan.mesh) == ("tp",) and plan.tensor.recipe == "1d-sp"
    assert plan.mesh.group(0, "tp") == (0, 1, 2, 3)


def test_one_rank_a_layer_is_no_axis() -> None:
    plan = tensor_parallel(data_parallel(Plan.of(), 2), 3)
    assert tensor_parallel(plan, 1).mesh == Mesh.of(dp=2)
    assert tensor_parallel(plan, 2, "1d-sp").mesh == Mesh.of(dp=2, tp=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_a_number_of_ranks_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"^tp: .* is not legal; legal: an integer of at least 1"):
        tensor_parallel(Plan.of(), size)  # type: ignore[arg-type]


def test_a_recipe_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match='tensor: \'1d-ps\' is not legal; legal: "1d", "1d-sp", "2d", "2.5d", "3d". Did you mean "1d-sp"?',
    ):
        tensor_parallel(Plan.of(), 2, "1d-ps")  # type: ignore[arg-type]
