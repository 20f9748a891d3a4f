"""Which clipping of gradients goes with a plan: to a norm, or element by element to a value."""

from __future__ import annotations

import math

from shardwise.core.errors import ConfigError, check_value
from shardwise.core.plan import Plan

BOTH = "Clipped by both, gradients would depend on which comes first"


def check_clipping(plan: Plan, clip_norm: float | None, clip_value: float | None) -> None:
    """Raise :class:`ConfigError` where gradients cannot be clipped so under ``plan``."""
    if clip_norm is not None and plan.stages_alone:
        why = "whose stages do not wait for the norm of all"
        wrong = f'{clip_norm:g} is not legal with schedule "{plan.pipeline.schedule}", {why}'
        raise ConfigError.on("clip_norm", wrong, "none")
    if clip_value is None:
        return
    number = isinstance(clip_value, int | float) and not isinstance(clip_value, bool)
    check_value("clip_value", clip_value, number and 0 < clip_value < math.inf, "a number above 0")
    if clip_norm is not None:
        wrong = f"{clip_value:g} beside clip_norm = {clip_norm:g} is not legal"
        raise ConfigError.on("clip_value", wrong, f"one of the two. {BOTH}")
    if plan.serving.apart:
        wrong = f'{clip_value:g} is not legal with server = "{plan.serving.kind}", to which gradients go unclipped'
        raise ConfigError.on("clip_value", wrong, 'none, or server = "sync"')
