"""Runs are drawn as curves (PNG, SVG or PDF): loss, throughput and memory over steps, from the files of training."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError

from .files import EVALUATIONS, METRICS, measured, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")  # the next one when all colours are used
FORMATS = (".png", ".svg", ".pdf")
OVER = {"steps": "Step", "seconds": "Training time (s)"}
"""What curves can be drawn over, and the label of that axis."""
WIDTH, HEIGHT, PANEL = 9.0, 9.0, 2.0  # inches
MOST_METRICS = 6  # of evaluations that are drawn
GIB = 2**30
FEW = 30  # up to this number of steps are drawn as points, and are not smoothed
DRAWN = 400  # points of a smoothed curve
LONGEST_NAME = 48  # characters in the legend

Metrics = dict[str, Any]
Floats = NDArray[np.float64]


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlottedRun:
    """What a run has written so far, by rising step."""

    folder: Path
    metrics: list[Metrics]
    evaluations: list[Metrics]

    def values(self, key: str) -> tuple[Floats, Floats]:
        """Return the steps and values of ``key``, each of shape (n,); NaN stands for what is missing or not finite."""
        source = self.evaluations if key == "validation_loss" or key in self.measured else self.metrics
        steps = np.array([one["step"] for one in source], dtype=np.float64)
        values = np.array([math.nan if one.get(key) is None else one[key] for one in source], dtype=np.float64)
        values[~np.isfinite(values)] = math.nan
        return steps, values

    @property
    def measured(self) -> dict[str, None]:
        """The names of the metrics of its evaluations, besides loss and perplexity."""
        return dict.fromkeys(name for one in self.evaluations for name in measured(one))

    def along(self, key: str, over: str) -> tuple[Floats, Floats]:
        """Return the same, over steps or over the seconds that training has taken by the end of each."""
        steps, values = self.values(key)
        if over == "steps":
            return steps, values
        known, seconds = self.values("step_seconds")
        taken = np.concatenate([np.zeros(1), np.nancumsum(seconds)])
        return taken[np.searchsorted(known, steps, side="right")], values


def read_run(folder: Path) -> PlottedRun:
    """Return the run in ``folder``; raise :class:`ConfigError` if there is none, or one of its files is damaged."""
    legal = "legal: the folder of a run (train.run_dir)"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: {'is a file' if folder.exists() else 'there is no such folder'}; {legal}")
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder}: there is no metrics.jsonl in this folder; {legal}")
    metrics = _read(folder / METRICS, ("loss", "tokens_per_second", "peak_memory_bytes"))
    evaluations = folder / EVALUATIONS
    run = PlottedRun(
        folder, metrics, _read(evaluations, ("validation_loss", "perplexity")) if evaluations.is_file() else []
    )
    if all(
        np.isnan(run.values(key)[1]).all()
        for key in ("loss", "validation_loss", "tokens_per_second", "peak_memory_bytes")
    ):
        steps = f"none of its {len(metrics)} steps has a number" if metrics else "no step yet"
        raise ConfigError(f"{folder / 'metrics.jsonl'}: nothing to draw, {steps}; legal: a run of at least one step")
    return run


def _read(path: Path, keys: Sequence[str]) -> list[Metrics]:
    """Return the objects of a file of JSON lines.  A line of a step that was there already is where a restart from a
    checkpoint began: what was noted of that step and of all after it no longer counts."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; legal: the metrics of a run") from None
    found: list[Metrics] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = _checked(line, keys)
        except ValueError as error:
            if number == len(lines):  # the run is writing this line right now
                break
            raise ConfigError(
                f'{path}:{number}: {error}; legal: a JSON object with "step" and numbers, or null'
            ) from None
        while found and found[-1]["step"] >= one["step"]:
            found.pop()
        found.append(one)
    return found


def _checked(line: bytes, keys: Sequence[str]) -> Metrics:
    try:
        one = json.loads(line.decode())
    except ValueError:
        shown = line.decode(errors="replace")
        raise ValueError(f"damaged line: {shown[:60]}{'...' if len(shown) > 60 else ''}") from None
    if not isinstance(one, dict):
        raise ValueError(f"{str(one)[:60]} is no JSON object")
    if type(one.get("step")) is not int or one["step"] < 0:
        raise ValueError(f"step {one.get('step')!r} is not an integer of at least 0")
    for key in keys:
        if type(one.get(key)) not in (int, float, type(None)):
            raise ValueError(f"{key} {one[key]!r} is not a number")
    return one


