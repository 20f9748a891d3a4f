"""Time pipelines against torch.distributed.pipelining, against ranks that are busy all the time, and against the
simulated timetable.

    python benchmarks/pipeline.py [--rounds 8] [--ranks 2 4] [--precision fp32 bf16] [--microbatches 4] [--only 1f1b
                                  "torch 1f1b"] [--clip-norm 1.0] [--json FILE]

The task is the GPT of the other benchmarks (512 × 8 layers, 8 heads, vocabulary 8192, sequence 256) with AdamW and 2
rows a rank (global batch 4 with 2 ranks, 8 with 4) in 4 microbatches, or in 8 where a schedule needs one for each
stage; nothing is clipped without --clip-norm.  Embedding and head are one tensor on both sides, in the first and in the
last stage.  torch gets the same stages, schedule and microbatches, the kernels that shardwise chooses (fused AdamW, the
float32 matmul, the allocator's settings), a thread a rank and gloo.

A schedule's contenders take turns in one run, with a limit of their own: shardwise's ranks, each of which runs the same
program by itself.  Their mean time is that of ranks that are busy all the time ("of ideal").  The times of their
stages' tasks, without communication, and the schedule's timetable give the simulated step ("of simulated").

Before that an ordinary loop on one rank trains the whole batch in fp32, and all contenders must have its losses.
Memory is as in zero.py.
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from alternate import Contender, StepMaker, alternate
from shardwise.launch.local import ALLOCATOR
from stages import KINDS, Kind, Pipeline, alone, costs, pipelined, simulated
from task import Task
from torch_pipelines import TorchPipeline
from zero import CHECKED, LIMIT, STEPS, WARMUP, figures, finish, reference

OF_SIMULATED = {2: 0.97}
"""The part of the simulated speed that a schedule has to reach, by number of ranks; 4 ranks share 2 cores, which hides
bubbles."""
FASTER, SMALLER = 1.0, 1.0
"""The least speed and the most memory that a schedule has to reach, relative to torch's same schedule."""


def names(kind: Kind) -> list[str]:
    """Return the names of the contenders of a schedule, shardwise's and torch's."""
    return [kind.name, f"torch {kind.name}"] if kind.torch else [kind.name]


def contenders(pipeline: Pipeline, only: Sequence[str]) -> list[Contender]:
    """Make those contenders of ``only`` that run this schedule, and the limit if shardwise's is among them."""
    kind = pipeline.kind
    makers: dict[str, StepMaker] = {LIMIT: alone, **dict(zip(names(kind), (pipelined, TorchPipeline), strict=False))}
    return [
        Contender(
            name,
            functools.partial(make, pipeline=pipeline),
            pipeline.ranks,
            connected=name != LIMIT,
            environment=dict(ALLOCATOR),
        )
        for name, make in makers.items()
        if name in only or (name == LIMIT and kind.name in only)
    ]


def run(pipeline: Pipeline, only: Sequence[str], rounds: int, expected: Sequence[float]) -> list[dict[str, Any]]:
    """Time the contenders of a schedule and return a row for each, the limit first if it has run."""
    every = contenders(pipeline, only)
    alternate(every, rounds=rounds, steps=STEPS, warmup=WARMUP)
    limit = next((one for one in every if one.name == LIMIT), None)
    each = costs(limit.measured) if limit else None
    ideal, model = (limit.median, simulated(pipeline, each)) if limit and each else (None, None)
    return [
        {
            **figures(one, pipeline.task, expected),
            "schedule": pipeline.kind.name,
            "microbatches": pipeline.microbatches,
            "stages": [len(units) for units in pipeline.cut()],
            "of_ideal": None if ideal is None else ideal / one.median,
            "of_simulated": None if model is None else model / one.median,
            "costs": each if one is limit else None,
        }
        for one in every
    ]


