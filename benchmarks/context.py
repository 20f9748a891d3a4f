"""Time the ways of context parallelism against each other: ring and heads against all-gathered attention.

    python benchmarks/context.py [--ranks 2] [--sequence 2048] [--rounds 6] [--precision fp32] [--json FILE]

The task is the GPT of the other benchmarks with four layers and a long sequence, on which every rank has a part of all
rows.  Each way trains over gloo and in the ranks' common memory; all take turns in one run, and an ordinary loop on one
rank gives the losses that all must have.  MiB is the most that was resident on a rank.
"""

from __future__ import annotations

import argparse
import functools
import platform
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from alternate import Contender, alternate
from ranking import figures, report
from shardwise.core.tensor_options import Context
from shardwise.launch.local import ALLOCATOR
from task import Task, context_parallel
from zero import reference

KINDS = get_args(Context)
BASE = "gathered"
IN_MEMORY = " in common memory"
STEPS, WARMUP = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="rows of the batch for each rank")
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.ranks < 2 or options.sequence <= options.ranks:
        parser.error("--ranks and --sequence: legal: 2 ranks and more, and more tokens than ranks")
    task = replace(
        Task(), sequence=options.sequence, layers=options.layers, rows=options.rows, precision=options.precision
    )
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.ranks} ranks")
    expected = reference(task, options.ranks)
    makers = {kind: functools.partial(context_parallel, task=task, kind=kind) for kind in KINDS}
    makers |= {kind + IN_MEMORY: functools.partial(makers[kind], backend="auto") for kind in KINDS}
    every = [Contender(name, make, options.ranks, environment=dict(ALLOCATOR)) for name, make in makers.items()]
    alternate(every, rounds=options.rounds, steps=STEPS, warmup=WARMUP)
    rows = []
    for one in every:
        base = next(o for o in every if o.name == BASE + IN_MEMORY * one.name.endswith(IN_MEMORY))
        rows.append(figures(one, base, expected, task))
    report(rows, BASE, task, options)


if __name__ == "__main__":
    main()