def names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder, with as many of its parents as tell it from the others."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    depth = [1] * len(parts)
    while True:
        short = [os.path.join(*p[-d:]) for p, d in zip(parts, depth, strict=True)]
        grown = [min(d + (short.count(s) > 1), len(p)) for d, s, p in zip(depth, short, parts, strict=True)]
        if grown == depth:
            return short
        depth = grown


def summary(run: PlottedRun) -> Metrics:
    """Return numbers of a run as in its ``result.json``: speed is the median of all steps but the first, a warm-up."""

    def finite(key: str) -> list[float]:
        values = run.values(key)[1]
        return [float(value) for value in values[np.isfinite(values)]]

    speeds = run.values("tokens_per_second")[1]
    steady = [float(s) for s in (speeds[1:] if len(speeds) > 1 else speeds) if math.isfinite(s)]
    evaluation = run.evaluations[-1] if run.evaluations else {}
    return {
        "run_dir": str(run.folder),
        "steps": len(run.metrics),
        "loss_first": run.metrics[0].get("loss") if run.metrics else None,
        "loss_last": run.metrics[-1].get("loss") if run.metrics else None,
        "tokens_per_second": statistics.median(steady) if steady else None,
        "peak_memory_bytes": max((int(value) for value in finite("peak_memory_bytes")), default=None),
        "validation_loss": evaluation.get("validation_loss"),
        "perplexity": evaluation.get("perplexity"),
        **measured(evaluation),
    }


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


# ---- drawing ---------------------------------------------------------------------------------------------------------


def draw(runs: Sequence[PlottedRun], out: Path, over: str = "steps") -> None:
    """Draw ``runs`` into ``out``: loss, metrics, throughput and memory one below the other, over steps or seconds."""
    if over not in OVER:
        raise ConfigError(f"--over {over}: legal: {', '.join(OVER)}")
    save(lambda: make_figure(runs, over), out, "--out")


def save(make: Callable[[], Figure], out: Path, option: str) -> None:
    """Write the figure that ``make`` makes into ``out``, which ``option`` named; raise ConfigError on failure."""
    check_format(out, option)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot: {error}; legal: pip install shardwise[plots]") from None
    figure = make()
    FigureCanvasAgg(figure)
    with writing(out, option):
        figure.savefig(out, dpi=150)


def check_format(out: Path, option: str) -> None:
    """Raise :class:`ConfigError` unless pictures can be written in the format that the file's name says."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"{option} {out}: {out.suffix or 'no ending'} is not legal; legal: {', '.join(FORMATS)}")


def make_figure(runs: Sequence[PlottedRun], over: str = "steps") -> Figure:
    """Return the picture, not yet on any canvas."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    more = list(dict.fromkeys(name for run in runs for name in run.measured))[:MOST_METRICS]
    figure.set_figheight(height := HEIGHT + PANEL * len(more))
    loss, *own, speed, memory = figure.subplots(
        3 + len(more), 1, sharex=True, height_ratios=(2, *(1,) * len(more), 1, 1)
    )
    labels = [_shortened(name) for name in names([run.folder for run in runs])]
    looks = [{"color": colour, "linestyle": dash} for dash in DASHES for colour in COLOURS]
    styled = list(zip(runs, labels, islice(cycle(looks), len(runs)), strict=True))

    def curves(key: str) -> list[Curve]:
        return [(*run.along(key, over), look) for run, _, look in styled]

    _panel(loss, "Loss", curves("loss"), over, smoothed=True, decimals=True, points=curves("validation_loss"))
    for axes, name in zip(own, more, strict=True):
        _panel(axes, f"Validation: {_shortened(name)}", [], over, decimals=True, points=curves(name))
    _panel(speed, "Throughput (tokens/s)", curves("tokens_per_second"), over, smoothed=True, from_zero=True)
    sizes = [(places, values / GIB, look) for places, values, look in curves("peak_memory_bytes")]
    _panel(memory, "Peak memory (GiB)", sizes, over, from_zero=True, decimals=True)
    memory.set_xlabel(OVER[over])
    memory.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    memory.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _legend(figure, styled, height)
    return figure


Curve = tuple[Floats, Floats, dict[str, Any]]


