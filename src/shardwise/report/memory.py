"""A rank's memory over a step is shown by category: in a table, in a terminal, and in a picture (PNG, SVG or PDF)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from shardwise.core.errors import ConfigError
from shardwise.core.instruction import OP_INFO, Op

from .figures import save
from .files import MEMORY
from .tables import grid, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATEGORIES = ("optimizer", "parameters", "gradients", "activations", "temporary", "reserve")
"""The categories from the bottom of a stack to its top; what never changes comes first."""

COLOURS = {
    "optimizer": "#56728f", "parameters": "#8fa9c4", "gradients": "#c7a76c", "activations": "#5a9e6f",
    "temporary": "#c8553d",
    "reserve": "#b0b0b0",
}  # fmt: skip
SHADES = {"optimizer": "█", "parameters": "▓", "gradients": "▒", "activations": "░", "temporary": "#", "reserve": "."}
STYLES = {
    "optimizer": "blue", "parameters": "cyan", "gradients": "yellow", "activations": "green", "temporary": "red",
    "reserve": "bright_black",
}  # fmt: skip
HEIGHT = 12  # the lines of a chart
CHARACTERS = 105  # the characters that fit beside each other in a picture
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class MemoryProfile:
    """The bytes of one rank by category (:data:`CATEGORIES`; one that is left out has none).

    ``peaks`` has the peak of each of the step's ``instructions``, ``at`` is the index of the highest, and ``where``
    says in words what that does; ``between`` is what there is from step to step, and ``host`` the bytes kept on the
    host for a GPU.
    """

    rank: int
    instructions: tuple[str, ...]
    peaks: tuple[Mapping[str, int], ...]
    between: Mapping[str, int]
    at: int
    where: str
    host: int = 0

    @property
    def peak(self) -> Mapping[str, int]:
        return self.peaks[self.at]

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def between_bytes(self) -> int:
        return sum(self.between.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the account as JSON values; :meth:`from_dict` reads them back unchanged."""
        return {
            "rank": self.rank, "peak_bytes": self.peak_bytes, "between_bytes": self.between_bytes,
            "host_bytes": self.host,
            "peak": _all(self.peak), "between": _all(self.between), "at": self.at, "where": self.where,
            "instructions": list(self.instructions),
            "peaks": {c: [p.get(c, 0) for p in self.peaks] for c in CATEGORIES},
        }  # fmt: skip

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> MemoryProfile:
        """Read what :meth:`to_dict` returned."""
        columns = values["peaks"]
        peaks = tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return MemoryProfile(
            values["rank"],
            tuple(values["instructions"]),
            peaks,
            values["between"],
            values["at"],
            values["where"],
            values["host_bytes"],
        )


def _all(sizes: Mapping[str, int]) -> dict[str, int]:
    return {c: sizes.get(c, 0) for c in CATEGORIES}


def read_memory(folder: Path) -> dict[str, Any]:
    """Read what :func:`write_memory` wrote into a run's folder; raise :class:`ConfigError` if that cannot be read."""
    path, legal = folder / MEMORY, "legal: the folder of a run (train.run_dir), or CONFIG.toml and overrides"
    try:
        values = json.loads(path.read_bytes())
        str(values["title"]), str(values["device"]["kind"])
        accounts = {
            key: None if values[key] is None else MemoryProfile.from_dict(values[key])
            for key in ("predicted", "measured")
        }
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {legal}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: damaged: {type(error).__name__}: {error}; {legal}") from None
    return {**values, **accounts}


# ---- tables ----------------------------------------------------------------------------------------------------------


def present(*accounts: MemoryProfile) -> list[str]:
    """Return the categories that have any bytes, from the bottom up."""
    return [c for c in CATEGORIES if any(max([a.between.get(c, 0), *(p.get(c, 0) for p in a.peaks)]) for a in accounts)]