def head(precision: str, ranks: int) -> None:
    columns = "of ideal  of simulated  peak RSS   PSS  data MB"
    title = f"{precision}, {ranks} ranks"
    print(f"\n{title:21} microbatches  ms/step  tokens/s  {columns}  loss of step {CHECKED}  off by  clean", flush=True)


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each contender."""
    for row in rows:
        limit = row["name"] == LIMIT
        name = f"{LIMIT} of {row['schedule']}" if limit else row["name"]
        shares = ["–" if limit or row[share] is None else f"{row[share]:.3f}" for share in ("of_ideal", "of_simulated")]
        losses = row["losses"][:CHECKED]
        loss, off = ("–", "–") if limit else (f"{losses[-1]:.4f}", f"{row['off']:.0e}")
        print(
            f"{name:21} {row['microbatches']:12}  {row['seconds'] * 1e3:7.1f}  {row['tokens_per_second']:8.0f}"
            f"  {shares[0]:>8}  {shares[1]:>12}  {row['peak_rss'] / 1e6:8.0f} {row['pss'] / 1e6:5.0f}  "
            f"{row['data'] / 1e6:7.0f}"
            f"  {loss:>14}  {off:>6}  {row['clean_steps']}/{row['steps']}",
            flush=True,
        )


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compare each schedule with torch's and with its simulation, where they have run."""
    by = {row["name"]: row for row in rows if row["name"] != LIMIT}
    for kind in KINDS.values():
        mine, peer = by.get(kind.name), by.get(f"torch {kind.name}")
        if mine is not None:
            yield {
                "name": kind.name,
                "of_simulated": mine["of_simulated"],
                "of_simulated_to_reach": OF_SIMULATED.get(mine["ranks"]),
                "faster": None if peer is None else peer["seconds"] / mine["seconds"],
                "faster_to_reach": FASTER,
                **{what: None if peer is None else mine[what] / peer[what] for what in ("peak_rss", "pss", "data")},
                "peak_rss_to_reach": SMALLER,
            }


def tell(verdict: dict[str, Any]) -> None:
    parts = []
    if verdict["of_simulated"] is not None:
        reach = f" (to reach: {verdict['of_simulated_to_reach']})" if verdict["of_simulated_to_reach"] else ""
        parts.append(f"{verdict['of_simulated']:.3f} of the simulated speed{reach}")
    if verdict["faster"] is not None:
        parts.append(
            f"{verdict['faster']:.2f} × torch's speed (to reach: {FASTER}) at {verdict['peak_rss']:.2f} of its peak RSS"
        )
        parts[-1] += f" (at most {SMALLER}), {verdict['pss']:.2f} of its PSS, {verdict['data']:.2f} of its data"
    print(f"{verdict['name']:12} {'; '.join(parts)}")


def parse() -> tuple[argparse.Namespace, Task]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=4, help="at least; some schedules need more")
    every = [name for kind in KINDS.values() for name in names(kind)]
    parser.add_argument(
        "--only", nargs="+", choices=every, default=every, metavar="NAME", help=f"of: {', '.join(every)}"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--clip-norm", type=float, help="clip gradients to this norm; by default nobody does")
    sizes = [field.name for field in fields(Task) if field.type == "int"]
    for size in sizes:
        parser.add_argument(f"--{size}", type=int)
    options = parser.parse_args()
    given = {size: getattr(options, size) for size in sizes if getattr(options, size) is not None}
    task = replace(Task(), clip_norm=options.clip_norm, **given)
    for ranks in options.ranks:
        if ranks < 2:
            parser.error(f"--ranks {ranks} is not legal; legal: 2 and more")
        for kind in KINDS.values():
            if set(names(kind)) & set(options.only):
                pipeline = Pipeline(task, kind, ranks, kind.microbatches(options.microbatches, ranks))
                if pipeline.rows % pipeline.microbatches:
                    parser.error(
                        f"{kind.name}: {pipeline.microbatches} microbatches of {pipeline.rows} rows are not equal"
                    )
                if pipeline.last >= task.layers:
                    parser.error(
                        f"{kind.name}: {pipeline.last + 1} stages of {task.layers} blocks; legal: one block or more "
                        "each"
                    )
    return options, task


def main() -> None:
    options, task = parse()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    rows: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    expected = {ranks: reference(task, ranks) for ranks in options.ranks}
    for precision in options.precision:
        for ranks in options.ranks:
            found = []
            head(precision, ranks)
            for kind in KINDS.values():
                if set(names(kind)) & set(options.only):
                    this = replace(task, precision=precision)
                    pipeline = Pipeline(this, kind, ranks, kind.microbatches(options.microbatches, ranks))
                    some = run(pipeline, options.only, options.rounds, expected[ranks])
                    table(some)
                    found += some
            for verdict in verdicts(found):
                tell(verdict)
                said.append({"precision": precision, "ranks": ranks, **verdict})
            rows += found
    finish(rows, said, options.json)


if __name__ == "__main__":
    main()
