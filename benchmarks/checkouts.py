"""Time two checkouts of shardwise against each other in one alternating run, to see whether a change is slower.

    git worktree add /tmp/before REVISION
    python benchmarks/checkouts.py /tmp/before . [--rounds 8] [--only "2 ranks" …] [--json FILE]

The task is that of ``zero.py``: a GPT of 512 × 8 layers, 2 rows a rank.  A ratio is the seconds of the first checkout
over those of the second, so above 1 the second is faster; both are medians over clean steps.  It also times what a user
waits for before the first step: ``from shardwise import Trainer``, and a whole process of Python with the first step of
one rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alternate import Contender, Step, alternate

if TYPE_CHECKING:
    from task import Task

STEPS, WARMUP = 3, 3  # steps of a turn, and before all turns
STARTS = {
    "import": "from shardwise import Trainer",
    "first step": "from checkouts import first_step; first_step()",
}


CASES: dict[str, tuple[int, str, Literal["fp32", "bf16"], dict[str, Any]]] = {
    "1 rank": (1, "ours", "fp32", {}),
    "2 ranks": (2, "ours", "fp32", {}),
    "2 ranks, bf16": (2, "ours", "bf16", {}),
    "zero 3, 2 ranks": (2, "ours", "fp32", {"zero": 3}),
    "1d-sp, 2 ranks": (2, "tensor_parallel", "fp32", {"tensor": "1d-sp"}),
    "1f1b, 2 ranks": (2, "pipeline", "fp32", {}),
}
"""What is timed, by name: the number of ranks, the maker of their step here or in ``task.py``, the precision of the
task, and what else the maker is given."""


def step_of(rank: int, ranks: int, *, checkout: Path, case: str) -> Step:
    """Make the step of a case with the checkout's own ``task.py``, which calls things as the package there does."""
    sys.path.insert(0, str(checkout / "benchmarks"))
    import task

    _, maker, precision, options = CASES[case]
    make: Callable[..., Step] = pipeline if maker == "pipeline" else getattr(task, maker)
    return make(rank, ranks, task=task.Task(precision), **options)


def pipeline(rank: int, ranks: int, *, task: Task) -> Step:
    """Make the step of a pipeline under 1F1B with four microbatches."""
    from shardwise.config import build_plan, load_config
    from shardwise.runtime.connect import connect
    from task import undivided

    keys = {"pp": ranks, "microbatches": 4, "schedule": "1f1b", "dp": 1, "precision": task.precision}
    plan = build_plan(load_config(overrides=[f"parallel.{key}={value}" for key, value in keys.items()]))
    trainer, given = undivided(task, plan, ranks, comm=connect(plan.mesh, task.place, backend="auto"))
    return lambda: trainer.step(given).loss


def first_step() -> None:
    """Run one step of a small model on one rank."""
    from task import Task, ours

    ours(0, 1, task=Task(vocabulary=512, width=64, layers=2, heads=2, sequence=32))()


def environment(checkout: Path) -> dict[str, str]:
    """Return the variables that make a process import this checkout's package and benchmarks; what these lack comes
    from this folder."""
    from shardwise.launch.local import ALLOCATOR

    folders = (checkout / "src", checkout / "benchmarks", Path(__file__).parent)
    return {**ALLOCATOR, "PYTHONPATH": os.pathsep.join(str(each.resolve()) for each in folders)}


def steps(name: str, checkouts: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Time a step of each checkout; return the median seconds and their ratio."""
    from checkouts import step_of  # by the name of this module, under which ranks find it

    both = [
        Contender(
            f"{name}: {one}", functools.partial(step_of, checkout=one.resolve(), case=name), CASES[name][0],
            environment=environment(one),
        )
        for one in checkouts
    ]  # fmt: skip
    alternate(both, rounds=rounds, steps=STEPS, warmup=WARMUP)
    return figures(name, [one.median for one in both], f"{len(both[0].clean)} and {len(both[1].clean)} clean steps")


def starts(name: str, checkouts: Sequence[Path], rounds: int) -> dict[str, Any]:
    """Time a new process for one of :data:`STARTS` in each checkout; return the median seconds and their ratio."""
    taken: list[list[float]] = [[] for _ in checkouts]
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    for _ in range(rounds + 1):
        for own, checkout in zip(taken, checkouts, strict=True):
            begun = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", STARTS[name]],
                env={**os.environ, **environment(checkout), **single}, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            own.append(time.perf_counter() - begun)
    return figures(
        name, [statistics.median(own[1:]) for own in taken], f"{rounds} starts of each"
    )  # the first start fills caches and does not count


def figures(name: str, seconds: Sequence[float], of: str) -> dict[str, Any]:
    row = {"case": name, "before": seconds[0], "after": seconds[1], "ratio": seconds[0] / seconds[1], "of": of}
    print(f"{name:18} {seconds[0] * 1e3:8.1f} ms {seconds[1] * 1e3:8.1f} ms   {row['ratio']:.3f}   {of}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2, metavar="CHECKOUT", help="the one before, and the one after")
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of {STEPS} steps each")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *STARTS], default=[*CASES, *STARTS], metavar="CASE")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    for one in options.checkouts:
        if not (one / "src" / "shardwise").is_dir():
            parser.error(f"{one} is no checkout of shardwise: it has no src/shardwise")
    print(f"{'case':18} {'before':>11} {'after':>11}   ratio")
    rows = [steps(n, options.checkouts, options.rounds) for n in options.only if n in CASES]
    rows += [starts(n, options.checkouts, options.rounds) for n in options.only if n in STARTS]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
