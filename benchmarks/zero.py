"""Time ZeRO against FSDP2, ZeroRedundancyOptimizer, DeepSpeed, and the limit: ranks that never communicate.

    python benchmarks/zero.py [--rounds 8] [--ranks 2 4] [--precision fp32 bf16] [--only "zero 3" "FSDP2 reshard"]
    [--json FILE]

The task is a GPT of 512 × 8 layers, 8 heads, vocabulary 8192, sequence 256, with 2 rows a rank (global batch 4 with 2
ranks, 8 with 4) and AdamW.  Peers use gloo, and each rank has a thread.  All get the kernels that shardwise chooses:
fused AdamW, the float32 matmul, the allocator's settings.  The contenders of a stage take turns in one run with a limit
of their own, since all stages of 4 ranks together, at about 1 GB a rank, do not fit 24 GiB.  With --only those named
run together.  Before that an ordinary loop on one rank trains the whole batch in fp32, and all contenders must have its
losses.  Memory is that of the rank that takes most: peak RSS counts a page that n ranks share in each of them, PSS
counts it as 1/n in each; data is PSS without the libraries' files.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from alternate import Contender, StepMaker, alternate
from peers import NotInstalled, deepspeed, deepspeed_environment, deepspeed_python, fsdp2, zero_redundancy
from shardwise.launch.local import ALLOCATOR
from task import Task, ours, plain

LIMIT = "limit"
Stages = Mapping[str, tuple[str, ...]]
"""The contenders of shardwise, and the peers of each."""
ToReach = Mapping[tuple[str, tuple[str, ...]], tuple[float | None, float | None]]
"""For a contender of shardwise and some peers, how many times as fast as the fastest peer it has to be, and which part
of that peer's memory it may take."""
STAGES: Stages = {
    "zero 1": ("ZeroRedundancyOptimizer", "DeepSpeed 1"),
    "zero 2": ("FSDP2 keep", "DeepSpeed 2"),
    "zero 3": ("FSDP2 reshard", "DeepSpeed 3"),
}
"""The peers of a stage shard the same things."""
TO_REACH: ToReach = {("zero 1", STAGES["zero 1"]): (1.05, None), ("zero 3", ("FSDP2 reshard",)): (1.35, 0.8)}
SAME = {"fp32": 1e-5, "bf16": 5e-3}
"""The largest relative difference of the losses of the first steps from the reference's."""
CHECKED = 6  # steps whose losses are compared
STEPS, WARMUP = 3, 3  # steps of a turn, and before all turns


def contenders(task: Task, ranks: int, names: Sequence[str], venv: Path) -> list[Contender]:
    """Make the contenders called ``names``, and the limit."""
    makers: dict[str, StepMaker] = {
        LIMIT: functools.partial(plain, task=task),
        **{f"zero {stage}": functools.partial(ours, task=task, zero=stage) for stage in (1, 2, 3)},
        "FSDP2 reshard": functools.partial(fsdp2, task=task, reshard=True),
        "FSDP2 keep": functools.partial(fsdp2, task=task, reshard=False),
        "ZeroRedundancyOptimizer": functools.partial(zero_redundancy, task=task),
        **{f"DeepSpeed {stage}": functools.partial(deepspeed, task=task, stage=stage) for stage in (1, 2, 3)},
    }
    every = []
    for name in (LIMIT, *names):
        one = Contender(name, makers[name], ranks, connected=name != LIMIT, environment=dict(ALLOCATOR))
        if name.startswith("DeepSpeed"):
            one.python = str(venv / "bin" / "python")
            one.environment |= deepspeed_environment(venv)
        every.append(one)
    return every


def reference(task: Task, ranks: int) -> list[float]:
    """Return the losses of an ordinary loop in fp32 on one rank with the rows of all ranks, for the checked steps."""
    make = functools.partial(plain, task=replace(task, precision="fp32"), rows_of=ranks)
    one = Contender("reference", make, 1, environment=ALLOCATOR)
    alternate([one], rounds=0, steps=0, warmup=CHECKED)
    return one.losses


def off(one: Contender, expected: Sequence[float]) -> float:
    """Return the largest relative difference of a contender's losses from the expected; inf where one is not finite."""
    differences = torch.tensor(one.losses[: len(expected)]) / torch.tensor(expected[: len(one.losses)]) - 1
    return float(differences.abs().nan_to_num(nan=torch.inf).max())


