"""Runs are drawn as curves (PNG, SVG or PDF): loss, learning rate, gradient norm, throughput, memory and metrics."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import save
from .memory import CATEGORIES, unit
from .memory import COLOURS as OF_CATEGORY
from .panels import COLOURS, FEW, OVER, Bar, Curve, Panel, Scale, bars, panels, smooth
from .runs import PlottedRun, names
from .tables import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

DASHES = ("-", "--", ":", "-.")  # the next one when all colours are used
WIDTH = 11.0  # inches
TALL, LOW, BAR, LINE = 3.5, 2.2, 0.3, 0.25  # the inches of the loss, of another panel, of a bar, of a line of text
LONGEST_NAME = 48  # characters of a run's name
LONGEST_LINE = 135  # characters of a line above the panels
GREY = "#555555"

DIAMOND: dict[str, Any] = {"marker": "D", "markersize": 6, "markerfacecolor": "white", "markeredgewidth": 1.7}
"""How a value is marked that was measured now and then, such as a validation loss."""

Styled = Sequence[dict[str, Any]]


def draw(runs: Sequence[PlottedRun], out: Path, over: str = "steps") -> None:
    """Draw ``runs`` into ``out``, over the same steps or the same seconds."""
    panels(runs, over)  # refuses what is not legal before matplotlib is imported
    save(lambda: make_figure(runs, over), out, "--out")


def make_figure(runs: Sequence[PlottedRun], over: str = "steps") -> Figure:
    """Return the picture, not yet on any canvas: what was trained in words, the loss, then two panels a row, and at the
    bottom the memory of a step as bars."""
    from matplotlib.figure import Figure

    looks = [{"color": colour, "linestyle": dash} for dash in DASHES for colour in COLOURS]
    styles = list(islice(cycle(looks), len(runs)))
    found, of_step, words = panels(runs, over), bars(runs), _header(runs)
    rows = math.ceil((len(found) - 1) / 2)
    heights = [LINE * len(words) + 0.15, TALL + (LOW + 0.3) * rows + 0.3]
    heights += [1.05 + BAR * len(of_step)] if of_step else []
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _write_header(parts[0].add_axes((0.012, 0.0, 0.98, 1.0)), words, styles)
    _panels(parts[1], found, rows, styles, over)
    if of_step:
        _bars(parts[2], of_step, [_shortened(name) for name in names([run.folder for run in runs])])
    return figure


# ---- what was trained, in words --------------------------------------------------------------------------------------


def _header(runs: Sequence[PlottedRun]) -> list[tuple[str, int]]:
    """Return the lines above the panels, each with the index of the run whose line it begins with; -1 for none."""
    labels = [_shortened(name) for name in names([run.folder for run in runs])]
    if len(runs) == 1:
        return [(labels[0], -1), *((line, -1) for line in textwrap.wrap(runs[0].headline, LONGEST_LINE))]
    lines = [(f"{len(runs)} runs", -1)]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        wrapped = textwrap.wrap(": ".join(filter(None, (label, run.headline))), LONGEST_LINE - 6)
        lines += [(line, index if at == 0 else -2) for at, line in enumerate(wrapped)]
    return lines


def _write_header(axes: Axes, lines: Sequence[tuple[str, int]], styles: Styled) -> None:
    """Write a title and lines below it; a line of a run begins with its colour and dash."""
    axes.set_axis_off()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(len(lines), 0)
    for at, (text, run) in enumerate(lines):
        if run >= 0:
            axes.plot([0.02, 0.42], [at + 0.5] * 2, **styles[run], linewidth=2.4, solid_capstyle="butt")
        look: dict[str, Any] = (
            {"fontsize": 13, "fontweight": "bold"} if at == 0 else {"fontsize": 10, "color": "#222222"}
        )
        left = 0.0 if run == -1 else 0.55
        axes.text(left, at + 0.5, text, va="center", ha="left", parse_math=False, **look)


def _shortened(name: str) -> str:
    """Cut the middle of a long name."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2 - 1]}...{name[-LONGEST_NAME // 2 + 2 :]}"


# ---- panels ----------------------------------------------------------------------------------------------------------


def _panels(part: SubFigure, found: Sequence[Panel], rows: int, styles: Styled, over: str) -> None:
    """Draw the first panel, and below it the others on ``rows`` rows of two."""
    grid = part.add_gridspec(1 + rows, 2, height_ratios=[TALL, *[LOW] * rows], hspace=0.06)
    drawn: list[Axes] = []
    for at, panel in enumerate(found, 1):
        alone = at == 1 or at == len(found) and at % 2 == 0
        place = grid[at // 2, :] if alone else grid[at // 2, at % 2]
        drawn.append(part.add_subplot(place, sharex=drawn[0] if drawn else None))
        _panel(drawn[-1], panel, styles, over)
    _steps_axis(drawn, over)


def _panel(axes: Axes, panel: Panel, styles: Styled, over: str) -> None:
    """Draw one panel; with a single run, what validates it has a colour of its own."""
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9.5)
    if panel.empty:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=GREY)
        axes.set_yticks([])
        return
    limits = panel.scale
    for curve in panel.curves:
        _curve(axes, curve, _style(curve, styles), panel.smoothed and curve.known > FEW)
    if limits.log:
        axes.set_yscale("log")
    axes.set_ylim(limits.low, limits.high)
    _mark_hidden(axes, panel, limits, styles, over)
    _ticks(axes, limits)
    _legend(axes, panel, styles)


def _style(curve: Curve, styles: Styled) -> dict[str, Any]:
    if len(styles) == 1 and curve.look != "curve":
        return {"color": COLOURS[1], "linestyle": "-"}
    return styles[curve.run]


