"""This module defines the choice of a loss scale for fp16: frozen data, checked when made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.core.errors import check_count, check_value


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """The loss is multiplied by a scale before backward, so that small gradients do not become zero in fp16.

    Under dynamic scaling (Micikevicius et al. 2018, arXiv 1710.03740) a step whose gradients overflow is skipped and
    the scale is multiplied by ``backoff``; after ``interval`` steps without overflow it is multiplied by ``growth``.
    The defaults of these are those of :class:`torch.amp.GradScaler`.  ``patience`` overflows in a row end the run: by
    default the scale is then down from 2**16 to 2**-16 and cannot be the reason for infinite gradients.

    :class:`ConfigError` names the field, its value and what is legal.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    patience: int = 32

    def __post_init__(self) -> None:
        _check("initial", self.initial, "above 0 that fp32 can hold", lambda x: 2.0**-126 <= x <= 2.0**127)
        _check("growth", self.growth, "of at least 1", lambda x: x >= 1)
        _check("backoff", self.backoff, "above 0 and at most 1", lambda x: 0 < x <= 1)
        check_count("loss_scale.interval", self.interval)
        check_count("loss_scale.patience", self.patience)

    @staticmethod
    def fixed(scale: float) -> ScaleChoice:
        """Return the choice of a scale that never changes."""
        return ScaleChoice(scale, growth=1.0, backoff=1.0)


def _check(field: str, value: object, legal: str, holds: Callable[[float], bool]) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and math.isfinite(value) and holds(value)  # type: ignore[arg-type]
    check_value(f"loss_scale.{field}", value, fits, f"a number {legal}")
