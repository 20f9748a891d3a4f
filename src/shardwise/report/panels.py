"""What is drawn of runs: panels with curves over steps or seconds, and the memory of a step.  This is pure data; a
picture of matplotlib and a page of HTML draw it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardwise.core.errors import ConfigError

from . import speed
from .memory import CATEGORIES, unit
from .runs import VALIDATION, Floats, PlottedRun

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
OVER = {"steps": "Step", "seconds": "Training time (s)"}
"""What curves can be drawn over, and the label of that axis."""
EXPERTS = (
    ("Entropy of the load of experts (1: even)", "expert_entropy", 1.0),
    ("Largest load of an expert (means)", "expert_load_highest", 1.0),
    ("Choices dropped (%)", "expert_dropped", 0.01),
)
"""What is drawn of experts, as means over layers: the title, the key, and what the value is divided by."""
FEW = 30  # up to this number of steps are drawn as points, and are not smoothed
DRAWN = 400  # points of a smoothed curve

Look = Literal["curve", "points", "level"]


@dataclass(frozen=True)
class Curve:
    """Values of one run, both of shape (n,); ``run`` is its index, and ``words`` say what the values are.

    A "curve" goes through all of them, "points" are what was measured now and then, and a "level" is one value for the
    whole run.
    """

    run: int
    words: str
    places: Floats
    values: Floats
    look: Look = "curve"

    @property
    def known(self) -> int:
        """The number of values that are finite."""
        return int(np.isfinite(self.values).sum())


@dataclass(frozen=True)
class Panel:
    """Curves in one unit over the same axis.  ``digits`` says that values are told with decimals."""

    title: str
    curves: tuple[Curve, ...]
    smoothed: bool = False
    from_zero: bool = False
    digits: bool = True

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(curve.known for curve in self.curves)

    @property
    def scale(self) -> Scale:
        """The range of its axis."""
        return scale([curve.values for curve in self.curves], from_zero=self.from_zero)


def panels(runs: Sequence[PlottedRun], over: str = "steps") -> list[Panel]:
    """Return the panels of runs over "steps" or "seconds": the loss first, then what else their files have."""
    if over not in OVER:
        raise ConfigError(f"--over {over}: legal: {', '.join(OVER)}")

    def curves(key: str, words: str, look: Look = "curve", scaled: float = 1.0) -> Iterator[Curve]:
        for index, run in enumerate(runs):
            places, values = run.along(key, over)
            yield Curve(index, words, places, values / scaled, look)

    def panel(title: str, key: str, *, smoothed: bool = False, from_zero: bool = False, digits: bool = True) -> Panel:
        return Panel(title, tuple(curves(key, "training")), smoothed, from_zero, digits)

    loss = (*curves("loss", "training"), *curves(VALIDATION, "validation", "points"))
    found = [Panel("Loss", loss, smoothed=True)]
    found += [panel("Learning rate", "lr", from_zero=True), panel("Gradient norm", "grad_norm", smoothed=True)]
    found += [_throughput(runs, over)]
    found += [_memory_over_steps(runs, over)]
    use = ("MFU (%)", "mfu", 0.01)
    if not any("mfu" in one for run in runs for one in run.metrics):
        use = ("TFLOP/s", "tflops_per_second", 1.0)  # no peak is known to compare it with
    for title, key, factor in (use, ("Loss scale", "loss_scale", 1.0), ("Staleness", "staleness", 1.0)):
        if any(key in one for run in runs for one in run.metrics):
            found += [Panel(title, tuple(curves(key, "training", scaled=factor)), from_zero=True)]
    for title, key, factor in EXPERTS:
        found += [Panel(title, tuple(_finite(one) for one in curves(key, "training", scaled=factor)))]
    for key in dict.fromkeys(key for run in runs for key in run.evaluation_keys):
        title = key.replace("_", " ").capitalize()
        found += [Panel(f"{title} (validation)", tuple(curves(key, "validation", "points")))]
    return [one for one in found if not one.empty or one.title == "Loss"]


def _finite(curve: Curve) -> Curve:
    """Return a curve without the steps in which nothing was measured."""
    good = np.isfinite(curve.values)
    return replace(curve, places=curve.places[good], values=curve.values[good])


def _throughput(runs: Sequence[PlottedRun], over: str) -> Panel:
    units = " and ".join(unit for key, unit in speed.UNITS.items() if any(run.speed == key for run in runs))
    curves = (Curve(index, "training", *run.along(run.speed, over)) for index, run in enumerate(runs))
    few = any(run.speed == speed.SAMPLES for run in runs)
    return Panel(f"Throughput ({units})", tuple(curves), smoothed=True, from_zero=True, digits=few)


def _memory_over_steps(runs: Sequence[PlottedRun], over: str) -> Panel:
    """Return the peak of rank 0 so far; on a GPU, where it counts tensors as the prediction does, with that."""
    found = [run.along("peak_memory_bytes", over) for run in runs]
    predicted = [run.predicted.peak_bytes if run.predicted and run.device == "gpu" else None for run in runs]
    most = [float(np.nanmax(values)) for _, values in found if np.isfinite(values).any()]
    name, size = unit(max([*most, *(one for one in predicted if one)], default=0.0))
    curves = [Curve(index, "so far", places, values / size) for index, (places, values) in enumerate(found)]
    for index, level in enumerate(predicted):
        if level is not None:
            places = found[index][0]
            curves.append(Curve(index, "predicted", places, np.full(len(places), level / size), "level"))
    what = "Peak memory" if all(run.device == "gpu" for run in runs) else "Peak memory of the process"
    return Panel(f"{what}, rank 0 ({name})", tuple(curves), from_zero=True)


# ---- the memory of a step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """The bytes of rank 0's tensors at the peak of a step, by category, as ``words`` says predicted or measured."""

    run: int
    words: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def bars(runs: Sequence[PlottedRun]) -> list[Bar]:
    """Return what was predicted and what was measured for each run that has written it (``memory.json``)."""
    found = []
    for index, run in enumerate(runs):
        for words, profile in (("predicted", run.predicted), ("measured", run.measured)):
            if profile is not None:
                found.append(Bar(index, words, {c: profile.peak.get(c, 0) for c in CATEGORIES if profile.peak.get(c)}))
    return found


