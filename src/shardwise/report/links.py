"""Tables and a picture of what collectives between ranks take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.links import OWN, LinkProfile, Measured

from .figures import save
from .panels import COLOURS
from .tables import grid, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, WIDE, HIGH = 3, 4.2, 3.1  # panels a row, and the inches of a panel
MARKERS = {OWN: "o", "ring": "s", "tree": "^", "hierarchical": "D", "server": "v"}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def tables(profile: LinkProfile) -> list[Any]:
    """Return a table for each collective and number of ranks; it marks the fastest algorithm of each size."""
    found = []
    for collective, ranks in dict.fromkeys((r.collective, r.ranks) for r in profile.rows):
        rows = [r for r in profile.rows if (r.collective, r.ranks) == (collective, ranks)]
        fastest = {nbytes: min(r.seconds for r in rows if r.nbytes == nbytes) for nbytes in {r.nbytes for r in rows}}
        cells = [
            (
                size(r.nbytes), r.algorithm, milliseconds(r.seconds) + ("*" if r.seconds == fastest[r.nbytes] else " "),
                "" if r.sent is None else size(r.sent),
                *(f"{b / 1e9:.3g}" for b in (r.algorithm_bandwidth, r.bus_bandwidth)),
            )
            for r in sorted(rows, key=lambda r: r.nbytes)
        ]  # fmt: skip
        columns = (">size", "algorithm", ">ms ", ">sent", ">algorithm GB/s", ">bus GB/s")
        found.append(grid(f"{collective} of {ranks} ranks", columns, cells))
    return found


def draw(profile: LinkProfile, out: Path) -> None:
    """Draw the bus bandwidth of each collective over its size into ``out``, a line for each algorithm."""
    save(lambda: _figure(profile), out, "--picture")


def _figure(profile: LinkProfile) -> Figure:
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((r.collective, r.ranks) for r in profile.rows))
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDE * columns, HIGH * rows + 0.5), layout="constrained")
    figure.suptitle(f"bus bandwidth over {profile.backend} between devices of type {profile.device}, GB/s")
    grids = figure.subplots(rows, columns, squeeze=False).flat
    names = list(dict.fromkeys(r.algorithm for r in profile.rows))
    handles: dict[str, Any] = {}
    for axes, (collective, ranks) in zip(grids, panels, strict=False):
        for index, name in enumerate(names):
            points = _points(profile.rows, collective, ranks, name)
            if points:
                (handles[name],) = axes.plot(
                    [p.nbytes for p in points], [p.bus_bandwidth / 1e9 for p in points],
                    color=COLOURS[index % len(COLOURS)], marker=MARKERS[name], markersize=4, label=name,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=f"{collective}, {ranks} ranks")
        ticks = sorted({r.nbytes for r in profile.rows if (r.collective, r.ranks) == (collective, ranks)})
        axes.set_xticks(ticks[:: -(-len(ticks) // 4)], [size(n) for n in ticks[:: -(-len(ticks) // 4)]])
        axes.minorticks_off()
        axes.grid(color="#e4e4e4")
    for axes in list(grids)[len(panels) :]:
        axes.set_axis_off()
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    return figure


def _points(rows: Iterable[Measured], collective: str, ranks: int, algorithm: str) -> Sequence[Measured]:
    found = [r for r in rows if (r.collective, r.ranks, r.algorithm) == (collective, ranks, algorithm)]
    return sorted(found, key=lambda r: r.nbytes)
