"""``shardwise plot`` draws the curves of runs, or the load of their experts, and prints their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.report.expert_maps import expert_maps, lines, sheet
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


def run_experts(run_dirs: Sequence[Path], out: Path | None, json: bool) -> None:
    """Draw the load of the experts of a run into ``out``, and print it as text."""
    if len({folder.resolve() for folder in run_dirs}) > 1:
        raise ConfigError(f"--experts of {len(run_dirs)} runs: legal: one run")
    folder = run_dirs[0]
    maps = expert_maps(read_run(folder))
    if not maps:
        wrong = "its metrics have no load of experts"
        raise ConfigError(f"{folder}: {wrong}; legal: a run of a model with experts, with train.expert_load_every")
    out = out or folder / "experts.png"
    sheet(maps, names([folder])[0]).write(out, "--out")
    if json:
        layers = {one.name: {"steps": one.steps.tolist(), "load": one.loads.tolist()} for one in maps}
        print_json({"plot": str(out), "layers": layers})
    else:
        print("\n".join([*lines(maps), "", str(out)]))
