"""The part "fast": shardwise on a Llama of 1.1 B parameters at sequence 4096 in bf16, beside an ordinary loop, that
loop compiled, and FSDP2 at world size 1.

Each contender is a process of its own.  They take turns on the card if the model states of all fit beside the
activations of one, and otherwise run one after the other.  Then shardwise and the ordinary loop are profiled.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from alternate import Contender, ContenderFailed, StepMaker, alternate
from peers import fsdp2
from shardwise.backend import Backend
from shardwise.launch.local import ALLOCATOR
from task import Task, ours, plain
from zero import SAME, off

from . import profiles
from .contenders import compiled, task_for, turns
from .parts import Part, in_child

OURS, PLAIN, COMPILED, FSDP2 = "shardwise", "ordinary loop", "torch.compile of it", "FSDP2, world size 1"
NAMES = (PLAIN, COMPILED, FSDP2, OURS)
ROWS = (8, 4, 2, 1)
MARGIN = 0.85  # the share of the free memory that a choice of rows may count on
FOR_PROFILES = 100.0  # seconds that are kept for the profiles


def makers(task: Task, tiny: bool) -> dict[str, StepMaker]:
    """Return the makers of the steps of all contenders."""
    return {
        PLAIN: functools.partial(plain, task=task),
        COMPILED: functools.partial(compiled, task=task, tiny=tiny),
        FSDP2: functools.partial(fsdp2, task=task, reshard=False),
        OURS: functools.partial(ours, task=task),
    }


def environment(device: str) -> dict[str, str]:
    """Return every contender's variables: the settings of allocators and queues with which shardwise starts ranks."""
    found = {**ALLOCATOR, **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})}
    Backend.of(device).prepare(found)
    return {name: os.environ.get(name, value) for name, value in found.items()}


def fast(part: Part) -> None:
    """Time all contenders, check that they have the same losses, and profile two."""
    options = part.options
    task = task_for(options.device, options.tiny)
    with part.guarded("the size of the benchmark"):
        facts = in_child("gpu.fast:facts", 180.0, {}, device=options.device, tiny=options.tiny)
        part.figures["facts"] = facts
        part.say(
            f"{facts['parameters'] / 1e9:.3g} B parameters; {facts['rows']} rows, "
            f"{'in turns' if facts['together'] else 'one after the other'}"
        )
        task = replace(task, rows=facts["rows"])
        part.figures["rows"] = race(part, task, facts)
    reserve = 20.0 if options.tiny else 45.0
    for name in (OURS, PLAIN):
        if part.time_for(f"the profile of {name}", reserve):
            with part.guarded(f"the profile of {name}"):
                part.figures.setdefault("profiles", {})[name] = found = profiled(part, name, task)
                part.check(
                    f"a profile of {name}",
                    found["kernels"] > 0,
                    f"idle {found['idle']:.1%}, {found['kernels']:.0f} kernels a step",
                )


def facts(device: str, tiny: bool) -> dict[str, Any]:
    """Return the number of parameters, the FLOPs of a row, the card's peak FLOP/s, the rows with which all contenders
    fit, and whether that is with all on the card together.
    """
    from shardwise import OptimizerChoice, Plan, Values, record
    from shardwise.estimate.predict import predict
    from shardwise.launch.mfu import model_flops, peak_flops
    from shardwise.lower.compiled import Compiled

    task = task_for(device, tiny)
    backend = Backend.of(device)
    values = Values.of_recorded(record(task.model), 0)
    example = {name: tensor.cpu() for name, tensor in replace(task, device="cpu").batch([0]).items()}
    made = Compiled(values.structure(), Plan.of(precision=task.precision), example, kind=backend.kind)
    parameters = sum(p.numel() for p in made.module.parameters())
    free = backend.free_and_total(backend.device())[0] if backend.asynchronous else None
    rows, together = task.rows, True
    if free is not None and not tiny:
        choice = OptimizerChoice("adamw", lr=1e-4)
        peaks = {
            n: predict(lambda size: made.trace((), size), made.plan, choice, rows=n, device=backend.kind) for n in ROWS
        }
        rows, together = choose_rows({n: (sum(p.states.values()), p.peak_bytes) for n, p in peaks.items()}, free)
    peak = peak_flops(backend.device(), task.precision)
    return {
        "parameters": parameters, "flops_per_row": model_flops(made.general, 1), "peak_flops": peak, "rows": rows,
        "together": together,
        "sequence": task.sequence, "precision": task.precision, "free_bytes": free,
    }  # fmt: skip


