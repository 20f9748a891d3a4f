"""Run the acceptance of shardwise on the 2 to 8 cards of one host: a pipeline, ZeRO-3, tensor parallelism, a rank that
is killed, communicators.

On a CPU the ranks communicate over shared memory or gloo.  ``several.sh`` starts this.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from alternate import Contender, Step, alternate
from shardwise.backend import Backend
from shardwise.estimate.devices import Reserve
from task import Task, ours, plain, tensor_parallel
from zero import SAME, off

from . import on_ranks, profiles, report, runs
from .contenders import task_for, turns
from .fast import environment
from .parts import MOST_RANKS, Options, Part, main

CHECKED = 4  # steps whose losses are compared
LIMIT = "ranks that never communicate"
SAME_STEPS, SAME_LOSSES = (
    10,
    1e-4,
)  # the first losses in fp32, and how close (relative) they have to be; later rounding has grown to more


def ranks_of(options: Options) -> int:
    """Return the number of ranks: as asked for, or as many as there are cards, at most eight; on a CPU two."""
    if options.ranks is not None:
        return options.ranks
    return min(MOST_RANKS, Backend.of(options.device).count) if options.gpu else 2


def enough(part: Part, what: str, seconds: float) -> int:
    """Return the number of ranks; 0, and note the reason, where there are too few of them or too little time."""
    ranks = ranks_of(part.options)
    if ranks < 2:
        part.leave_out(what, f"it takes at least 2 cards; there are {ranks}")
        return 0
    return ranks if part.time_for(what, seconds) else 0


# ---- runs ------------------------------------------------------------------------------------------------------------


def pipeline(part: Part) -> None:
    """Compare the default GPT on two stages, whose first step uses every communicator first, with one rank."""
    what = "the default GPT in a pipeline of 2 has the losses of one rank"
    if not enough(part, what, 30.0):
        return
    options = part.options
    with tempfile.TemporaryDirectory() as name, part.guarded(what):
        folder = Path(name)
        sizes = runs.MODEL if options.tiny else ("validation.share=0", "train.trace_steps=[]")
        keys = (
            *sizes,
            runs.text_file(folder),
            "model.dropout=0.1",
            "train.steps=50",
            "train.threads=1",
            "parallel.microbatches=4",
        )
        found = {}
        for title, plan in {
            "one rank": ("parallel.dp=1",),
            "pp = 2": ("parallel.dp=1", "parallel.pp=2", "parallel.schedule=1f1b"),
        }.items():
            devices = 2 if "=" in title else 1
            one = runs.whole(
                folder / title,
                *keys,
                *plan,
                f"train.devices={devices}",
                seconds=min(part.left, 240.0),
                environment=hidden(options),
            )
            found[title] = one
        first = {title: [one[:2] for one in run.curve()[:SAME_STEPS]] for title, run in found.items()}
        apart = runs.apart(first["one rank"], first["pp = 2"])
        speed = {
            title: statistics.median(step["tokens_per_second"] for step in one.metrics()[5:])
            for title, one in found.items()
        }
        part.figures["pipeline"] = {"apart": apart, "tokens_per_second": speed}
        words = f"apart by {apart:.0e}; " + ", ".join(f"{title} {n:,.0f} tokens/s" for title, n in speed.items())
        part.check(what, apart <= SAME_LOSSES, words)


def killed(part: Part) -> None:
    """Kill the last rank of a data-parallel run, which has to go on with the losses of an undisturbed one."""
    what = "a run of which a rank is killed goes on, with the losses of one that is not"
    ranks = enough(part, what, 40.0)
    if not ranks:
        return
    options = part.options
    with tempfile.TemporaryDirectory() as name, part.guarded(what):
        folder = Path(name)
        steps, after = (
            (("train.steps=120", "checkpoint.every=20"), 30)
            if options.tiny
            else (("train.steps=600", "checkpoint.every=50"), 120)
        )
        keys = (
            *runs.MODEL, runs.text_file(folder), *steps, f"data.batch_size={2 * ranks}", f"train.devices={ranks}",
            "train.threads=1",
            f"parallel.dp={ranks}", "parallel.zero=3", "train.deterministic=true",
        )  # fmt: skip
        each: dict[str, Any] = {"environment": hidden(options), "seconds": min(part.left / 2, 200.0)}
        reference = runs.whole(folder / "whole", *keys, **each)
        one, found = runs.killed(folder / "killed", *keys, rank=ranks - 1, after=after, **each)
        found["apart"] = apart = runs.apart(reference.curve(), one.curve())
        part.figures["killed"] = {**found, "ranks": ranks}
        words = f"{ranks} ranks; apart by {apart:.0e}; ready again after {found['restart_seconds']:.1f} s"
        part.check(what, apart == 0.0 and found["named"] and found["went_on"], words)


def hidden(options: Options) -> dict[str, str]:
    """Return the variables that hide cards from a run on the CPU."""
    return {} if options.gpu else {"CUDA_VISIBLE_DEVICES": ""}


# ---- how well communication is hidden --------------------------------------------------------------------------------


def zero(part: Part) -> None:
    """Measure ZeRO-3 over all ranks, beside ranks that never communicate."""
    beside(part, "ZeRO-3", functools.partial(ours, zero=3), functools.partial(on_ranks.recorded, zero=3))


def tensor(part: Part) -> None:
    """Measure 1d-sp over all ranks, each of which has the rows of all."""
    beside(part, "1d-sp", functools.partial(tensor_parallel, tensor="1d-sp"))


def beside(part: Part, name: str, make: Callable[..., Step], recorded: Callable[..., Step] | None = None) -> None:
    """Compare losses with those of an ordinary loop on the rows of all ranks, then measure the speed and the hidden
    share of communication.
    """
    options = part.options
    ranks = enough(part, f"{name} on several ranks", 40.0)
    if not ranks:
        return
    task = replace(task_for(options.device, options.tiny), rows=1)
    task = replace(task, heads=max(task.heads, ranks), kv_heads=max(task.kv_heads or task.heads, ranks))
    parity(part, name, make, ranks, task if options.tiny else replace(task, layers=4, sequence=1024))
    speed(part, name, make, ranks, task)
    overlap(part, name, make, recorded, ranks, task)


def parity(part: Part, name: str, make: Callable[..., Step], ranks: int, task: Task) -> None:
    """Check that it has the losses of one rank."""
    what = f"{name} has the losses of one rank"
    if not part.time_for(what, 25.0):
        return
    with part.guarded(what):
        given = environment(part.options.device)
        reference = Contender("reference", functools.partial(plain, task=task, rows_of=ranks), 1, environment=given)
        alternate([reference], rounds=0, steps=0, warmup=CHECKED)
        one = Contender(name, functools.partial(make, task=task), ranks, environment=given)
        alternate([one], rounds=0, steps=0, warmup=CHECKED)
        apart = off(one, reference.losses)
        part.figures["parity"] = {"ranks": ranks, "losses": one.losses, "reference": reference.losses, "off": apart}
        part.check(what, apart <= SAME["bf16"], f"{CHECKED} steps on {ranks} ranks in bf16 are off by {apart:.0e}")


def speed(part: Part, name: str, make: Callable[..., Step], ranks: int, task: Task) -> None:
    """Measure tokens per second, for ZeRO-3 also those of ranks that never communicate, one after the other."""
    what = f"the speed of {name}"
    options = part.options
    if not part.time_for(what, 20.0 if options.tiny else 120.0):
        return
    settle, steps, rounds = (1, 2, 1) if options.tiny else (2, 6, 3)
    makers = {name: (make, True)} | ({LIMIT: (plain, False)} if name == "ZeRO-3" else {})
    with part.guarded(what):
        every = [
            Contender(
                title,
                functools.partial(turns, make=functools.partial(maker, task=task), task=task, settle=settle,
                steps=steps), ranks,
                connected, environment(options.device),
            )
            for title, (maker, connected) in makers.items()
        ]  # fmt: skip
        for number, one in enumerate(every):
            share = (part.left - 30.0) / (len(every) - number)
            alternate([one], rounds, 1, 1, until=time.monotonic() + share)
        found = {}
        for one in every:
            by_rank = [[seconds for turn in rank for seconds in turn["seconds"]] for rank in one.measured]
            median = statistics.median(max(each) for each in zip(*by_rank, strict=True))
            found[one.name] = {"step_seconds": median, "tokens_per_second": task.tokens * ranks / median}
        part.figures["speed"] = {"ranks": ranks, "contenders": found}
        words = ", ".join(f"{title} {one['tokens_per_second']:,.0f} tokens/s" for title, one in found.items())
        part.check(what, all(one["step_seconds"] > 0 for one in found.values()), words)


def overlap(
    part: Part, name: str, make: Callable[..., Step], recorded: Callable[..., Step] | None, ranks: int, task: Task
) -> None:  # fmt: skip
    """Measure the share of the time of communication in which a rank also computes: by kernels on a card, by
    instructions on a CPU.
    """
    what = f"the share of communication that {name} hides"
    gpu = part.options.gpu
    if not gpu and recorded is None:
        part.leave_out(what, "on a CPU it is inside of instructions, where nothing tells it from computing")
        return
    if not part.time_for(what, 20.0):
        return
    with part.guarded(what):
        profiled = functools.partial(profiles.of_contender, make=functools.partial(make, task=task), task=task)
        maker = profiled if gpu or recorded is None else functools.partial(recorded, task=task)
        one = Contender(name, maker, ranks, environment=environment(part.options.device))
        alternate([one], rounds=1, steps=1, warmup=0)
        found = [rank[-1] for rank in one.measured]
        part.figures["overlap"] = found
        shares = [rank["hidden"] for rank in found if rank["hidden"] is not None]
        words = ", ".join(f"{share:.0%}" for share in shares)
        part.check(what, len(shares) == ranks and all(-1e-9 <= share <= 1 for share in shares), f"{words}, by rank")


# ---- communicators ---------------------------------------------------------------------------------------------------


def communicators(part: Part) -> None:
    """Measure the memory that a communicator takes of each card: make one after the other and ask the driver."""
    what = "memory of a communicator"
    ranks = enough(part, what, 25.0)
    if not ranks:
        return
    with part.guarded(what):
        device = part.options.device
        one = Contender(
            what, functools.partial(on_ranks.one_more, device=device), ranks, environment=environment(device)
        )
        count = 3 if part.options.tiny else 8
        alternate([one], rounds=1, steps=count, warmup=0)
        taken = [[step["bytes"] for step in rank] for rank in one.measured]
        part.figures["communicators"] = {"ranks": ranks, "bytes": taken}
        later = [n for rank in taken for n in rank[1:]] or [0]
        first = max((rank[0] for rank in taken if rank), default=0)
        words = f"the first {first / 2**20:.0f} MiB, each further one {statistics.median(later) / 2**20:.1f} MiB"
        part.check(what, len(taken) == ranks and all(rank for rank in taken), words)
        if part.options.gpu:
            assumed = Reserve().pair if ranks == 2 else Reserve().group
            most = max(later)
            words = f"assumed {assumed / 2**20:.0f} MiB, at most {most / 2**20:.0f} MiB"
            part.check("a communicator takes no more than `shardwise memory` assumes", most <= assumed, words)


PARTS = {"pipeline": pipeline, "zero": zero, "tensor": tensor, "killed": killed, "communicators": communicators}


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", PARTS, report.rewrite, ranks=True))
