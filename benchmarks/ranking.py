"""The options that benchmarks share, the table of contenders beside one of them, and their figures in a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from alternate import Contender
from task import Task
from zero import SAME, off

HELP = {
    "megabits": "megabits a second of the link, each way",
    "rows": "rows of the batch for each rank",
}


def parser(
    doc: str | None,
    steps: int,
    *,
    rounds: int = 6,
    precision: bool = True,
    names: Sequence[str] = (),
    **counts: int,
) -> argparse.ArgumentParser:
    """Return a parser of the options of a benchmark that this docstring describes: counts with their defaults, the
    number of rounds of so many steps, and the file for its figures; ``precision``, if that is a choice, and which
    contenders of these ``names`` run, if there are some."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in counts.items():
        found.add_argument(f"--{name}", type=int, default=default, help=HELP.get(name))
    found.add_argument("--rounds", type=int, default=rounds, help=f"turns of {steps} steps each")
    if precision:
        found.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    if names:
        every = f"of: {', '.join(names)}"
        found.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=every)
    found.add_argument("--json", type=Path, help="file for all figures")
    return found


def task_of(options: argparse.Namespace, **more: Any) -> Task:
    """Return the task of the sizes and the precision that options give, and ``more`` of its fields."""
    given = {one.name: getattr(options, one.name) for one in fields(Task) if hasattr(options, one.name)}
    return Task(**(given | more))


def figures(one: Contender, base: Contender, expected: Sequence[float], task: Task) -> dict[str, Any]:
    """Return a contender's row, which ``faster`` compares with ``base``."""
    memory = {kind: one.most(kind) for kind in one.memory[0]}
    return {
        "name": one.name, "seconds": one.median, "tokens_per_second": task.tokens * one.ranks / one.median,
        "faster": base.median / one.median, "clean_steps": len(one.clean), "steps": len(one.seconds), **memory,
        "off": off(one, expected),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]], base: str, title: str = "") -> None:
    """Print the rows, which were compared with ``base``."""
    width = max(26, *(len(row["name"]) for row in rows))
    print(f"{title:{width}} {'ms':>8} {'tokens/s':>9} {f'× {base}':>10} {'MiB':>7} {'off':>8}")
    for row in rows:
        print(
            f"{row['name']:{width}} {row['seconds'] * 1e3:8.0f} {row['tokens_per_second']:9.0f} {row['faster']:10.2f} "
            f"{row['peak_rss'] / 2**20:7.0f} {row['off']:8.0e}",
            flush=True,
        )


def finish(rows: Sequence[dict[str, Any]], task: Task, options: argparse.Namespace) -> None:
    """Write the rows to ``options.json``, and end with an error where losses are wrong."""
    if options.json is not None:
        machine = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "task": vars(options) | {"json": ""}, "rows": rows}))
    limit = SAME[task.precision]
    wrong = [f"{row['name']}: its losses are off by {row['off']:.0e}" for row in rows if row["off"] > limit]
    if wrong:
        sys.exit("\n".join(wrong))
