"""Time gradients of tables by rows beside dense ones, and beside DDP with torch's sparse gradients.

    python benchmarks/sparse_tables.py [--rounds 8] [--buckets 500000] [--ranks 2]

The task is the wide-and-deep model of examples/clicks over 500,000 hashed rows, a weight and 16 numbers each, on 2
ranks × 1 thread with 2048 rows each and Adagrad.  DDP is over gloo; shardwise's ranks of one host share memory.  The
batches differ, as what is looked up does.
"""

from __future__ import annotations

import argparse
import functools
import platform

import torch

from alternate import Contender, alternate
from clicks_task import WIDTH, distinct, ours, plain


def contenders(buckets: int, ranks: int) -> list[Contender]:
    mine, loop = functools.partial(ours, buckets=buckets), functools.partial(plain, buckets=buckets)
    kinds = {"dp": "data parallel", "zero1": "ZeRO-1", "server": 'server = "sync"'}
    found = [
        Contender(f"shardwise, {words}, {gradients}", functools.partial(mine, gradients=gradients, kind=kind))
        for kind, words in kinds.items() for gradients in ("rows", "dense")
    ]  # fmt: skip
    over_gloo = functools.partial(mine, gradients="rows", kind="dp", backend="gloo")
    found += [
        Contender("shardwise over gloo, data parallel, rows", over_gloo),
        Contender("DDP, sparse gradients", functools.partial(loop, sparse=True)),
        Contender("DDP, dense", functools.partial(loop, sparse=False)),
    ]
    for one in found:
        one.ranks = ranks
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of 3 steps each")
    parser.add_argument("--buckets", type=int, default=500_000)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    every = contenders(options.buckets, options.ranks)
    alternate(every, rounds=options.rounds, steps=3, warmup=3)
    mine, rows = every[0].median, distinct(options.buckets)
    dense, sparse = (n * (WIDTH + 1) * 4 for n in (options.buckets, rows))
    print(f"\na rank's batch looks up {rows:,.0f} rows: {(sparse + 2 * 8 * rows) / 1e6:.2f} of {dense / 1e6:.1f} MB")
    print(f"\n{options.buckets:,} rows, {options.ranks} ranks     ms/step  × the first  clean steps")
    for one in every:
        print(f"{one.name:41} {one.median * 1e3:7.1f}  {one.median / mine:6.2f}  {len(one.clean)}/{len(one.seconds)}")


if __name__ == "__main__":
    main()
