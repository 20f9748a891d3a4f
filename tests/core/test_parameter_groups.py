"""Groups of parameters: which one a name is in, layers by their depth, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.parameter_groups import ParameterGroup, depths

NAMES = [
    "embed.weight", "blocks.0.attend.0.weight", "blocks.0.norm.bias", "blocks.1.attend.0.weight", "blocks.1.norm.bias",
    "norm.weight", "head.weight",
]  # fmt: skip
SHAPE = {name: (4,) if "norm" in name else (4, 4) for name in NAMES}


def rates(choice: OptimizerChoice, step: int = 0) -> dict[str, float]:
    return {name: choice.settings(step)[choice.group_of(name, SHAPE[name])]["lr"] for name in NAMES}


def decays(choice: OptimizerChoice) -> dict[str, float]:
    return {name: choice.settings(0)[choice.group_of(name, SHAPE[name])]["weight_decay"] for name in NAMES}


def test_the_first_group_that_matches_has_a_parameter() -> None:
    groups = (
        ParameterGroup.of("blocks.1.*", lr=0.5),
        ParameterGroup.of(["*.bias", "head.weight"], lr=0.25, weight_decay=0.3),
        ParameterGroup.of("blocks.[01].attend.?.weight", lr=0.125),
    )  # fmt: skip
    choice = OptimizerChoice("adamw", lr=1.0, weight_decay=0.1, groups=groups).resolved(NAMES)
    assert rates(choice) == {
        "embed.weight": 1.0, "blocks.0.attend.0.weight": 0.125, "blocks.0.norm.bias": 0.25,
        "blocks.1.attend.0.weight": 0.5, "blocks.1.norm.bias": 0.5, "norm.weight": 1.0, "head.weight": 0.25,
    }  # fmt: skip
    assert decays(choice) == {
        "embed.weight": 0.1, "blocks.0.attend.0.weight": 0.1, "blocks.0.norm.bias": 0.3,
        "blocks.1.attend.0.weight": 0.1, "blocks.1.norm.bias": 0.0, "norm.weight": 0.0, "head.weight": 0.3,
    }  # fmt: skip
    exact = ParameterGroup.of("head.weight", lr=0.75)
    assert rates(OptimizerChoice(lr=1.0, groups=(groups[1], exact)))["head.weight"] == 0.25
    assert rates(OptimizerChoice(lr=1.0, groups=(exact, ParameterGroup.of("*", lr=0.5))))["head.weight"] == 0.75


def test_all_groups_have_one_schedule() -> None:
    choice = OptimizerChoice(
        lr=1.0, groups=(ParameterGroup.of("head.*", lr=0.1),), schedule="cosine", warmup_steps=4, total_steps=20
    )
    for step in (0, 3, 7, 19, 30):
        found = rates(choice, step)
        assert found["head.weight"] == pytest.approx(found["embed.weight"] / 10, rel=1e-12)


def test_depths_count_the_outermost_numbered_modules() -> None:
    assert depths(NAMES) == dict(zip(NAMES, [0, 1, 1, 2, 2, 3, 3], strict=True))
    stacks = ["embed.w", "encoder.block.0.w", "encoder.block.1.w", "encoder.norm.w", "decoder.block.0.w", "head.w"]
    assert list(depths(stacks).values()) == [0, 1, 2, 2, 3, 4]
    assert depths(["a.w", "b.w"]) == {"a.w": 1, "b.w": 1}
    assert depths([]) == {}


def test_rates_fall_by_layer() -> None:
    choice = OptimizerChoice(
        "adamw",
        lr=1.0,
        weight_decay=0.1,
        layer_decay=0.5,
        groups=(ParameterGroup.of("*.bias", lr=8.0, weight_decay=0.2),),
    )
    with pytest.raises(ShardwiseError, match="needs the names of all parameters"):
        choice.group_of("head.weight", (4, 4))
    found = choice.resolved(NAMES)
    assert rates(found) == {
        "embed.weight": 0.125, "blocks.0.attend.0.weight": 0.25, "blocks.0.norm.bias": 2.0,
        "blocks.1.attend.0.weight": 0.5, "blocks.1.norm.bias": 4.0, "norm.weight": 1.0, "head.weight": 1.0,
    }  # fmt: skip
    assert decays(found)["blocks.0.norm.bias"] == 0.2
    assert decays(found)["norm.weight"] == 0.0
    assert found.resolved(NAMES) == found


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"groups": (ParameterGroup.of("heads.*", lr=1.0),)}, r"no parameter is called 'heads.\*'; legal: the name"),
        ({"groups": (ParameterGroup.of("head.weigth", lr=1.0),)}, 'Did you mean "head.weight"'),
        ({"groups": (ParameterGroup.of("head.*", rate=1.0),)}, 'rate of the group of head.* is not legal with "adamw"'),
        ({"groups": (ParameterGroup.of("head.*", momentum=0.5),)}, "momentum of the group"),
        ({"groups": (ParameterGroup.of("head.*", amsgrad=2),)}, "the group of head.*: optimizer.amsgrad: 2"),
        (
            {"name": "sgd", "groups": (ParameterGroup.of("head.*", nesterov=True),)},
            "the group of head.*: optimizer.nesterov: True is not legal with momentum = None",
        ),
        ({"groups": (ParameterGroup.of(["a", "b"], lr=-1.0),)}, "the group of a and 1 more: optimizer.lr: -1.0"),
        ({"layer_decay": 1.5}, "optimizer.layer_decay: 1.5.*at most 1"),
    ],
)
def test_wrong_groups_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerChoice(**numbers).resolved(NAMES)
    with pytest.raises(ConfigError, match="a pattern, or several, in match"):
        ParameterGroup.of([], lr=1.0)
