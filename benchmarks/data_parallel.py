"""Time data parallelism against DistributedDataParallel and against the limit, ranks that never communicate.

    python benchmarks/data_parallel.py [--rounds 12]

The task is a GPT of 512 × 8 layers, 8 heads, vocabulary 8192, sequence 256, with global batch 4 and AdamW on 2 ranks ×
1 thread.  "tuned" peers get the kernels that shardwise chooses (fused AdamW, the same float32 matmul and allocator
settings); "as it comes" is torch's default.
"""

from __future__ import annotations

import argparse
import functools
import platform

import torch

from alternate import Contender, alternate
from shardwise.launch.local import ALLOCATOR
from task import Task, ours, plain


def contenders(task: Task) -> list[Contender]:
    loop = functools.partial(plain, task=task)
    mine = functools.partial(ours, task=task)
    every = [
        Contender("limit (no communication)", loop, connected=False),
        Contender("shardwise", mine),
        Contender("DDP tuned", functools.partial(loop, ddp=True)),
        Contender("shardwise over gloo", functools.partial(mine, backend="gloo")),
        Contender("DDP as it comes", functools.partial(loop, tuned=False, ddp=True)),
        Contender("plain loop tuned, 1 rank", loop, ranks=1),
        Contender("shardwise, 1 rank", mine, ranks=1),
    ]
    for one in every:
        if one.name != "DDP as it comes":
            one.environment = ALLOCATOR  # `shardwise launch` sets this, and the tuned peers get it too
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="turns of 3 steps each")
    parser.add_argument("--precision", choices=["fp32", "bf16"], action="append")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    for precision in options.precision or ["fp32", "bf16"]:
        task = Task(precision)
        every = contenders(task)
        alternate(every, rounds=options.rounds, steps=3, warmup=3)
        by = {one.name: one for one in every}
        limit = by["limit (no communication)"].median
        print(f"\n{precision:28} ms/step  tokens/s  of the limit  clean steps")
        for one in every:
            tokens = task.tokens * one.ranks / one.median
            share = f"{limit / one.median:12.3f}" if one.ranks == 2 else " " * 12
            print(f"{one.name:28} {one.median * 1e3:7.1f}  {tokens:8.0f}  {share}  {len(one.clean)}/{len(one.seconds)}")
        mine = by["shardwise"].median
        print(f"shardwise / DDP tuned        {by['DDP tuned'].median / mine:.3f}   (to reach: 1.0)")
        print(f"shardwise / DDP as it comes  {by['DDP as it comes'].median / mine:.3f}   (to reach: 1.4)")
        alone = by["plain loop tuned, 1 rank"].median / by["shardwise, 1 rank"].median
        print(f"one rank / plain tuned loop  {alone:.3f}   (to reach: 0.99)")


if __name__ == "__main__":
    main()
