"""Time the ways of context parallelism against each other: ring and heads against all-gathered attention.

    python benchmarks/context.py [--ranks 2] [--sequence 2048] [--rounds 6] [--precision fp32] [--json FILE]

The task is the GPT of the other benchmarks with four layers and a long sequence, on which every rank has a part of all
rows.  Each way trains over gloo and in the ranks' common memory; all take turns in one run, and an ordinary loop on one
rank gives the losses that all must have.  MiB is the most that was resident on a rank.
"""

from __future__ import annotations

import functools
import platform
from typing import get_args

import torch

from alternate import Contender, alternate
from ranking import figures, finish, parser, table, task_of
from shardwise.core.tensor_options import Context
from shardwise.launch.local import ALLOCATOR
from task import context_parallel
from zero import reference

KINDS = get_args(Context)
BASE = "gathered"
IN_MEMORY = " in common memory"
STEPS, WARMUP = 2, 3


def main() -> None:
    options_of = parser(__doc__, STEPS, ranks=2, sequence=2048, layers=4, rows=1)
    options = options_of.parse_args()
    if options.ranks < 2 or options.sequence <= options.ranks:
        options_of.error("--ranks and --sequence: legal: 2 ranks and more, and more tokens than ranks")
    task = task_of(options)
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
    table(rows, BASE)
    finish(rows, task, options)


if __name__ == "__main__":
    main()