def _panel(
    axes: Axes, title: str, curves: Sequence[Curve], over: str, *, smoothed: bool = False, from_zero: bool = False,
    decimals: bool = False,
    points: Sequence[Curve] = (),
) -> None:  # fmt: skip
    """Draw one panel: curves, over raw values if smoothed, and white-edged points of another measure in the same
    unit."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    limits = scale([values for _, values, _ in (*curves, *points)], from_zero=from_zero)
    for steps, values, look in curves:
        _curve(axes, steps, values, look, smoothed and np.isfinite(values).sum() > FEW)
    for steps, values, look in points:
        axes.plot(steps, values, color=look["color"], linewidth=0.8, linestyle=":", zorder=4)
        axes.plot(
            steps,
            values,
            color=look["color"],
            marker="o",
            markersize=6,
            markeredgecolor="white",
            linestyle="",
            zorder=5,
        )
    if not any(np.isfinite(values).any() for _, values, _ in (*curves, *points)):
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#777777")
        axes.set_yticks([])
        return
    if limits.log:
        axes.set_yscale("log")
    axes.set_ylim(limits.low, limits.high)
    _mark_hidden(axes, (*curves, *points), limits, decimals, over)
    _ticks(axes, limits)


def _curve(axes: Axes, steps: Floats, values: Floats, look: dict[str, Any], smoothed: bool) -> None:
    dots: dict[str, Any] = {"marker": "o", "markersize": 3.5} if np.isfinite(values).sum() <= FEW else {}
    if smoothed:
        axes.plot(steps, values, color=look["color"], linewidth=0.6, alpha=0.22, zorder=2)
        axes.plot(*smooth(steps, values), **look, linewidth=1.8, zorder=3)
    else:
        axes.plot(steps, values, **look, linewidth=1.8, zorder=3, **dots)


def _mark_hidden(axes: Axes, curves: Sequence[Curve], limits: Scale, decimals: bool, over: str) -> None:
    """Draw a triangle at the upper edge for every value above it; the highest of all is told in words."""
    highest, colour, hidden = -math.inf, "", 0
    for steps, values, look in curves:
        above = np.isfinite(values) & (values > limits.high)
        axes.plot(
            steps[above], np.full(above.sum(), 0.985), color=look["color"], marker="^", markersize=6, linestyle="",
            transform=axes.get_xaxis_transform(), zorder=6,
        )  # fmt: skip
        hidden += int(above.sum())
        if above.any() and float(values[above].max()) > highest:
            highest, colour = float(values[above].max()), look["color"]
            where = float(steps[above][values[above].argmax()])
    if hidden:
        more = f"; {hidden - 1} more above" if hidden > 1 else ""
        told = f"{highest:,.6g}" if decimals else f"{highest:,.0f}"
        place = f"step {where:,.0f}" if over == "steps" else f"{where:,.0f} s"
        axes.set_title(f"▲ {told} at {place}{more}", loc="right", fontsize=9, color=colour)


def _ticks(axes: Axes, limits: Scale) -> None:
    """Show round numbers in full, with thousands separated: neither powers of ten nor an offset."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    if limits.log:
        few = limits.high / limits.low > 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    if limits.high >= 1000:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_scientific(False)
        axes.yaxis.set_major_formatter(formatter)


def _legend(figure: Figure, styled: Sequence[tuple[PlottedRun, str, dict[str, Any]]], height: float) -> None:
    """Put the legend above the panels, where it hides nothing; the picture grows with it."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look, linewidth=2.2, label=label) for _, label, look in styled]
    if any(np.isfinite(run.values("loss")[1]).sum() > FEW for run, _, _ in styled):
        handles.append(Line2D([], [], color="#777777", linewidth=0.7, alpha=0.6, label="not smoothed"))
    if any(run.evaluations for run, _, _ in styled):
        handles.append(
            Line2D([], [], color="#777777", marker="o", markersize=6, markeredgecolor="white", linewidth=0.8,
            linestyle=":",
                   label="validation loss")
        )  # fmt: skip
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 110 // (widest + 8)))
    figure.set_figheight(height + 0.21 * (math.ceil(len(handles) / columns) - 1))
    legend = figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with two "$" in it is no formula


def _shortened(name: str) -> str:
    """Cut the middle of a long name, and mask a leading "_", with which the legend would have no entry for it."""
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2 - 1]}...{name[-LONGEST_NAME // 2 + 2 :]}"
    return f"\u200b{name}" if name.startswith("_") else name