def figures(one: Contender, task: Task, expected: Sequence[float]) -> dict[str, Any]:
    """Return a contender's figures, for a row of a table and of the JSON file."""
    return {
        "name": one.name,
        "precision": task.precision,
        "ranks": one.ranks,
        "rows": task.rows,
        "seconds": one.median,
        "tokens_per_second": task.tokens * one.ranks / one.median,
        "clean_steps": len(one.clean),
        "steps": len(one.seconds),
        **{kind: one.most(kind) for kind in one.memory[0]},
        "losses": one.losses,
        "off": off(one, expected),
        "off_at_most": SAME[task.precision],
    }


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each contender."""
    first = rows[0]
    title = f"{first['precision']}, {first['ranks']} ranks, {first['rows']} rows each"
    print(f"\n{title:27} ms/step  tokens/s  of limit  peak RSS   PSS  data MB  loss of step {CHECKED}  off by  clean")
    for row in rows:
        at = min(CHECKED, len(row["losses"])) - 1
        print(
            f"{row['name']:27} {row['seconds'] * 1e3:7.1f}  {row['tokens_per_second']:8.0f}"
            f"  {first['seconds'] / row['seconds']:8.3f}"
            f"  {row['peak_rss'] / 1e6:8.0f} {row['pss'] / 1e6:5.0f}  {row['data'] / 1e6:7.0f}  "
            f"{row['losses'][at]:14.4f}"
            f"  {row['off']:.0e}  {row['clean_steps']}/{row['steps']}"
        )


def verdicts(
    rows: Sequence[dict[str, Any]], stages: Stages = STAGES, to_reach: ToReach = TO_REACH
) -> Iterator[dict[str, Any]]:
    """Compare each stage with each of its peers, and with the fastest peer it has to reach, where both have run."""
    by = {row["name"]: row for row in rows}
    for stage, peers in stages.items():
        for rivals in dict.fromkeys([*((peer,) for peer in peers), peers]):
            if (
                stage not in by
                or not all(peer in by for peer in rivals)
                or (len(rivals) > 1 and (stage, rivals) not in to_reach)
            ):
                continue
            mine, peer = by[stage], min((by[name] for name in rivals), key=lambda row: row["seconds"])
            faster, smaller = to_reach.get((stage, rivals), (None, None))
            yield {
                "name": stage,
                "against": ("best of " if len(rivals) > 1 else "") + " and ".join(rivals),
                "faster": peer["seconds"] / mine["seconds"],
                "faster_to_reach": faster,
                **{kind: mine[kind] / peer[kind] for kind in ("data", "pss", "peak_rss")},
                "memory_to_reach": smaller,
            }


def tell(verdict: dict[str, Any]) -> None:
    reach = {
        key: f" (to reach: {verdict[key]})" if verdict[key] else "" for key in ("faster_to_reach", "memory_to_reach")
    }
    print(
        f"{verdict['name']} / {verdict['against']:45} {verdict['faster']:.2f}{reach['faster_to_reach']} "
        f"at {verdict['data']:.2f} of its memory{reach['memory_to_reach']}; "
        f"with libraries {verdict['pss']:.2f}, peak RSS {verdict['peak_rss']:.2f}"
    )


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each contender whose losses are not the reference's; the limit is not checked, since its ranks
    never communicate."""
    return [
        f"{row['name']}, {row['precision']}, {row['ranks']} ranks: losses {row['losses'][:CHECKED]} are off by "
        f"{row['off']:.1e}, "
        f"more than {row['off_at_most']:.0e}"
        for row in rows
        if row["name"] != LIMIT and not row["off"] <= row["off_at_most"]
    ]


def finish(rows: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Write all figures to a file, and exit with an error where losses are not the reference's."""
    if file is not None:
        machine = {"torch": torch.__version__, "cores": os.cpu_count(), "load": os.getloadavg()}
        file.write_text(json.dumps({"machine": machine, "rows": rows, "verdicts": said}, indent=1) + "\n")
    if problems := wrong(rows):
        sys.exit("\n".join(problems))


def heats(only: Sequence[str] | None, missing: Sequence[str]) -> list[list[str]]:
    """Return the names of the contenders that run together, without those that are missing."""
    together = [list(only)] if only else [[stage, *peers] for stage, peers in STAGES.items()]
    return [[name for name in heat if name not in missing] for heat in together]


def compare(options: argparse.Namespace, task: Task) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run everything and print all tables; return their rows and the verdicts."""
    missing = []
    if any(name.startswith("DeepSpeed") for heat in heats(options.only, ()) for name in heat):
        try:
            deepspeed_python(options.venv)
        except NotInstalled as error:
            print(f"DeepSpeed is left out, it cannot be installed here: {error}")
            missing = [f"DeepSpeed {stage}" for stage in (1, 2, 3)]
    rows: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    expected = {ranks: reference(task, ranks) for ranks in options.ranks}
    for precision in options.precision:
        for ranks in options.ranks:
            for heat in heats(options.only, missing):
                this = replace(task, precision=precision)
                every = contenders(this, ranks, heat, options.venv)
                found, judged = race(every, this, options.rounds, expected[ranks])
                rows += found
                said += judged
    return rows, said


def race(
    every: Sequence[Contender],
    task: Task,
    rounds: int,
    expected: Sequence[float],
    stages: Stages = STAGES,
    to_reach: ToReach = TO_REACH,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time contenders against each other, the limit first; print and return the table's rows and the verdicts."""
    alternate(every, rounds=rounds, steps=STEPS, warmup=WARMUP)
    found = [figures(one, task, expected) for one in every]
    table(found)
    said = [{"precision": task.precision, "ranks": every[0].ranks, **one} for one in verdicts(found, stages, to_reach)]
    for verdict in said:
        tell(verdict)
    return found, said


def parse() -> tuple[argparse.Namespace, Task]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    names = [name for stage, peers in STAGES.items() for name in (stage, *peers)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise" / "deepspeed"
    parser.add_argument(
        "--venv", type=Path, default=cache, help="folder of DeepSpeed's virtual environment (made if needed)"
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    for field in fields(Task):
        if field.name not in ("precision", "family", "clip_norm"):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=str if field.name == "device" else int)
    options = parser.parse_args()
    options.venv = options.venv.resolve()
    sizes = {field.name: getattr(options, field.name, None) for field in fields(Task) if field.name != "precision"}
    return options, replace(Task(), **{name: size for name, size in sizes.items() if size is not None})


def main() -> None:
    options, task = parse()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    rows, said = compare(options, task)
    finish(rows, said, options.json)


if __name__ == "__main__":
    main()
