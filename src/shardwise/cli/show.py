"""``shardwise show``: the plan, the units of the model with their costs, and the program of a step."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Config
from shardwise.core.plan import DATA_PARALLEL_ROWS, Plan
from shardwise.core.program import Program
from shardwise.launch.subject import load_anywhere, settled, subject
from shardwise.lower.stages import EVERYWHERE, Cut
from shardwise.lower.versions import steady
from shardwise.parallel.data import batch_axes
from shardwise.report.picture import picture as draw
from shardwise.report.plot import check_format
from shardwise.report.tables import count, grid, make_console, pairs, print_json, show, size
from shardwise.runtime.compiled import Compiled
from shardwise.trace.cost import UnitCost, cost
from shardwise.trace.trace import Trace


def run(path: Path | None, overrides: Sequence[str], json: bool, picture: Path | None = None) -> None:
    """Capture the model and print what a step of the plan does, or draw it into ``picture``; nothing is trained."""
    if picture is not None:
        check_format(picture, "--picture")
    config = load_anywhere(path, overrides)
    found = subject(config, 1, weights=False)
    compiled = settled(config, Compiled(found.module, found.plan, found.batches[0], found.loss))
    trace, plan = compiled.general, compiled.plan
    rows = trace.rows or config.data.batch_size // plan.microbatches
    costs = cost(trace, rows, plan.mesh.axis_size(batch_axes(plan)), "cuda" if torch.cuda.is_available() else "cpu")
    batches = steady(plan)
    programs = compiled.programs(trace, plan.microbatches, batches)
    if picture is not None:
        what = "A step" if batches == 1 else f"{batches} batches of a window"
        title = f"{what} of {plan.mesh.size} ranks, {plan.microbatches} microbatches"
        draw(programs[0], title).write(picture, "--picture")
        print(f"{programs[0].name}: {len(programs[0].instructions)} instructions drawn in {picture}")
    elif json:
        print_json(_plain(plan, trace, costs, programs))
    else:
        _show(config, plan, trace, costs, programs, compiled.cut(trace))


def _plain(plan: Plan, trace: Trace, costs: Sequence[UnitCost], programs: Sequence[Program]) -> dict[str, Any]:
    return {
        "plan": plan.to_toml(),
        "parameters": [
            {"name": p.name, "shape": p.shape, "bucket": b.index, "units": b.units, **_rule(plan, p.name)}
            for b in trace.buckets
            for p in b.parameters
        ],
        "frozen": trace.frozen,
        "units": [{**asdict(one), "backward_flops": one.backward_flops} for one in costs],
        "notes": trace.notes,
        "programs": [jsonlib.loads(program.to_json()) for program in programs],
    }


def _show(config: Config, plan: Plan, trace: Trace, costs: Sequence[UnitCost], programs: Sequence[Program], cut: Cut) -> None:
    console = make_console()
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    rows = f"{config.data.batch_size} a step, {config.data.batch_size // plan.microbatches} a microbatch"
    values = {
        "mesh": mesh, "rows": f"{rows}, {config.data.batch_size // plan.microbatches // plan.mesh.axis_size(batch_axes(plan))} a rank",
        "microbatches": plan.microbatches, "recompute": plan.recompute, "precision": plan.precision, "schedule": plan.schedule,
        "dropout": plan.dropout,
    }  # fmt: skip
    show(console, pairs("plan", values), _parameter_table(plan, trace), _unit_table(trace, costs, cut))
    for note in trace.notes:
        print(f"note: {note}")
    for operations in sorted({name for one in costs for name in one.unknown}):
        print(f"note: costs do not know {operations}")
    for program in programs:
        print(f"\n{program.text()}")  # one instruction a line, whatever the width


def _rule(plan: Plan, name: str) -> dict[str, str]:
    rule = plan.rule(name)
    return {
        "rest": rule.rest,
        "grad": rule.grad,
        "state": rule.state,
        "kind": DATA_PARALLEL_ROWS[rule.rest, rule.grad, rule.state],
    }


def _parameter_table(plan: Plan, trace: Trace) -> Any:
    """Parameters that differ only in the number of their block are one row."""
    found: dict[tuple[str, ...], list[int]] = {}
    for bucket in trace.buckets:
        for p in bucket.parameters:
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", p.name)
            key = (name, "x".join(map(str, p.shape)), "{rest} {grad} {state} ({kind})".format(**_rule(plan, p.name)))
            found.setdefault(key, []).append(bucket.index)
    rows = [(*key[:2], len(buckets), _ranges(buckets), key[2]) for key, buckets in found.items()]
    columns = ("parameter", "shape", ">count", ">bucket", "rest grad state")
    return grid("parameters (R replicated, P partial sum, S sharded over dp)", columns, rows)


def _ranges(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _unit_table(trace: Trace, costs: Sequence[UnitCost], cut: Cut) -> Any:
    """A parameter that several units read is in the row of each, and once in the sum."""
    stage = ["all" if s == EVERYWHERE else f"{s}" for s in cut.stage]
    pipe = cut.stages > 1
    columns = (*(("stage",) if pipe else ()), "unit", "name", ">parameters", ">forward FLOPs", ">backward", ">saved", ">outputs")
    rows = [
        (
            *((stage[one.index],) if pipe else ()), f"u{one.index}", one.name, count(one.parameters), count(one.forward_flops), count(one.backward_flops),
            size(one.saved_bytes), size(one.output_bytes),
        )
        for one in costs
    ]  # fmt: skip
    totals = (
        *(("",) if pipe else ()), "", "total", count(sum(p.numel for p in trace.parameters)), count(sum(one.forward_flops for one in costs)),
        count(sum(one.backward_flops for one in costs)), size(sum(one.saved_bytes for one in costs)), "",
    )  # fmt: skip
    return grid("units (of one microbatch on one rank)", columns, rows, totals=totals)
