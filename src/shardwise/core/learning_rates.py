"""Schedules of the learning rate: a table of what each takes, and its factor on the learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from shardwise.core.errors import ConfigError, check_choice, check_count, check_value
from shardwise.core.options import check_number

Schedule = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "wsd", "step", "multistep", "exponential",
    "inverse_sqrt", "cyclic", "one_cycle",
]  # fmt: skip
Annealing = Literal["cos", "linear"]
CycleMode = Literal["triangular", "triangular2", "exp_range"]

DECAY_FRACTION = 0.2
"""By default ``wsd`` decays over this share of all steps."""

TIMESCALE = 10_000
"""The timescale of ``inverse_sqrt`` without a warm-up, as in transformers."""


class ScheduleFacts(NamedTuple):
    """What is known of a schedule.

    ``factor(rates, t)`` is what the learning rate is multiplied by, ``t`` steps after the warm-up.  ``options`` are the
    fields of :class:`LearningRates` that it reads, of which those in ``needs`` must be given.  ``warms_up`` says
    whether it may have a warm-up, and ``warms`` whether that takes a tenth of a config's steps by default.  ``ends``
    says whether it falls until the last of ``total_steps``.
    """

    factor: Callable[[LearningRates, int], float]
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    warms_up: bool = True
    warms: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True)
class LearningRates:
    """The schedule of a learning rate, by the names of :mod:`torch.optim.lr_scheduler` and of transformers.

    The learning rate rises linearly over ``warmup_steps`` to its highest, ``lr``.  What comes then depends on
    ``schedule``; t counts the steps from the end of the warm-up, and T is the number of steps from there to the last of
    ``total_steps``:

    - ``"constant"``: it stays.
    - ``"linear"``, ``"polynomial"``: it falls in proportion to 1 - t/T, or to the ``power`` of that (`LinearLR`,
      `PolynomialLR`).
    - ``"cosine"``: it falls as half a cosine (`CosineAnnealingLR`).
    - ``"cosine_with_restarts"``: it falls so over ``cycle_steps`` steps, goes back to ``lr`` and falls again, each time
      over ``cycle_mult`` times as many steps (`CosineAnnealingWarmRestarts`; Loshchilov and Hutter 2017, arXiv
      1608.03983).
    - ``"wsd"``: it stays and falls linearly over the last ``decay_fraction`` of all steps (warm-up, stable, decay: a
      trapezoid; Hu et al. 2024, arXiv 2404.06395).
    - ``"step"``, ``"exponential"``: it is multiplied by ``gamma`` after each ``step_size`` steps, or each step
      (`StepLR`, `ExponentialLR`).
    - ``"multistep"``: it is multiplied by ``gamma`` at each of the ``milestones``, which are steps of the run
      (`MultiStepLR`).
    - ``"inverse_sqrt"``: it is divided by sqrt(1 + t / ``timescale``); the timescale is by default ``warmup_steps``, as
      in Vaswani et al. 2017, arXiv 1706.03762, section 5.3.
    - ``"cyclic"``: it rises from ``min_lr_ratio * lr`` to ``lr`` in ``step_size_up`` steps and falls back in
      ``step_size_down``, again and again.  How far it rises is by its ``mode`` always the same ("triangular"), half as
      far in each cycle as in the one before ("triangular2"), or ``gamma`` to the power t of that ("exp_range"); the
      momentum stays (`CyclicLR` without ``cycle_momentum``; Smith 2017, arXiv 1506.01186).
    - ``"one_cycle"``: it rises from ``lr`` / ``div_factor`` to ``lr`` over the first ``pct_start`` of all steps, and
      falls to 1 / ``final_div_factor`` of where it began, along ``anneal_strategy`` ("cos" or "linear"); with
      ``three_phase`` it first falls to where it began, in as many steps as it has risen.  With ``cycle_momentum`` the
      momentum, or the first of ``betas``, goes from ``max_momentum`` to ``base_momentum`` and back meanwhile
      (`OneCycleLR`; Smith and Topin 2017, arXiv 1708.07120).

    The first five fall to ``min_lr_ratio * lr``; a ``gamma`` is by default 0.1, which ``"exponential"`` does not have,
    and 1 for ``"cyclic"``.
    """

    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.1
    decay_fraction: float = DECAY_FRACTION
    power: float = 1.0
    cycle_steps: int | None = None
    cycle_mult: int = 1
    step_size: int | None = None
    milestones: tuple[int, ...] = ()
    gamma: float | None = None
    timescale: float | None = None
    step_size_up: int | None = None
    step_size_down: int | None = None
    mode: CycleMode = "triangular"
    pct_start: float = 0.3
    anneal_strategy: Annealing = "cos"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    cycle_momentum: bool = True
    base_momentum: float = 0.85
    max_momentum: float = 0.95

    def check_schedule(self) -> None:
        """Raise :class:`ConfigError` unless the options go together; it names the field, its value and what is
        legal."""
        check_choice("optimizer.schedule", self.schedule, tuple(LR_SCHEDULES))
        facts = LR_SCHEDULES[self.schedule]
        self._check_values()
        defaults = {field.name: field.default for field in fields(LearningRates)}
        for option in OPTIONS:
            value = getattr(self, option)
            if value != defaults[option] and option not in facts.options:
                wrong = f'{value!r} is not legal with schedule = "{self.schedule}"'
                having = (f'"{name}"' for name, one in LR_SCHEDULES.items() if option in one.options)
                raise ConfigError.on(f"optimizer.{option}", wrong, f"with schedule = {', '.join(having)}.")
        for option in facts.needs:
            if getattr(self, option) == defaults[option]:
                wrong = f'nothing is given, and schedule = "{self.schedule}" needs it'
                raise ConfigError.on(f"optimizer.{option}", wrong, f"{NEEDED[option]}.")
        self._check_steps(facts)

    def _check_values(self) -> None:
        for option in ("warmup_steps", "total_steps"):
            check_count(f"optimizer.{option}", getattr(self, option), least=0)
        for option in ("cycle_steps", "cycle_mult", "step_size", "step_size_up", "step_size_down"):
            if getattr(self, option) is not None:
                check_count(f"optimizer.{option}", getattr(self, option))
        for option, value in (("min_lr_ratio", 1.0), ("decay_fraction", 1.0), ("pct_start", 1.0), ("power", math.inf)):
            check_number(f"optimizer.{option}", getattr(self, option), most=value)
        for option in ("gamma", "timescale"):
            if getattr(self, option) is not None:
                check_number(f"optimizer.{option}", getattr(self, option))
        for option in ("timescale", "div_factor", "final_div_factor"):
            value = getattr(self, option)
            legal = value is None or (isinstance(value, int | float) and 0 < value < math.inf)
            check_value(f"optimizer.{option}", value, legal, "a number above 0")
        for option in ("base_momentum", "max_momentum"):
            check_number(f"optimizer.{option}", getattr(self, option), below=1.0)
        for option in ("three_phase", "cycle_momentum"):
            value = getattr(self, option)
            check_value(f"optimizer.{option}", value, isinstance(value, bool), "true or false")
        check_choice("optimizer.anneal_strategy", self.anneal_strategy, ("cos", "linear"))
        check_choice("optimizer.mode", self.mode, get_args(CycleMode))
        if self.schedule == "cyclic" and self.gamma is not None and self.mode != "exp_range":
            wrong = f'{self.gamma} is not legal with mode = "{self.mode}"'
            raise ConfigError.on("optimizer.gamma", wrong, 'with mode = "exp_range".')
        marks = self.milestones
        whole = isinstance(marks, tuple | list) and all(isinstance(m, int) and m > 0 for m in marks)
        legal = whole and all(a < b for a, b in pairwise(marks))
        check_value("optimizer.milestones", marks, legal, "rising integers of at least 1")
        object.__setattr__(self, "milestones", tuple(marks))

    def _check_steps(self, facts: ScheduleFacts) -> None:
        """Check that the warm-up, and what comes then, fit into the steps."""
        named = f'schedule = "{self.schedule}"'
        if self.warmup_steps and not facts.warms_up:
            wrong = f"{self.warmup_steps} is not legal with {named}, which begins with a rise of its own"
            raise ConfigError.on("optimizer.warmup_steps", wrong, "0.")
        if facts.ends and self.total_steps <= self.warmup_steps:
            wrong = f"{self.total_steps} is not legal with {named}"
            raise ConfigError.on("optimizer.total_steps", wrong, f"more than warmup_steps = {self.warmup_steps}.")
        most = self.total_steps - decay_steps(self.schedule, self.total_steps, self.decay_fraction)
        if self.schedule == "wsd" and self.warmup_steps > most:
            wrong = f"{self.warmup_steps} is not legal with decay_fraction = {self.decay_fraction}"
            raise ConfigError.on("optimizer.warmup_steps", wrong, f"at most {most}, where the decay begins.")
        if self.milestones and self.milestones[0] < self.warmup_steps:
            wrong = f"{self.milestones[0]} lies in the warm-up"
            raise ConfigError.on("optimizer.milestones", wrong, f"at least warmup_steps = {self.warmup_steps}.")

    def scheduled(self, lr: float, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0, where ``lr`` is the highest.

        It is ``lr`` at step ``warmup_steps - 1``, and a schedule that ends holds from step ``total_steps - 1`` on what
        it has come to.
        """
        if step < self.warmup_steps:
            return lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return lr
        return lr * LR_SCHEDULES[self.schedule].factor(self, step - self.warmup_steps)

    @property
    def moves_momentum(self) -> bool:
        """Whether the momentum, or the first of ``betas``, follows the schedule."""
        return self.schedule == "one_cycle" and self.cycle_momentum

    def momentum_of(self, step: int) -> float:
        """Return the momentum, or the first of ``betas``, of update ``step`` where :attr:`moves_momentum`."""
        high, low = self.max_momentum, self.base_momentum
        return _cycle(self, step, (high, low, high, high) if self.three_phase else (high, low, high))

    @property
    def span(self) -> int:
        """The number of steps from the end of the warm-up to the last of ``total_steps``."""
        return self.total_steps - 1 - self.warmup_steps