def choose_rows(predicted: dict[int, tuple[int, int]], free: int) -> tuple[int, bool]:
    """Choose the rows of a step, and whether all contenders are on the card at once; ``predicted`` is (states, peak) in
    bytes, by rows; ``free`` is in bytes.

    An ordinary loop under autocast keeps up to 1.4 times the activations.  To take turns is worth having fewer rows,
    but not fewer than two."""
    for together, least in ((True, 2), (False, 1), (True, 1)):
        for rows, (states, peak) in predicted.items():
            held = states * (len(NAMES) if together else 1)
            if rows >= least and held + 1.4 * (peak - states) <= MARGIN * free:
                return rows, together
    return 1, False


def race(part: Part, task: Task, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Time the contenders and return the rows of the table; those that fail are named, and the others run again."""
    options = part.options
    settle, steps, rounds = (1, 2, 2) if options.tiny else (2, 6, 8)
    every = [
        Contender(
            name,
            functools.partial(turns, make=make, task=task, settle=settle, steps=steps),
            1,
            environment=environment(task.device),
        )
        for name, make in makers(task, options.tiny).items()
    ]
    until = time.monotonic() + part.left - (5.0 if options.tiny else FOR_PROFILES)
    groups = [every] if facts["together"] else [[one] for one in every]
    done: list[Contender] = []
    for number, group in enumerate(groups, 1):
        end = time.monotonic() + (until - time.monotonic()) / (len(groups) - number + 1)
        done += _finished(part, group, rounds, end)
    found = [row(one, task, facts, rounds) for one in done]
    _judge(part, found, facts)
    return found


def _finished(part: Part, group: Sequence[Contender], rounds: int, until: float) -> list[Contender]:
    """Run a group and return the contenders that ran to the end."""
    running = list(group)
    while running:
        try:
            part.say(f"starting {', '.join(one.name for one in running)}")
            for one in running:
                one.seconds, one.clean, one.losses, one.clean_at = [], [], [], []
            alternate(running, rounds=rounds, steps=1, warmup=1, until=until)
            return running
        except ContenderFailed as error:
            text = str(error)
            part.check(f"{error.contender} runs", False, " | ".join(text.splitlines()[:1] + text.splitlines()[-2:]))
            running = [one for one in running if one.name != error.contender]
    return running


def row(one: Contender, task: Task, facts: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return a contender's figures for the JSON file: medians over the steps of clean turns."""
    from shardwise.launch.mfu import mfu

    kept = one.measured[0]
    seconds = [step for turn in kept for step in turn["seconds"]]
    median, peak = statistics.median(seconds), facts["peak_flops"]
    flops = facts["flops_per_row"] * task.rows
    return {
        "name": one.name, "rows": task.rows, "step_seconds": median, "fastest": min(seconds), "slowest": max(seconds),
        "tokens_per_second": task.tokens / median, "clean_steps": len(seconds), "turns": len(one.seconds),
        "turns_to_run": rounds,
        "mfu": None if peak is None else mfu(flops, median, 1, peak), "teraflops": flops / median / 1e12,
        "peak_gib": kept[-1]["peak"] / 2**30 if "peak" in kept[-1] else None, "losses": one.losses,
    }  # fmt: skip


def _judge(part: Part, found: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    by = {one["name"]: one for one in found}
    reference = by.get(PLAIN)
    for one in found:
        share = "" if one["mfu"] is None else f", {one['mfu']:.1%} MFU"
        detail = f"{one['tokens_per_second']:,.0f} tokens/s{share}, {one['clean_steps']} clean steps"
        if reference is None:
            part.check(f"{one['name']} trains", bool(torch.isfinite(torch.tensor(one["losses"])).all()), detail)
            continue
        one["off"] = off(Contender(one["name"], plain, losses=one["losses"][:1]), reference["losses"][:1])
        part.check(
            f"{one['name']} has the losses of the ordinary loop",
            one["off"] <= SAME["bf16"],
            f"off by {one['off']:.0e}; {detail}",
        )
    if OURS in by and COMPILED in by:
        part.say(
            f"shardwise is at {by[OURS]['tokens_per_second'] / by[COMPILED]['tokens_per_second']:.3f} of the compiled "
            "loop"
        )


def profiled(part: Part, name: str, task: Task) -> dict[str, Any]:
    """Profile one contender alone on the card."""
    make = functools.partial(profiles.of_contender, make=makers(task, part.options.tiny)[name], task=task)
    one = Contender(name, make, 1, environment=environment(task.device))
    alternate([one], rounds=1, steps=1, warmup=0)
    found: dict[str, Any] = one.measured[0][-1]
    return found