def table(title: str, account: MemoryProfile) -> RenderableType:
    """Return a table of the bytes by category between steps and at the peak."""
    rows = [(c, size(account.between.get(c, 0)), size(account.peak.get(c, 0))) for c in present(account)]
    totals = ("total", size(account.between_bytes), size(account.peak_bytes))
    return grid(title, ("category", ">between steps", ">at the peak"), rows, totals=totals)


def comparison(title: str, predicted: MemoryProfile, measured: MemoryProfile) -> RenderableType:
    """Return a table of each account at its peak, and of what is measured beyond what was predicted."""

    def row(name: str, ours: int, theirs: int) -> tuple[str, ...]:
        more = theirs - ours
        share = f"{more / ours:+.1%}" if ours else ""
        return name, size(ours), size(theirs), ("+" if more > 0 else "") + size(more) if more else "0", share

    rows = [row(c, predicted.peak.get(c, 0), measured.peak.get(c, 0)) for c in present(predicted, measured)]
    totals = row("total", predicted.peak_bytes, measured.peak_bytes)
    return grid(title, ("at the peak", ">predicted", ">measured", ">difference", ">"), rows, totals=totals)


# ---- in a terminal ---------------------------------------------------------------------------------------------------


def unit(nbytes: float) -> tuple[str, int]:
    """Return the name and the bytes of the unit in which ``nbytes`` bytes are shown."""
    return next(((name, n) for name, n in UNITS if nbytes >= n), ("B", 1))


def chart(account: MemoryProfile, width: int, limit: int | None = None) -> Text:
    """Return the step from left to right, bytes from bottom to top, on :data:`HEIGHT` lines of ``width`` columns or
    less.

    Of instructions that share a column the one with the most bytes is shown; ``limit`` (bytes) is drawn if not far
    above.
    """
    highest = account.peak_bytes
    top = max(highest, limit) if limit is not None and limit < 1.5 * highest else highest
    name, scale = unit(top)
    labels = [f"{top * (row + 1) / HEIGHT / scale:.1f} " for row in range(HEIGHT)]
    left = max(map(len, labels))
    shown, peak = columns(account, max(1, width - left - 1))
    found = present(account)
    before = left + 1 + peak
    text = Text(" " * before + "v peak" if peak + 6 <= len(shown) else " " * (before - 5) + "peak v")
    for row in reversed(range(HEIGHT)):
        middle = top * (row + 0.5) / HEIGHT
        marked = limit is not None and limit <= top and row == min(HEIGHT - 1, int(limit * HEIGHT / top))
        text.append(f"\n{labels[row] if row % 3 == 2 else '':>{left}}|")
        for column in shown:
            category = _category(column, found, middle)
            if category is None:
                text.append("-" if marked else " ")
            else:
                text.append(SHADES[category], STYLES[category])
    text.append(f"\n{name:>{left - 1}} +{'-' * len(shown)}\n{'':>{left}} ")
    for category in found:
        text.append(SHADES[category], STYLES[category])
        text.append(f" {category} ")
    if limit is not None and limit <= top:
        text.append("- budget")
    return text


