"""Heat maps of the load of experts over the steps of a run, a map for each layer: for a terminal, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.core.errors import ConfigError

from .files import METRICS
from .runs import Floats, PlottedRun
from .sheet import Line, Rectangle, Sheet, Words

MOST = 12  # layers that are drawn; of more these are spread evenly
WIDTH, LEFT, TOP, GAP = 880, 46, 54, 40  # pixels: of the maps, before, above and between them
COLUMNS = 110  # the most columns of a picture; each is a mean over steps
ROW, LEAST, HEIGHT = 14, 2, 180  # pixels: of an expert at most and at least, and of a map of many
FEW, EVEN, MANY = (0x00, 0x72, 0xB2), (0xF7, 0xF7, 0xF7), (0xD5, 0x5E, 0x00)  # a quarter of the mean, the mean, four
RANGE = 4.0
SHADES = ((0.25, " "), (0.5, "·"), (0.8, "░"), (1.25, "▒"), (2.0, "▓"), (math.inf, "█"))
"""The characters of a terminal, up to which load in means each goes."""
LEGEND = "load in means: blank < 0.25 ≤ · < 0.5 ≤ ░ < 0.8 ≤ ▒ < 1.25 ≤ ▓ < 2 ≤ █"


@dataclass(frozen=True)
class ExpertMap:
    """The load of the experts of the layer ``name``: ``loads`` (n, experts), at ``steps`` (n,), is how many tokens each
    got, in means over the experts. A step in which nobody got any has ones."""

    name: str
    steps: Floats
    loads: Floats

    def columns(self, most: int) -> list[tuple[int, int, Floats]]:
        """Return at most ``most`` columns: the first and the last step of each, and its mean loads (experts)."""
        number = min(most, len(self.steps))
        cuts = np.linspace(0, len(self.steps), number + 1).round().astype(int)
        return [
            (int(self.steps[a]), int(self.steps[b - 1]), self.loads[a:b].mean(0))
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]


def expert_maps(run: PlottedRun) -> list[ExpertMap]:
    """Return the maps of a run, by layer; none if its metrics have no loads. Raises :class:`ConfigError` where they are
    damaged."""
    rows: dict[str, list[tuple[int, list[float]]]] = {}
    for one in run.metrics:
        loads = one.get("expert_load", {})
        if not isinstance(loads, dict) or not all(map(_is_load, loads.values())):
            raise ConfigError(
                f"{run.folder / METRICS}: expert_load of step {one['step']} is damaged; legal: counts by layer"
            )
        for name, load in loads.items():
            rows.setdefault(name, []).append((one["step"], load))
    for name, found in rows.items():
        if len({len(load) for _, load in found}) > 1:
            raise ConfigError(f"{run.folder / METRICS}: the number of experts of {name} changes; legal: one number")
    return [_map(name, found) for name, found in rows.items()]


def _is_load(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(n) in (int, float) for n in value)


def _map(name: str, found: Sequence[tuple[int, list[float]]]) -> ExpertMap:
    loads = np.array([load for _, load in found], dtype=np.float64)
    means = loads.mean(1, keepdims=True)
    loads = np.where(means > 0, loads / np.where(means > 0, means, 1), 1.0)
    return ExpertMap(name, np.array([step for step, _ in found], dtype=np.float64), loads)


def chosen(maps: Sequence[ExpertMap]) -> list[ExpertMap]:
    """Return the maps that are drawn."""
    places = np.linspace(0, len(maps) - 1, min(MOST, len(maps))).round().astype(int)
    return [maps[at] for at in places]


# ---- in a terminal ---------------------------------------------------------------------------------------------------


def lines(maps: Sequence[ExpertMap], width: int = 80) -> list[str]:
    """Return the maps as lines of text of at most ``width`` characters: a row for each expert, steps from left to
    right."""
    found = [LEGEND] if len(LEGEND) <= width else []
    for one in chosen(maps):
        label = len(str(one.loads.shape[1] - 1))
        columns = one.columns(width - label - 1)
        found += ["", f"{one.name}, steps {columns[0][0]} to {columns[-1][1]}"[:width]]
        for expert in range(one.loads.shape[1]):
            found.append(f"{expert:>{label}} " + "".join(_shade(loads[expert]) for *_, loads in columns))
    return found


def _shade(load: float) -> str:
    return next(shade for most, shade in SHADES if load < most)


# ---- as a picture ----------------------------------------------------------------------------------------------------


def sheet(maps: Sequence[ExpertMap], title: str) -> Sheet:
    """Return the maps below each other, with a legend of the colours."""
    drawn, y = chosen(maps), float(TOP)
    found = Sheet(LEFT + WIDTH + 16, 0)
    left_out = f", {len(drawn)} of {len(maps)} layers" if len(drawn) < len(maps) else ""
    found.items.append(Words(8, 20, f"{title}: load of experts{left_out}", 14, bold=True))
    _legend(found)
    for one in drawn:
        y = _draw(found, one, y) + GAP
    found.height = y
    return found


def _legend(found: Sheet) -> None:
    loads, x = (0.25, 0.5, 1.0, 2.0, 4.0), float(LEFT + WIDTH - 5 * 62)
    found.items.append(Words(x - 6, 20, "load in means", 11, anchor="end"))
    for load in loads:
        ends = {0.25: "≤ 0.25", 4.0: "≥ 4"}
        found.items.append(Rectangle(x, 10, 12, 12, colour(load), "#999999", 0.5))
        found.items.append(Words(x + 16, 20, ends.get(load, f"{load:g}"), 11))
        x += 62


def _draw(found: Sheet, one: ExpertMap, y: float) -> float:
    """Draw a map from ``y`` down, and return where it ends."""
    columns, experts = one.columns(COLUMNS), int(one.loads.shape[1])
    height, wide = max(float(LEAST), min(ROW, HEIGHT / experts)), WIDTH / len(columns)
    found.items.append(Words(LEFT, y - 6, one.name, 12, bold=True))
    every = max(1, math.ceil(12 / height))
    for expert in range(experts):
        top = y + expert * height
        if expert % every == 0:
            found.items.append(Words(LEFT - 5, top + height / 2 + 4, str(expert), 10, anchor="end"))
        for at, (first, last, loads) in enumerate(columns):
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            tip = f"expert {expert}, {steps}: {loads[expert]:.3g} means"
            found.items.append(Rectangle(LEFT + at * wide, top, wide, height, colour(float(loads[expert])), tip=tip))
    bottom = y + experts * height
    found.items.append(Line(LEFT, bottom, LEFT + WIDTH, bottom, "#555555"))
    found.items.append(Words(LEFT, bottom + 14, f"step {columns[0][0]}", 10))
    found.items.append(Words(LEFT + WIDTH, bottom + 14, str(columns[-1][1]), 10, anchor="end"))
    return bottom + 14


def colour(load: float) -> str:
    """Return the colour of a load in means: blue for few tokens, orange for many, nearly white for as many as others
    got; equal factors are equally far."""
    share = math.log(min(max(load, 1 / RANGE), RANGE)) / math.log(RANGE)
    end = FEW if share < 0 else MANY
    return "#" + "".join(f"{round(a + (b - a) * abs(share)):02x}" for a, b in zip(EVEN, end, strict=True))


__all__ = ["ExpertMap", "chosen", "colour", "expert_maps", "lines", "sheet"]
