"""The table of contenders beside one of them, and their figures in a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from alternate import Contender
from task import Task
from zero import SAME, off


def figures(one: Contender, base: Contender, expected: list[float], task: Task) -> dict[str, Any]:
    """Return a contender's row, which ``faster`` compares with ``base``."""
    memory = {kind: one.most(kind) for kind in one.memory[0]}
    return {
        "name": one.name, "seconds": one.median, "tokens_per_second": task.tokens * one.ranks / one.median,
        "faster": base.median / one.median, "clean_steps": len(one.clean), "steps": len(one.seconds), **memory,
        "off": off(one, expected),
    }  # fmt: skip


def report(rows: Sequence[dict[str, Any]], base: str, task: Task, options: argparse.Namespace) -> None:
    """Print the rows, and write them to ``options.json``; end with an error where losses are wrong."""
    against = f"× {base}"
    print(f"{'':26} {'ms':>8} {'tokens/s':>9} {against:>10} {'MiB':>7} {'off':>8}")
    for row in rows:
        print(
            f"{row['name']:26} {row['seconds'] * 1e3:8.0f} {row['tokens_per_second']:9.0f} {row['faster']:10.2f} "
            f"{row['peak_rss'] / 2**20:7.0f} {row['off']:8.0e}"
        )
    if options.json is not None:
        machine = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "task": vars(options) | {"json": ""}, "rows": rows}))
    limit = SAME[task.precision]
    wrong = [f"{row['name']}: its losses are off by {row['off']:.0e}" for row in rows if row["off"] > limit]
    if wrong:
        sys.exit("\n".join(wrong))