def columns(account: MemoryProfile, count: int) -> tuple[list[Mapping[str, int]], int]:
    """Return ``count`` columns of bytes by category, and the index of the column of the peak."""
    number = len(account.peaks)
    bounds = [(c * number // count, max(c * number // count + 1, (c + 1) * number // count)) for c in range(count)]
    columns = [max(account.peaks[a:b], key=lambda p: sum(p.values())) for a, b in bounds]
    return columns, next(c for c, (a, b) in enumerate(bounds) if a <= account.at < b)


def _category(sizes: Mapping[str, int], order: Sequence[str], height: float) -> str | None:
    """Return the category that lies at a height (bytes) of the stack, or None above it."""
    reached = 0
    for category in order:
        reached += sizes.get(category, 0)
        if reached > height:
            return category
    return None


# ---- as a picture ----------------------------------------------------------------------------------------------------


def draw(
    account: MemoryProfile, out: Path, title: str, limit: int | None = None, measured: MemoryProfile | None = None
) -> None:
    """Draw the stack over the step into ``out``, with what was ``measured`` as a line; ``limit`` is in bytes."""
    save(lambda: make_figure(account, title, limit, measured), out, "--picture")


def make_figure(
    account: MemoryProfile, title: str, limit: int | None = None, measured: MemoryProfile | None = None
) -> Figure:
    """Return the picture, not yet on any canvas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axes = figure.subplots()
    highest = max(account.peak_bytes, measured.peak_bytes if measured is not None else 0)
    shown = limit is not None and limit < 1.6 * highest
    name, scale = unit(max(highest, limit or 0) if shown else highest)
    edges = list(range(len(account.peaks) + 1))
    reached = [0.0] * len(edges)
    for category in present(account):
        values = [p.get(category, 0) / scale for p in account.peaks]
        above = [r + v for r, v in zip(reached, [*values, values[-1]], strict=True)]
        axes.fill_between(edges, reached, above, step="post", color=COLOURS[category], linewidth=0, label=category)
        reached = above
    if measured is not None:
        line = [sum(p.values()) / scale for p in measured.peaks]
        axes.step(edges, [*line, line[-1]], where="post", color="black", linewidth=1.1, label="measured")
    if shown and limit is not None:
        axes.axhline(
            limit / scale,
            color="#a00000",
            linestyle="--",
            linewidth=1.2,
            zorder=5,
            label=f"budget {limit / scale:.1f} {name}",
        )
    axes.set_xlim(0, len(account.peaks))
    axes.set_ylim(0, 1.22 * max(highest, limit if shown and limit is not None else 0) / scale)
    axes.set_xlabel(f"instruction of the step (rank {account.rank})")
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    _phases(axes, account.instructions)
    _mark(axes, account, scale, name)
    first, _, second = title.partition("\n")
    axes.set_title(first, loc="left", fontsize=11.5, fontweight="bold", pad=20)
    axes.text(0, 1.02, second, transform=axes.transAxes, fontsize=9.5, color="#444444", va="bottom")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    return figure


def _mark(axes: Axes, account: MemoryProfile, scale: int, name: str) -> None:
    """Mark the peak, in words that lie inside the axes whichever side it is on."""
    at, top = account.at + 0.5, account.peak_bytes / scale
    right = at > 0.5 * len(account.peaks)
    axes.plot([at], [top], marker="v", markersize=7, color="black", clip_on=False, zorder=6)
    axes.annotate(
        f"peak {top:.1f} {name}\n{account.where}", (at, top), xytext=(-10 if right else 10, 8),
        textcoords="offset points",
        ha="right" if right else "left", va="bottom", fontsize=9, zorder=7,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
"""The names of the tasks of a timetable; W is the second part of a backward."""


def _phases(axes: Axes, instructions: Sequence[str]) -> None:
    """Mark where each forward, each backward and the update begin: by name, by F0 or B0, or not, as there is room."""
    starts: list[tuple[int, str]] = []
    for position, text in enumerate(instructions):
        word, *rest = text.split()
        kind = "update" if word == Op.STEP else PHASES.get(OP_INFO[Op(word)].task)
        number = next((w[1:] for w in rest if w[0] == "m" and w[1:].isdigit()), "")
        name = f"{kind} {number}".strip()
        if kind is not None and (not starts or starts[-1][1] != name):
            starts.append((position, name))
    ends = [position for position, _ in starts[1:]] + [len(instructions)]
    for (position, name), end in zip(starts, ends, strict=True):
        axes.axvline(position, color="white", linewidth=0.8, alpha=0.8)
        room = CHARACTERS * (end - position) / len(instructions)
        shown = next((one for one in (name, name[0].upper() + name.partition(" ")[2]) if len(one) + 2 <= room), None)
        last = end == len(instructions)  # beside the axes there is nothing that a name could run into
        if shown is not None or last:
            place: dict[str, Any] = {"x": end, "s": name, "ha": "right"} if last else {"x": position, "s": f" {shown}"}
            axes.text(y=1.0, transform=axes.get_xaxis_transform(), fontsize=7.5, color="#666666", va="top", **place)