def _curve(axes: Axes, curve: Curve, style: dict[str, Any], smoothed: bool) -> None:
    places, values, colour = curve.places, curve.values, style["color"]
    if curve.look == "level":
        axes.plot(places, values, color=colour, linewidth=1.4, linestyle=(0, (5, 3)), zorder=2)
    elif curve.look == "points":
        axes.plot(places, values, color=colour, linewidth=1.0, linestyle=":", zorder=4)
        axes.plot(places, values, color=colour, linestyle="", zorder=5, **DIAMOND)
    elif smoothed:
        axes.plot(places, values, color=colour, linewidth=0.6, alpha=0.28, zorder=2)
        axes.plot(*smooth(places, values), **style, linewidth=1.8, zorder=3)
    else:
        dots: dict[str, Any] = {"marker": "o", "markersize": 3.5} if curve.known <= FEW else {}
        axes.plot(places, values, **style, linewidth=1.8, zorder=3, **dots)


def _legend(axes: Axes, panel: Panel, styles: Styled) -> None:
    """Say in the panel what is drawn how, where that is more than one thing."""
    from matplotlib.lines import Line2D

    one = len(styles) == 1
    base = styles[0]["color"] if one else GREY
    handles = []
    smoothed = panel.smoothed and any(curve.look == "curve" and curve.known > FEW for curve in panel.curves)
    there = dict.fromkeys((curve.look, curve.words) for curve in panel.curves if curve.known)
    for look, words in there:
        colour = COLOURS[1] if one and look != "curve" else base
        if look == "points":
            handles.append(Line2D([], [], color=colour, linewidth=1.0, linestyle=":", label=words, **DIAMOND))
        elif look == "level":
            handles.append(Line2D([], [], color=colour, linewidth=1.4, linestyle=(0, (5, 3)), label=words))
        else:
            dots: dict[str, Any] = {} if smoothed else {"marker": "o", "markersize": 3.5}
            label = f"{words}, smoothed" if smoothed else words
            handles.append(Line2D([], [], color=colour, linewidth=2, label=label, **dots))
            handles += [Line2D([], [], color=colour, linewidth=0.7, alpha=0.6, label="each step")] if smoothed else []
    if len(there) > 1:
        axes.legend(handles=handles, loc="upper right", fontsize=9, frameon=True, framealpha=0.85, edgecolor="none")


def _mark_hidden(axes: Axes, panel: Panel, limits: Scale, styles: Styled, over: str) -> None:
    """Draw a triangle at the upper edge for every value above it; the highest of all is told in words."""
    highest, colour, hidden, where = -math.inf, "", 0, 0.0
    for curve in panel.curves:
        values, own = curve.values, _style(curve, styles)["color"]
        above = np.isfinite(values) & (values > limits.high)
        axes.plot(
            curve.places[above], np.full(above.sum(), 0.985), color=own, marker="^", markersize=6, linestyle="",
            transform=axes.get_xaxis_transform(), zorder=6,
        )  # fmt: skip
        hidden += int(above.sum())
        if above.any() and float(values[above].max()) > highest:
            highest, colour = float(values[above].max()), own
            where = float(curve.places[above][values[above].argmax()])
    if hidden:
        more = f"; {hidden - 1} more above" if hidden > 1 else ""
        told = f"{highest:,.6g}" if panel.digits else f"{highest:,.0f}"
        place = f"step {where:,.0f}" if over == "steps" else f"{where:,.0f} s"
        axes.set_title(f"▲ {told} at {place}{more}", loc="right", fontsize=9, color=colour)


def _steps_axis(drawn: Sequence[Axes], over: str) -> None:
    """Number steps or seconds below every panel, and name them below the lowest of each column."""
    from matplotlib.ticker import MaxNLocator

    drawn[0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    drawn[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lowest = drawn[-1:] if len(drawn) % 2 == 0 or len(drawn) == 1 else drawn[-2:]
    for axes in lowest:
        axes.set_xlabel(OVER[over], fontsize=10)


def _ticks(axes: Axes, limits: Scale) -> None:
    """Show round numbers in full, with thousands separated: neither powers of ten nor an offset."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

    if limits.log:
        few = limits.high / limits.low > 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if few else (1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        return
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if limits.high >= 1000:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_scientific(False)
        axes.yaxis.set_major_formatter(formatter)


# ---- the memory of a step --------------------------------------------------------------------------------------------


def _bars(part: SubFigure, found: Sequence[Bar], labels: Sequence[str]) -> None:
    """Draw the bars of all runs from top to bottom, with their total at their ends."""
    axes = part.add_subplot()
    most = max(bar.total for bar in found)
    name, scale = unit(most)
    axes.set_title(
        f"Memory at the peak of a step, tensors of rank 0 ({name})", loc="left", fontsize=11, fontweight="bold"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    ends = np.zeros(len(found))
    for category in CATEGORIES:
        widths = np.array([bar.parts.get(category, 0) / scale for bar in found])
        if widths.any():
            axes.barh(range(len(found)), widths, left=ends, height=0.72, color=OF_CATEGORY[category], label=category)
            ends += widths
    for at, bar in enumerate(found):
        axes.text(ends[at] + 0.008 * most / scale, at, size(bar.total), va="center", fontsize=9.5)
    several = len(labels) > 1
    words = [f"{labels[bar.run]}, {bar.words}" if several else bar.words for bar in found]
    axes.set_yticks(range(len(found)), words, fontsize=9.5)
    for tick in axes.get_yticklabels():
        tick.set_parse_math(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * most / scale)
    part.legend(
        loc="outside lower center", ncols=len(CATEGORIES), fontsize=9.5, frameon=False, handlelength=1.2,
        columnspacing=1.6,
    )  # fmt: skip
