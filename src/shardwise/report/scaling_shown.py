"""Tables and a picture of how a training step scales over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import save
from .panels import COLOURS
from .scaling import USES, Kind, Point, Scaling
from .tables import grid, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS: dict[Kind, tuple[str, str]] = {"strong": (COLOURS[0], "o"), "weak": (COLOURS[1], "s")}
SHADES = dict(zip(USES, (COLOURS[2], COLOURS[1], COLOURS[4], "#999999"), strict=True))
WORDS = {"computing": "computing", "exposed": "exposed communication", "waiting": "waiting", "other": "other"}
BAR = 0.8  # of the distance between two numbers of ranks
TOLD = 0.06  # the least share that is told inside of its bar


def tables(found: Scaling) -> list[Any]:
    """Return three tables for each kind of scaling: the speed, where time goes, and what that costs of efficiency."""
    parts = []
    for kind in found.kinds:
        points = [point for point in found.points if point.kind == kind]
        parts += [_speed(found, kind, points), _shares(kind, points), _lost(kind, points)]
    return parts


def _speed(found: Scaling, kind: Kind, points: Sequence[Point]) -> Any:
    text = found.tokens is not None
    cells = [
        (
            *_ranks(point, points), point.batch_size, f"{point.seconds * 1e3:.1f}",
            f"{point.tokens_per_second if point.tokens_per_second is not None else point.rows_per_second:,.0f}",
            f"{point.speed_up:.2f}", percent(point.efficiency),
        )
        for point in points
    ]  # fmt: skip
    columns = (">rows", ">ms a step", ">tokens/s" if text else ">rows/s", ">speed-up", ">efficiency")
    same = "the same rows for all" if kind == "strong" else "the same rows a rank"
    return grid(f"{kind} scaling over {found.axis}: {same}", (*_head(points), *columns), cells)


def _shares(kind: Kind, points: Sequence[Point]) -> Any:
    cells = [(*_ranks(point, points), *(percent(point.shares[use]) for use in USES)) for point in points]
    title = f"{kind} scaling: where the time of the ranks goes"
    return grid(title, (*_head(points), *(f">{WORDS[use]}" for use in USES)), cells)


def _lost(kind: Kind, points: Sequence[Point]) -> Any:
    cells = [
        (*_ranks(point, points), percent(point.efficiency), *(percent(point.lost[use]) for use in USES))
        for point in points
    ]
    title = f"{kind} scaling: 100 % = efficiency + what is lost to more"
    return grid(title, (*_head(points), ">efficiency", *(f">{WORDS[use]}" for use in USES)), cells)


def _head(points: Sequence[Point]) -> tuple[str, ...]:
    return (">ranks", ">hosts") if _several_hosts(points) else (">ranks",)


def _ranks(point: Point, points: Sequence[Point]) -> tuple[int, ...]:
    return (point.ranks, point.hosts) if _several_hosts(points) else (point.ranks,)


def _several_hosts(points: Sequence[Point]) -> bool:
    return any(point.hosts > 1 for point in points)


def percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # without the sign of -0.0


def draw(found: Scaling, out: Path) -> None:
    """Draw the speed-up over ranks, and where their time goes, into ``out``."""
    save(lambda: _figure(found), out, "--picture")


def _figure(found: Scaling) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    first = plural(found.first[0], "rank")
    figure.suptitle(f"scaling over {found.axis} from {first} with {plural(found.batch_size, 'row')} a batch")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_speed(left, found)
    _draw_shares(right, found)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=len(USES), frameon=False)
    return figure


def _draw_speed(axes: Axes, found: Scaling) -> None:
    ranks = sorted({point.ranks for point in found.points})
    least = found.first[0]
    axes.plot(ranks, [n / least for n in ranks], color="#999999", linestyle="--", label="ideal")
    for kind in found.kinds:
        points = [point for point in found.points if point.kind == kind]
        colour, marker = LOOKS[kind]
        places, speeds = [point.ranks for point in points], [point.speed_up for point in points]
        axes.plot(places, speeds, color=colour, marker=marker, markersize=5, label=f"{kind} scaling")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="speed-up", title="speed-up over the first")
    axes.minorticks_off()
    axes.set_xticks(ranks, list(map(str, ranks)))
    axes.set_yticks([n / least for n in ranks], [f"{n / least:g}" for n in ranks])
    axes.grid(color="#e4e4e4")
    axes.legend()


def _draw_shares(axes: Axes, found: Scaling) -> None:
    """Draw a bar for each point: those of a number of ranks stand together."""
    places, points = _places(found)
    bottoms = [0.0] * len(points)
    for use in USES:
        shares = [100 * point.shares[use] for point in points]
        axes.bar(places, shares, BAR, bottoms, color=SHADES[use], label=WORDS[use], edgecolor="white", linewidth=0.5)
        for place, share, bottom in zip(places, shares, bottoms, strict=True):
            if share >= 100 * TOLD:
                axes.text(place, bottom + share / 2, f"{share:.0f}", ha="center", va="center", color="white")
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    names = _names(found, places, points)
    axes.set_xticks(list(names), list(names.values()))
    axes.tick_params(axis="x", length=0)
    axes.set(xlabel="ranks", ylabel="% of the time of all ranks", ylim=(0, 100), title="where the time goes")


def _places(found: Scaling) -> tuple[list[float], list[Point]]:
    """Return where bars stand, and the point of each; the first point, which all kinds share, has one bar."""
    order = sorted(found.points, key=lambda point: (point.ranks, point.hosts, found.kinds.index(point.kind)))
    points: list[Point] = []
    for point in order:
        if not points or _case(points[-1]) != _case(point):
            points.append(point)
    place, places = 0.0, [0.0]
    for before, after in zip(points, points[1:], strict=False):
        place += 1.0 if (before.ranks, before.hosts) == (after.ranks, after.hosts) else 1.5
        places.append(place)
    return places, points


def _case(point: Point) -> tuple[int, int, int]:
    return point.ranks, point.hosts, point.batch_size


def _names(found: Scaling, places: Sequence[float], points: Sequence[Point]) -> dict[float, str]:
    """Return the names of bars that stand together, by the place of their middle."""
    together: dict[tuple[int, int], list[tuple[float, Point]]] = {}
    for place, point in zip(places, points, strict=True):
        together.setdefault((point.ranks, point.hosts), []).append((place, point))
    names = {}
    for (ranks, hosts), bars in together.items():
        name = f"{ranks} on {plural(hosts, 'host')}" if _several_hosts(points) else str(ranks)
        kinds = [point.kind for _, point in bars if len(found.kinds) > 1 and _case(point) != found.first]
        names[sum(place for place, _ in bars) / len(bars)] = "\n".join([name, *([", ".join(kinds)] if kinds else [])])
    return names
