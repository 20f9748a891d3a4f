"""Time expert parallelism beside data parallelism of the same mixture of experts.

    python benchmarks/experts.py [--ranks 2] [--experts 8] [--rounds 6] [--precision fp32] [--json FILE]

The task is a Mixtral of transformers, unchanged, of which every rank has its own rows.  shardwise has all experts on
every rank (``dp``), shards them like all else at rest (``zero-3``), or sends tokens to the ranks that have their
experts (``ep``), over gloo and in the ranks' common memory; DDP is torch's, with the same kernels.  All take turns in
one run, and an ordinary loop on one rank gives the losses that all must have.  MiB is the most that was resident.
"""

from __future__ import annotations

import argparse
import functools
import platform
from pathlib import Path
from typing import Any

import torch

from alternate import Contender, alternate
from ranking import figures, report
from shardwise.launch.local import ALLOCATOR
from task import Task, expert_parallel, ours, plain
from zero import reference

IN_MEMORY = " in common memory"
BASE = "DDP"
STEPS, WARMUP = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch for each rank")
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.ranks < 2 or options.experts < options.ranks:
        parser.error("--ranks and --experts: legal: 2 ranks and more, and an expert for each")
    task = Task(
        family="mixtral",
        experts=options.experts, width=options.width, layers=options.layers, rows=options.rows,
        precision=options.precision,
    )  # fmt: skip
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.ranks} ranks")
    expected = reference(task, options.ranks)
    makers: dict[str, Any] = {BASE: functools.partial(plain, task=task, ddp=True)}
    for name, backend in (("", "gloo"), (IN_MEMORY, "auto")):
        makers["dp" + name] = functools.partial(ours, task=task, backend=backend)
        makers["zero-3" + name] = functools.partial(ours, task=task, zero=3, backend=backend)
        makers["ep" + name] = functools.partial(expert_parallel, task=task, backend=backend)
    every = [Contender(name, make, options.ranks, environment=dict(ALLOCATOR)) for name, make in makers.items()]
    alternate(every, rounds=options.rounds, steps=STEPS, warmup=WARMUP)
    rows = [figures(one, every[0], expected, task) for one in every]
    report(rows, BASE, task, options)


if __name__ == "__main__":
    main()
