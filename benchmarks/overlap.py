"""Show how much of what layers exchange is hidden when microbatches run in pairs, on a slow link between two hosts.

    sudo python benchmarks/overlap.py [--megabits 200] [--kinds tp ep] [--rounds 4] [--json FILE]

The two ranks are in two network namespaces (this needs root), whose link carries --megabits each way.  Each kind of
parallelism trains with overlap = "none" and "pairs", over gloo, and once more on ranks that send nothing (``alone``);
all take turns in one run.  The share hidden is (none - pairs) / (none - alone), and ``at most`` is what it could be:
no more can be hidden than a rank computes.  An ordinary loop on one rank gives the losses that all must have.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from typing import Any

import torch

from alternate import Contender, alternate
from link import slow_link
from ranking import parser, task_of
from shardwise.launch.local import ALLOCATOR
from task import Task, expert_parallel, tensor_parallel
from zero import SAME, off, reference

RANKS = 2
STEPS, WARMUP = 2, 2
WAYS = ("alone", "none", "pairs")


def main() -> None:
    counts = {"megabits": 200, "microbatches": 4, "width": 768, "layers": 4, "sequence": 128, "rows": 4}
    options_of = parser(__doc__, STEPS, rounds=4, precision=False, **counts)
    options_of.add_argument("--kinds", nargs="+", choices=["tp", "tp-sp", "ep"], default=["tp", "tp-sp", "ep"])
    options = options_of.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.megabits} Mbit/s")
    rows = []
    with slow_link(options.megabits) as link:
        for kind in options.kinds:
            task = task_of(options, **({"family": "mixtral", "experts": 8} if kind == "ep" else {}))
            expected = reference(task, RANKS)
            every = [
                Contender(
                    way, maker(kind, way, task, options.microbatches), RANKS,
                    environment={**ALLOCATOR, **link.environment}, namespaces=link.namespaces,
                )
                for way in WAYS
            ]  # fmt: skip
            alternate(every, rounds=options.rounds, steps=STEPS, warmup=WARMUP)
            rows.append(figures(kind, every, expected))
            show(rows[-1], header=len(rows) == 1)
    if options.json is not None:
        options.json.write_text(json.dumps({"task": vars(options) | {"json": ""}, "rows": rows}))
    if wrong := [row["kind"] for row in rows if row["off"] > SAME["fp32"]]:
        sys.exit(f"wrong losses: {', '.join(wrong)}")


def maker(kind: str, way: str, task: Task, microbatches: int) -> Any:
    """Return the maker of a rank's step."""
    more = {"overlap": "none" if way == "alone" else way, "microbatches": microbatches}
    backend = "alone" if way == "alone" else "gloo"
    if kind == "ep":
        return functools.partial(expert_parallel, task=task, backend=backend, **more)
    return functools.partial(
        tensor_parallel, task=task, tensor="1d-sp" if kind == "tp-sp" else "1d", backend=backend, **more
    )


def figures(kind: str, every: list[Contender], expected: list[float]) -> dict[str, Any]:
    """Return the row of a kind of parallelism."""
    alone, none, pairs = (one.median for one in every)
    return {
        "kind": kind, "alone": alone, "none": none, "pairs": pairs, "faster": none / pairs,
        "hidden": (none - pairs) / (none - alone), "most": min(1.0, alone / (none - alone)),
        "off": max(off(one, expected) for one in every[1:]),
    }  # fmt: skip


def show(row: dict[str, Any], header: bool) -> None:
    """Print a row, after the table's header."""
    if header:
        print(f"{'':6} {'alone ms':>9} {'none ms':>9} {'pairs ms':>9} {'faster':>7} {'hidden':>7} {'at most':>8}")
    times = " ".join(f"{row[way] * 1e3:9.0f}" for way in WAYS)
    print(f"{row['kind']:6} {times} {row['faster']:7.2f} {row['hidden']:7.0%} {row['most']:8.0%}", flush=True)


if __name__ == "__main__":
    main()
