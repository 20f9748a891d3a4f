"""``shardwise show``: the plan, the units of the model with their costs, and the program of a step."""

from __future__ import annotations

import json as jsonlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Config
from shardwise.core.layout import Layout
from shardwise.core.plan import DATA_PARALLEL_ROWS, Plan
from shardwise.core.program import Program
from shardwise.launch.subject import load_anywhere, settled, subject
from shardwise.lower.stages import EVERYWHERE, Cut
from shardwise.lower.versions import steady
from shardwise.parallel.data import batch_axes
from shardwise.parallel.tensor import tensor_axes
from shardwise.report.picture import picture as draw
from shardwise.report.plot import check_format
from shardwise.report.tables import count, grid, make_console, pairs, print_json, show, size
from shardwise.runtime.compiled import Compiled
from shardwise.trace.collectives import Collective, collectives
from shardwise.trace.cost import UnitCost, cost
from shardwise.trace.ops import ROWS, Env
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
        print_json(_plain(plan, trace, rows, costs, programs))
    else:
        _show(config, plan, trace, rows, costs, programs, compiled.cut(trace))


def _env(plan: Plan, rows: int) -> Env:
    """The last rank's, of a microbatch of so many rows: the one whose costs are shown."""
    mesh, last = plan.mesh, plan.mesh.size - 1
    tensor = {axis: (mesh.axis_size(axis), mesh.index(last, axis)) for axis in tensor_axes(plan)}
    return Env(parts=mesh.axis_size(batch_axes(plan)), index=mesh.index(last, batch_axes(plan)), rows=rows, tensor=tensor)


def _real(plan: Plan, axes: Sequence[str]) -> list[str]:
    """The axes of the mesh that these stand for, those of one rank left out."""
    found = [real for axis in axes for real in (batch_axes(plan) if axis == ROWS else (axis,))]
    return [axis for axis in found if plan.mesh.axis_size(axis) > 1]


def _plain_layout(layout: Layout) -> list[list[dict[str, Any]]]:
    """Of each dim the factors, major first."""
    return [[asdict(factor) for factor in dim] for dim in layout.dims]


def _plain(plan: Plan, trace: Trace, rows: int, costs: Sequence[UnitCost], programs: Sequence[Program]) -> dict[str, Any]:
    return {
        "plan": plan.to_toml(),
        "parameters": [
            {
                "name": p.name,
                "shape": p.shape,
                "layout": _plain_layout(p.placed),
                "bucket": b.index,
                "units": b.units,
                **_rule(plan, p.name),
            }
            for b in trace.buckets
            for p in b.parameters
        ],
        "frozen": trace.frozen,
        "units": [{**asdict(one), "backward_flops": one.backward_flops} for one in costs],
        "collectives": [
            {
                "unit": unit.index,
                **one.note._asdict(),
                "axes": _real(plan, one.note.axes),
                "bytes": one.size,
                "count": one.count,
                "sent_bytes": one.sent,
            }
            for unit in trace.units
            for one in collectives(unit, _env(plan, rows))
        ],
        "notes": [*trace.notes, *trace.everywhere],
        "programs": [jsonlib.loads(program.to_json()) for program in programs],
    }


def _show(
    config: Config, plan: Plan, trace: Trace, rows: int, costs: Sequence[UnitCost], programs: Sequence[Program], cut: Cut
) -> None:
    console = make_console()
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    each = f"{config.data.batch_size} a step, {config.data.batch_size // plan.microbatches} a microbatch"
    values = {
        "mesh": mesh, "rows": f"{each}, {config.data.batch_size // plan.microbatches // plan.mesh.axis_size(batch_axes(plan))} a rank",
        "tensor": plan.tensor if tensor_axes(plan) else None, "microbatches": plan.microbatches, "recompute": plan.recompute, "precision": plan.precision, "schedule": plan.schedule,
        "dropout": plan.dropout,
    }  # fmt: skip
    show(console, pairs("plan", values), _parameter_table(plan, trace), _unit_table(plan, trace, costs, cut))
    show(console, *_collective_table(plan, trace, rows))
    for note in [*trace.notes, *trace.everywhere]:
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
            name = _starred(p.name)
            shape = str(p.placed)[1:-1].replace(", ", "x")
            key = (name, shape, "{rest} {grad} {state} ({kind})".format(**_rule(plan, p.name)))
            found.setdefault(key, []).append(bucket.index)
    rows = [(*key[:2], len(buckets), _ranges(buckets), key[2]) for key, buckets in found.items()]
    columns = ("parameter", "shape", ">count", ">bucket", "rest grad state")
    pieces = "".join(f", :{axis} over {axis}" for axis in tensor_axes(plan))
    return grid(f"parameters (R replicated, P partial sum, S sharded over dp{pieces})", columns, rows)


def _ranges(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _collective_table(plan: Plan, trace: Trace, rows: int) -> list[Any]:
    """Units that differ only in the number of their block and communicate the same are one row; no table where none communicates."""
    found: dict[tuple[str, tuple[Collective, ...]], list[int]] = {}
    for unit in trace.units:
        own = tuple(_within(one, unit.name) for one in collectives(unit, _env(plan, rows)))
        if own:
            found.setdefault((_starred(unit.name), own), []).append(unit.index)
    if not found:
        return []
    over = {",".join(_real(plan, one.note.axes)) for _, several in found for one in several}
    cells = []
    for (_, several), units in found.items():
        for i, one in enumerate(several):
            op, note = one.note.cause.removeprefix("aten.").partition(".")[0], one.note
            cause = f"{op} {note.path}".strip() + f" ({one.count})" * (one.count > 1)
            axes = [",".join(_real(plan, note.axes))] * (len(over) > 1)
            cells.append(("" if i else _runs(units), cause, *axes, note.forward, note.backward, size(one.sent)))
    total = sum(one.sent * len(units) for (_, several), units in found.items() for one in several)
    column, where = (("over",), "") if len(over) > 1 else ((), f" over {over.pop()}")
    columns = ("unit", "needed by", *column, "forward", "backward", ">sent")
    title = f"collectives{where} (sent: by a rank, of a microbatch, forward and backward)"
    return [grid(title, columns, cells, totals=("", "all units", *[""] * (len(columns) - 3), size(total)))]


def _within(one: Collective, unit: str) -> Collective:
    """With the path from the unit on."""
    path = one.note.path.removeprefix(unit).removeprefix(".")
    return replace(one, note=one.note._replace(path=path))


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _runs(units: Sequence[int]) -> str:
    """``u1-u3, u5``."""
    starts = [u for u in units if u - 1 not in units]
    stops = [u for u in units if u + 1 not in units]
    return ", ".join(f"u{a}" if a == b else f"u{a}-u{b}" for a, b in zip(starts, stops, strict=True))


def _unit_table(plan: Plan, trace: Trace, costs: Sequence[UnitCost], cut: Cut) -> Any:
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
        *(("",) if pipe else ()), "", "total", count(sum(math.prod(p.local_shape(plan.mesh, plan.mesh.size - 1)) for p in trace.parameters)), count(sum(one.forward_flops for one in costs)),
        count(sum(one.backward_flops for one in costs)), size(sum(one.saved_bytes for one in costs)), "",
    )  # fmt: skip
    return grid("units (of one microbatch on one rank)", columns, rows, totals=totals)
