"""The choice of a loss scale refuses what could not work."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.scale import ScaleChoice


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"initial": 0.0}, "loss_scale.initial: 0.0 .*above 0"),
        ({"initial": -1}, "loss_scale.initial: -1 "),
        ({"initial": float("inf")}, "loss_scale.initial: inf "),
        ({"initial": 1e39}, "loss_scale.initial: 1e.39 .*fp32"),
        ({"initial": True}, "loss_scale.initial: True "),
        ({"initial": "dynamic"}, "loss_scale.initial: 'dynamic' "),
        ({"growth": 0.9}, "loss_scale.growth: 0.9 .*at least 1"),
        ({"growth": float("nan")}, "loss_scale.growth: nan "),
        ({"backoff": 0}, "loss_scale.backoff: 0 .*above 0 and at most 1"),
        ({"backoff": 1.5}, "loss_scale.backoff: 1.5 "),
        ({"interval": 0}, "loss_scale.interval: 0 .*at least 1"),
        ({"patience": 2.5}, "loss_scale.patience: 2.5 "),
    ],
)
def test_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        ScaleChoice(**values)
    assert re.search(words, str(found.value))


def test_a_fixed_scale() -> None:
    assert ScaleChoice.fixed(128) == ScaleChoice(128, growth=1.0, backoff=1.0)
    with pytest.raises(ConfigError, match=r"loss_scale\.initial: 0 "):
        ScaleChoice.fixed(0)
