"""The exponential moving average (EMA) of the weights: which steps are averaged, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import ConfigError, check_count, check_value
from shardwise.core.options import check_number
from shardwise.core.plan import Plan

Averages = Literal["", "copy", "average"]
"""What an update does to the average: nothing, it becomes the weights, or it moves towards them."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The average of the weights, ``ema * average + (1 - ema) * weights`` after a step, as of
    ``torch.optim.swa_utils.get_ema_multi_avg_fn(ema)``; without ``ema`` there is none.

    For the first ``ema_start`` steps the average is the weights.  After them every ``ema_every``-th step counts, and
    the first that does makes the average the weights once more, as in torch's ``AveragedModel``.  With ``ema_warmup``
    the decay is at most (1 + n) / (10 + n) where n steps have counted before (as in diffusers, and in TensorFlow's
    ``ExponentialMovingAverage``), so that the first weights are soon forgotten.  A skipped step does not count.
    """

    ema: float | None = None
    ema_start: int = 0
    ema_every: int = 1
    ema_warmup: bool = False

    def check_averaging(self) -> None:
        """Raise :class:`ConfigError` unless these options are legal together."""
        if self.ema is not None:
            check_number("optimizer.ema", self.ema, below=1.0)
        check_count("optimizer.ema_start", self.ema_start, least=0)
        check_count("optimizer.ema_every", self.ema_every)
        check_value("optimizer.ema_warmup", self.ema_warmup, isinstance(self.ema_warmup, bool), "true or false")
        if self.ema is None and (self.ema_start, self.ema_every, self.ema_warmup) != (0, 1, False):
            given = {"ema_start": self.ema_start, "ema_every": self.ema_every - 1, "ema_warmup": self.ema_warmup}
            option = next(name for name, value in given.items() if value)
            wrong = f"{getattr(self, option)!r} is not legal without optimizer.ema"
            raise ConfigError.on(f"optimizer.{option}", wrong, "left out, or optimizer.ema as well")

    def averages(self, step: int) -> Averages:
        """Return what update ``step``, counted from 0, does to the average."""
        if self.ema is None:
            return ""
        if step < self.ema_start:
            return "copy"
        return "" if (step + 1 - self.ema_start) % self.ema_every else "average"


def check_average(plan: Plan, choice: Averaging) -> None:
    """Raise :class:`ConfigError` where weights cannot be averaged under ``plan``."""
    if choice.ema is None:
        return
    if plan.serving.apart:
        wrong = f'{choice.ema:g} is not legal with server = "{plan.serving.kind}", which has no step of all'
        raise ConfigError.on("optimizer.ema", wrong, 'none, or server = "sync"')
    if plan.local.steps:
        wrong = f"{choice.ema:g} is not legal with local_steps = {plan.local.steps}, where islands have weights each"
        raise ConfigError.on("optimizer.ema", wrong, "none, or local_steps = 0")