def _above_least(rates: LearningRates, share: float) -> float:
    """Return the factor that is ``share`` of the way from the least to 1."""
    return rates.min_lr_ratio + (1 - rates.min_lr_ratio) * share


def _constant(rates: LearningRates, t: int) -> float:
    return 1.0


def _linear(rates: LearningRates, t: int) -> float:
    return _above_least(rates, 1 - t / rates.span if t < rates.span else 0.0)


def _polynomial(rates: LearningRates, t: int) -> float:
    return _above_least(rates, (1 - t / rates.span if t < rates.span else 0.0) ** rates.power)


def _half_cosine(t: int, span: int) -> float:
    return 0.0 if t >= span else (1 + math.cos(math.pi * t / span)) / 2


def _cosine(rates: LearningRates, t: int) -> float:
    return _above_least(rates, _half_cosine(t, rates.span))


def _restarts(rates: LearningRates, t: int) -> float:
    assert rates.cycle_steps is not None
    length = rates.cycle_steps
    if rates.cycle_mult == 1:
        t %= length
    while t >= length:
        t, length = t - length, length * rates.cycle_mult
    return _above_least(rates, _half_cosine(t, length))


def _wsd(rates: LearningRates, t: int) -> float:
    falling = decay_steps("wsd", rates.total_steps, rates.decay_fraction)
    return _above_least(rates, min(max((rates.span - t) / falling, 0.0), 1.0))