# ---- numbers of curves -----------------------------------------------------------------------------------------------


def smooth(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return at most :data:`DRAWN` points of a smoothed curve; steps and values have the shape (n,).

    Each is the mean of the middle half of the values around it, which a spike does not move.  The window, a 25th of all
    values, grows from nothing at the start, where a loss falls fast; at the end it loses its right half.
    """
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    if len(values) <= FEW:
        return steps, values
    widest = max(2, len(values) // 50)
    centres = np.unique(np.linspace(0, len(values) - 1, min(DRAWN, len(values))).round().astype(int))
    found = []
    for centre in centres:
        half = min(widest, centre)
        window = np.sort(values[centre - half : centre + half + 1])
        cut = max(len(window) // 4, int(len(window) > 2))
        found.append(window[cut : len(window) - cut].mean())
    return steps[centres], np.array(found)


@dataclass(frozen=True)
class Scale:
    """The range of an axis; values above ``high`` are left out of it, and marked at its edge."""

    low: float
    high: float
    log: bool = False


def scale(curves: Sequence[Floats], *, from_zero: bool = False) -> Scale:
    """Return a range that a few values do not stretch: a first loss that is huge, or a step measured as much too fast.

    The first value of each curve does not decide.  The range is logarithmic if the bulk spans more than a factor of 10.
    """
    finite = [one[np.isfinite(one)] for one in curves]
    everything = np.concatenate([np.empty(0), *finite])
    if not len(everything):
        return Scale(0.0, 1.0)
    bulks = [one[1:] if len(one) > 2 else one for one in finite if len(one)]
    bottom = 0.0 if from_zero else min(float(np.quantile(bulk, 0.05)) for bulk in bulks)
    top = max(float(np.quantile(bulk, 0.95)) for bulk in bulks)
    low, high = min(0.0, float(everything.min())) if from_zero else float(everything.min()), float(everything.max())
    if not from_zero and low > 0 and top > 10 * bottom:
        return Scale(low / 1.15, high * 1.15, log=True)
    span = top - bottom
    high = float(everything[everything <= max(top + 2 * abs(span), 3 * top)].max())
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Scale(low if from_zero and low == 0 else low - margin, high + margin)
