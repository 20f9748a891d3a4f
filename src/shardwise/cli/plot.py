"""``shardwise plot`` draws the curves of runs, and prints their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.report.plot import draw
from shardwise.report.runs import names, read_run, summary
from shardwise.report.tables import print_json


def run(run_dirs: Sequence[Path], out: Path | None, json: bool, over: str = "steps") -> None:
    """Draw the runs in ``run_dirs`` into one picture, ``out``; a folder that is named twice is drawn once."""
    seen: dict[Path, Path] = {}
    for folder in run_dirs:
        seen.setdefault(folder.resolve(), folder)
    folders = list(seen.values())
    runs = [read_run(folder) for folder in folders]
    out = out or (folders[0] / "plot.png" if len(folders) == 1 else Path("plot.png"))
    draw(runs, out, over)
    if json:
        print_json(
            {"plot": str(out), "runs": [{"run": n, **summary(r)} for n, r in zip(names(folders), runs, strict=True)]}
        )
    else:
        print(out)