def _gamma(rates: LearningRates) -> float:
    return 0.1 if rates.gamma is None else rates.gamma


def _step(rates: LearningRates, t: int) -> float:
    assert rates.step_size is not None
    return _gamma(rates) ** (t // rates.step_size)


def _multistep(rates: LearningRates, t: int) -> float:
    return _gamma(rates) ** sum(one <= t + rates.warmup_steps for one in rates.milestones)


def _exponential(rates: LearningRates, t: int) -> float:
    return _gamma(rates) ** t


def _inverse_sqrt(rates: LearningRates, t: int) -> float:
    return 1 / math.sqrt(1 + t / (rates.timescale or rates.warmup_steps or TIMESCALE))


def _cyclic(rates: LearningRates, t: int) -> float:
    up = rates.step_size_up
    assert up is not None
    down = up if rates.step_size_down is None else rates.step_size_down
    cycle, at = divmod(t, up + down)
    height = at / up if at <= up else (up + down - at) / down
    gamma = 1.0 if rates.gamma is None else rates.gamma
    far = {"triangular": 1.0, "triangular2": 0.5**cycle, "exp_range": gamma**t}[rates.mode]
    return _above_least(rates, height * far)


def _one_cycle(rates: LearningRates, t: int) -> float:
    begin = 1 / rates.div_factor
    end = begin / rates.final_div_factor
    return _cycle(rates, t, (begin, 1.0, begin, end) if rates.three_phase else (begin, 1.0, end))


def _cycle(rates: LearningRates, step: int, values: Sequence[float]) -> float:
    """Return what is ``values`` at the ends of the phases of ``"one_cycle"``, and annealed between them."""
    last = float(rates.total_steps - 1)
    rise = rates.pct_start * rates.total_steps
    ends = (rise - 1, 2 * rise - 2, last) if rates.three_phase else (rise - 1, last)
    at, begin = min(float(step), last), 0.0
    phase = next((i for i, end in enumerate(ends) if at <= end), len(ends) - 1)
    begin, end = (ends[phase - 1] if phase else 0.0), ends[phase]
    share = 1.0 if end == begin else (at - begin) / (end - begin)
    first, then = values[phase], values[phase + 1]
    if rates.anneal_strategy == "linear":
        return first + (then - first) * share
    return then + (first - then) / 2 * (1 + math.cos(math.pi * share))


LEAST = ("min_lr_ratio",)
CYCLE = (
    "pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase", "cycle_momentum", "base_momentum",
    "max_momentum",
)  # fmt: skip

LR_SCHEDULES: Mapping[Schedule, ScheduleFacts] = {
    "constant": ScheduleFacts(_constant),
    "linear": ScheduleFacts(_linear, LEAST, warms=True, ends=True),
    "cosine": ScheduleFacts(_cosine, LEAST, warms=True, ends=True),
    "cosine_with_restarts": ScheduleFacts(
        _restarts, (*LEAST, "cycle_steps", "cycle_mult"), ("cycle_steps",), warms=True
    ),
    "polynomial": ScheduleFacts(_polynomial, (*LEAST, "power"), warms=True, ends=True),
    "wsd": ScheduleFacts(_wsd, (*LEAST, "decay_fraction"), warms=True, ends=True),
    "step": ScheduleFacts(_step, ("step_size", "gamma"), ("step_size",)),
    "multistep": ScheduleFacts(_multistep, ("milestones", "gamma"), ("milestones",)),
    "exponential": ScheduleFacts(_exponential, ("gamma",), ("gamma",)),
    "inverse_sqrt": ScheduleFacts(_inverse_sqrt, ("timescale",), warms=True),
    "cyclic": ScheduleFacts(
        _cyclic, (*LEAST, "step_size_up", "step_size_down", "mode", "gamma"), ("step_size_up",), warms_up=False
    ),
    "one_cycle": ScheduleFacts(_one_cycle, CYCLE, warms_up=False, ends=True),
}
"""All schedules, by the words of ``optimizer.schedule``."""

OPTIONS = tuple(dict.fromkeys(option for facts in LR_SCHEDULES.values() for option in facts.options))
"""The options that belong to some of the schedules."""

NEEDED = {
    "cycle_steps": "the number of steps of the first cycle",
    "step_size": "the number of steps after which the learning rate is multiplied by gamma",
    "step_size_up": "the number of steps in which the learning rate rises",
    "milestones": "the steps at which the learning rate is multiplied by gamma",
    "gamma": "what the learning rate is multiplied by in each step, such as 0.999",
}
"""What an option is that a schedule needs, in words."""


def decay_steps(schedule: Schedule, total_steps: int, fraction: float = DECAY_FRACTION) -> int:
    """Return the number of steps that the end of a schedule needs behind the warm-up."""
    if schedule == "wsd":
        return max(round(total_steps * fraction), 1)
    return int(LR_SCHEDULES[schedule].ends)
