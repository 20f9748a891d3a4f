"""Data parallelism against DistributedDataParallel and against the limit, ranks that never communicate.

    python benchmarks/data_parallel.py [--rounds 12]

A GPT of 512 × 8 layers, 8 heads, vocabulary 8192, sequence 256; global batch 4, AdamW; 2 ranks × 1 thread.
"tuned" peers get the kernels that shardwise chooses (fused AdamW, the same float32 matmul and allocator settings); "as it comes" is torch's default.
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alternate import Contender, alternate
from shardwise.launch.local import ALLOCATOR

VOCABULARY, SEQUENCE, BATCH = 8192, 256, 4


def make_model() -> torch.nn.Module:
    from shardwise.models.gpt import GPT

    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, width=512, layers=8, heads=8, context=SEQUENCE)


def make_batch(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def plain(rank: int, ranks: int, port: int, *, precision: str, tuned: bool, ddp: bool, rows: int) -> Callable[[], Any]:
    """An ordinary loop, with or without DDP around the model."""
    if tuned:
        torch.set_float32_matmul_precision("medium")
    model: torch.nn.Module = make_model()
    if ddp:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if tuned else {}))
    batch = make_batch(rows, rank)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**batch)
        loss.backward()
        optimizer.step()

    return step


def ours(rank: int, ranks: int, port: int, *, precision: str, rows: int, backend: str) -> Callable[[], Any]:
    """The same under shardwise."""
    from shardwise import Mesh, OptimizerChoice, Plan, Trainer
    from shardwise.data.loader import Batch
    from shardwise.runtime.connect import connect

    torch.set_float32_matmul_precision("medium")
    batch = make_batch(rows, rank)
    plan = Plan(mesh=Mesh.of(dp=ranks), precision=precision)  # type: ignore[arg-type]
    trainer = Trainer(
        make_model(),
        OptimizerChoice("adamw", lr=1e-4),
        plan,
        batch,
        comm=connect(plan.mesh, backend=backend),  # type: ignore[arg-type]
    )
    given = Batch(batch, rows * ranks, (rank * rows,), (rows,))
    return lambda: trainer.step(given).loss.item()


def contenders(precision: str) -> list[Contender]:
    rows = BATCH // 2
    loop = functools.partial(plain, precision=precision, rows=rows)
    mine = functools.partial(ours, precision=precision, rows=rows)
    every = [
        Contender("limit (no communication)", functools.partial(loop, tuned=True, ddp=False), connected=False),
        Contender("shardwise", functools.partial(mine, backend="auto")),
        Contender("DDP tuned", functools.partial(loop, tuned=True, ddp=True)),
        Contender("shardwise over gloo", functools.partial(mine, backend="gloo")),
        Contender("DDP as it comes", functools.partial(loop, tuned=False, ddp=True)),
        Contender("plain loop tuned, 1 rank", functools.partial(loop, tuned=True, ddp=False), ranks=1),
        Contender("shardwise, 1 rank", functools.partial(mine, backend="auto"), ranks=1),
    ]
    for one in every:
        if one.name != "DDP as it comes":
            one.environment = ALLOCATOR  # what `shardwise launch` sets; the tuned peers get it too
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="turns of 3 steps each")
    parser.add_argument("--precision", choices=["fp32", "bf16"], action="append")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    for precision in options.precision or ["fp32", "bf16"]:
        every = contenders(precision)
        alternate(every, rounds=options.rounds, steps=3, warmup=3)
        by = {one.name: one for one in every}
        limit = by["limit (no communication)"].median
        print(f"\n{precision:28} ms/step  tokens/s  of the limit  clean steps")
        for one in every:
            tokens = BATCH // 2 * one.ranks * SEQUENCE / one.median
            share = f"{limit / one.median:12.3f}" if one.ranks == 2 else " " * 12
            print(f"{one.name:28} {one.median * 1e3:7.1f}  {tokens:8.0f}  {share}  {len(one.clean)}/{len(one.seconds)}")
        mine = by["shardwise"].median
        print(f"shardwise / DDP tuned        {by['DDP tuned'].median / mine:.3f}   (to reach: 1.0)")
        print(f"shardwise / DDP as it comes  {by['DDP as it comes'].median / mine:.3f}   (to reach: 1.4)")
        alone = by["plain loop tuned, 1 rank"].median / by["shardwise, 1 rank"].median
        print(f"one rank / plain tuned loop  {alone:.3f}   (to reach: 0.99)")


if __name__ == "__main__":
    main()
