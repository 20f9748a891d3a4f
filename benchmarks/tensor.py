"""Time tensor parallelism against torch's DTensor, and against the limit: a rank's computation without communication.

    python benchmarks/tensor.py [--rounds 8] [--ranks 2 4] [--precision fp32 bf16] [--only 1d DTensor] [--json FILE]

The task is the GPT of the other benchmarks (512 × 8 layers, 8 heads, vocabulary 8192, sequence 256) with AdamW and
without clipping; the global batch is 4 with 2 ranks and 8 with 4, and every rank has all its rows.  The peer is
``parallelize_module`` (torch_tensor.py) with the kernels that shardwise chooses (fused AdamW, the float32 matmul, the
allocator's settings), a thread a rank and gloo, once with logits gathered for the loss and once under
``loss_parallel``.  In "1d-sp" and in "DTensor SP" norms and residuals are sharded along the sequence.

shardwise communicates in the ranks' common memory, and once "over gloo" as the peers do, to tell what the memory gains.

Each recipe of shardwise takes turns with its peers in one run, with a limit of its own: ranks that compute with their
shards of heads, MLP and vocabulary and never communicate.  Where the sequence is sharded too, a copy of as many bytes
stands for each gather.  Before that an ordinary loop on one rank trains the whole batch in fp32, and all contenders
must have its losses.  Memory is as in zero.py.
"""

from __future__ import annotations

import argparse
import functools
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from alternate import Contender, StepMaker
from shardwise.launch.local import ALLOCATOR
from task import Task, tensor_parallel
from torch_tensor import dtensor, shares
from zero import LIMIT, STEPS, Stages, ToReach, finish, race, reference

KINDS: Stages = {
    "1d": ("DTensor", "DTensor + loss_parallel"),
    "1d-sp": ("DTensor SP", "DTensor SP + loss_parallel"),
}
"""The recipes of shardwise, and the peers of each, which shard the same things."""
OVER_GLOO = " over gloo"
NAMES = [name for kind, peers in KINDS.items() for name in (kind, kind + OVER_GLOO, *peers)]
TO_REACH: ToReach = dict.fromkeys(KINDS.items(), (1.25, 1.0))


def contenders(task: Task, ranks: int, kind: str, only: Sequence[str]) -> list[Contender]:
    """Make those contenders of ``only`` that divide the work as the recipe ``kind`` does, and their limit."""
    sequence = kind.endswith("-sp")
    gathered, split = KINDS[kind]
    makers: dict[str, StepMaker] = {
        LIMIT: functools.partial(shares, task=task, sequence=sequence),
        kind: functools.partial(tensor_parallel, task=task, tensor=kind),
        kind + OVER_GLOO: functools.partial(tensor_parallel, task=task, tensor=kind, backend="gloo"),
        gathered: functools.partial(dtensor, task=task, sequence=sequence),
        split: functools.partial(dtensor, task=task, sequence=sequence, split_loss=True),
    }
    return [
        Contender(name, make, ranks, connected=name != LIMIT, environment=dict(ALLOCATOR))
        for name, make in makers.items()
        if name in (LIMIT, *only)
    ]


def parse() -> tuple[argparse.Namespace, Task]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of: {', '.join(NAMES)}"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    sizes = [field.name for field in fields(Task) if field.type == "int"]
    for size in sizes:
        parser.add_argument(f"--{size}", type=int)
    options = parser.parse_args()
    task = replace(Task(), **{size: getattr(options, size) for size in sizes if getattr(options, size) is not None})
    for ranks in options.ranks:
        if ranks < 2:
            parser.error(f"--ranks {ranks} is not legal; legal: 2 and more")
        for size in ("heads", "vocabulary", "sequence"):
            if getattr(task, size) % ranks:
                parser.error(f"--{size} {getattr(task, size)} is not legal; legal: multiples of the {ranks} ranks")
    return options, task


def main() -> None:
    options, task = parse()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    expected = {ranks: reference(task, ranks) for ranks in options.ranks}
    kinds = [kind for kind, peers in KINDS.items() if {kind, kind + OVER_GLOO, *peers} & set(options.only)]
    heats = [(precision, ranks, kind) for precision in options.precision for ranks in options.ranks for kind in kinds]
    for at, (precision, ranks, kind) in enumerate(heats):
        this = replace(task, precision=precision)
        every = contenders(this, ranks, kind, options.only)
        print(f"\nrun {at + 1} of {len(heats)}: {', '.join(one.name for one in every)}", file=sys.stderr, flush=True)
        found, judged = race(every, this, options.rounds, expected[ranks], KINDS, TO_REACH)
        rows += [{**row, "tensor": kind} for row in found]
        said += judged
    finish(rows, said, options.json)


if __name__ == "__main__":
    main()
