"""``shardwise show`` prints the plan, the units of the model with their costs, and the program of a step."""

from __future__ import annotations

import json as jsonlib
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from shardwise.backend import Backend
from shardwise.config import Config, build_optimizer
from shardwise.core.data_options import DATA_PARALLEL_ROWS, DataOptions
from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.pins import starred
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.tensor_options import CONTEXT, EXPERTS, tensor_axes
from shardwise.estimate.traffic import step_traffic
from shardwise.launch.subject import compiled_here, default_ranks_per_host, load_anywhere, subject, with_device_choices
from shardwise.lower.compiled import Compiled
from shardwise.lower.outer import fullest_step
from shardwise.lower.stages import EVERYWHERE, StageSplit
from shardwise.lower.versions import steady_batches
from shardwise.measure.unit_cost import UnitCost, cost
from shardwise.parallel.data import batch_axes
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.tensor import across_hosts, row_parts
from shardwise.report.collectives import Caused, Sum, of_step, of_units, step_tables, unit_table
from shardwise.report.figures import check_format
from shardwise.report.picture import picture as draw
from shardwise.report.tables import count, folded, grid, make_console, pairs, plural, print_json, show, size
from shardwise.units.trace import Trace

OF_NAME = r"(?<=\.)(?!\d)"
"""This matches the places where the name of a parameter or unit may be broken into lines."""


def run(path: Path | None, overrides: Sequence[str], json: bool, picture: Path | None, per_host: int | None) -> None:
    """Capture the model and print what a step of the plan does, or draw it into ``picture``; nothing is trained."""
    if picture is not None:
        check_format(picture, "--picture")
    config = load_anywhere(path, overrides)
    found = subject(config, 1, weights=False)
    per_host = per_host or default_ranks_per_host(found.plan.mesh)
    with config.answering():
        compiled = with_device_choices(config, compiled_here(config, found, per_host))
    trace, plan = compiled.general, compiled.plan
    trace.notes += [note] if (note := across_hosts(plan.mesh, per_host)) is not None else []
    rows = config.rows_together // plan.microbatches if trace.rows is None or trace.cuts_batch else trace.rows
    costs = cost(trace, rows, plan.mesh.axis_size(batch_axes(plan.mesh)), Backend.here().kind)
    batches = steady_batches(plan)
    programs = compiled.programs(trace, plan.microbatches, batches, fullest_step(plan))
    if picture is not None:
        what = "A step" if batches == 1 else f"{batches} batches of a window"
        title = f"{what} of {plural(plan.mesh.size, 'rank')}, {plural(plan.microbatches, 'microbatch')}"
        draw(programs, plan.mesh, title, [one.name for one in costs]).write(picture, "--picture")
        for program in programs:
            print(f"{program.name}: {len(program.instructions)} instructions drawn in {picture}")
        return
    units, step = of_units(trace, plan.mesh, rows, programs), _of_step(config, compiled, trace, programs)
    if json:
        print_json({**_plain(plan, trace, rows, costs, programs, units, step), "links": plan.mesh.links(per_host)})
    else:
        _show(config, plan, trace, rows, costs, programs, compiled.stages_of(trace), per_host, units, step)


def _plain_layout(layout: Layout) -> list[list[dict[str, Any]]]:
    """Return, for each dim, its factors as dicts, the major one first."""
    return [[asdict(factor) for factor in dim] for dim in layout.dims]


def _of_step(config: Config, compiled: Compiled, trace: Trace, programs: Sequence[Program]) -> list[Sum]:
    """Return what the first rank at each place of the pipeline communicates in a step."""
    plan, found = compiled.plan, list[Sum]()
    traces, choice = [trace] * plan.microbatches, build_optimizer(config, compiled.module)
    for place in range(plan.mesh.axis_size(PIPELINE)):
        rank = plan.mesh.rank({PIPELINE: place})
        moments = step_traffic(traces, plan, choice, rows=config.rows_together, rank=rank, programs=programs)
        found += of_step(moments, plan.mesh, rank)
    return found


def _plain(
    plan: Plan, trace: Trace, rows: int, costs: Sequence[UnitCost], programs: Sequence[Program],
    units: Sequence[Caused],
    step: Sequence[Sum],
) -> dict[str, Any]:  # fmt: skip
    axes = tensor_axes(plan.mesh)
    return {
        "plan": plan.to_toml(),
        "parameters": [
            {
                "name": p.name,
                "shape": p.shape,
                "layout": _plain_layout(p.placed),
                "summed": p.summed,
                "bucket": b.index,
                "units": b.units,
                **_rule(plan.data, p.name),
                **({"decided": trace.decided[p.name]} if p.name in trace.decided else {}),
            }
            for b in trace.buckets
            for p in b.parameters
        ],
        "frozen": trace.frozen,
        "units": [{**asdict(one), "backward_flops": one.backward_flops} for one in costs],
        "collectives": [one.plain(plan.mesh) for one in units],
        "collectives_of_step": [asdict(one) for one in step],
        **({"predicted_seconds": trace.predicted().total} if trace.predicted is not None and axes else {}),
        "without_rule": [one._asdict() for one in trace.without_rule(rows)],
        "notes": _notes(plan, trace, rows),
        "programs": [jsonlib.loads(program.to_json()) for program in programs],
    }


def _notes(plan: Plan, trace: Trace, rows: int) -> list[str]:
    apart = trace.notes_of_microbatches(plan.microbatches, plan.mesh.axis_size(PIPELINE) > 1)
    return [*trace.notes, *apart, *trace.notes_without_rule(rows)]


def _show(
    config: Config, plan: Plan, trace: Trace, rows: int, costs: Sequence[UnitCost], programs: Sequence[Program],
    cut: StageSplit,
    per_host: int, units: Sequence[Caused], step: Sequence[Sum],
) -> None:  # fmt: skip
    console = make_console()
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    each = config.rows_together // plan.microbatches
    most = -(-each // (plan.mesh.axis_size(batch_axes(plan.mesh)) * row_parts(plan)))  # the largest of uneven shares
    values = {
        "mesh": mesh, "links": _links(plan.mesh, per_host),
        "rows": f"{config.rows_of_step} a step, {each} a microbatch, {most} a rank",
        "tensor": _tensor(config, plan), "context": plan.tensor.context if plan.mesh.axis_size(CONTEXT) > 1 else None,
        "islands": _islands(plan),
        "microbatches": plan.microbatches, "recompute": plan.memory.recompute,
        "precision": plan.numeric.precision, "schedule": plan.pipeline.schedule,
        "dropout": plan.numeric.dropout, **_predicted(plan.mesh, trace),
    }  # fmt: skip
    show(
        console,
        pairs("plan", values),
        _parameter_table(plan, trace, console.width),
        _unit_table(plan.mesh, trace, costs, cut, console.width),
    )
    show(
        console,
        *_decided_table(trace),
        *unit_table(plan.mesh, units),
        *step_tables(plan, step),
    )
    for note in _notes(plan, trace, rows):
        console.print(Text(f"note: {note}"))
    for operations in sorted({name for one in costs for name in one.unknown}):
        console.print(Text(f"note: costs do not know {operations}"))
    for program in programs:
        text = program.text()  # one instruction per line, also of a file or a pipe; a terminal is as wide as it is
        print(f"\n{_within(text, console.width) if console.is_terminal else text}")


def _within(text: str, width: int) -> str:
    """Return a program whose long lines are broken, and go on below what they read and write."""
    folded = partial(textwrap.wrap, width=width, subsequent_indent=" " * 13, break_on_hyphens=False)
    return "\n".join("\n".join(folded(line)) for line in text.split("\n"))


def _islands(plan: Plan) -> str | None:
    """Return how islands that train apart meet, or None."""
    if not plan.local.steps:
        return None
    parts = f", in {plan.local.fragments} fragments" if plan.local.streams else ""
    return f"meet every {plural(plan.local.steps, 'step')}{parts}; below is a step in which they do"


def _links(mesh: Mesh, per_host: int) -> str | None:
    """Return ``dp across, tp within hosts of 8 ranks``, or None if there is only one host."""
    if mesh.size <= per_host:
        return None
    words = {"device": "within", "host": "across"}
    return (
        f"{', '.join(f'{axis} {words[link]}' for axis, link in mesh.links(per_host).items())} hosts of {per_host} ranks"
    )


def _rule(options: DataOptions, name: str) -> dict[str, str]:
    rule = options.rule(name)
    return {
        "rest": rule.rest,
        "grad": rule.grad,
        "state": rule.state,
        "kind": DATA_PARALLEL_ROWS[rule.rest, rule.grad, rule.state],
    }


def _parameter_table(plan: Plan, trace: Trace, width: int) -> Any:
    """Make the table of parameters, where those that differ only in the number of their block share a row."""
    found: dict[tuple[str, ...], list[int]] = {}
    alike: dict[str, set[Layout]] = {}
    for p in trace.parameters:
        alike.setdefault(starred(p.name), set()).add(p.placed)
    for bucket in trace.buckets:
        for p in bucket.parameters:
            one = starred(p.name)
            name = one if len(alike[one]) == 1 else starred(p.name, count=1)  # parts of a block may have numbers too
            shape = str(p.placed)[1:-1].replace(", ", "x")
            key = (name, shape, "{rest} {grad} {state} ({kind})".format(**_rule(plan.data, p.name)))
            found.setdefault(key, []).append(bucket.index)
    room = width - 38  # the columns that the other columns leave for names and shapes
    longest = max((len(shape) for _, shape, _ in found), default=0)
    if (names := max((len(name) for name, _, _ in found), default=0)) + longest > room:
        longest = max(room - names, max(len(dim) for _, shape, _ in found for dim in shape.split("x")) + 1)
    rows = [
        (folded(name, OF_NAME, room - longest), folded(shape, "(?<=x)", longest), len(buckets), _ranges(buckets), rule)
        for (name, shape, rule), buckets in found.items()
    ]
    columns = ("parameter", "shape", ">count", ">bucket", "rest grad state")
    pieces = ", :axis over axis" if tensor_axes(plan.mesh) else ""
    return grid(f"parameters (R replicated, P partial sum, S sharded over dp{pieces})", columns, rows)


def _tensor(config: Config, plan: Plan) -> str | None:
    """Return what chose the tensor plan, such as ``1d``; without tensor parallelism, return notices about it."""
    if not tensor_axes(plan.mesh):
        return "; ".join(notice for notice in config.notices if "parallel.tensor" in notice) or None
    if set(tensor_axes(plan.mesh)) <= {CONTEXT, EXPERTS}:
        return None
    return plan.tensor.chosen_by


def _predicted(mesh: Mesh, trace: Trace) -> dict[str, str]:
    """Return the time that a solver of tensor plans would minimise, whatever made this plan."""
    axes = tensor_axes(mesh)
    if trace.predicted is None or not axes:
        return {}
    found = trace.predicted()
    total, computing, communicating = (f"{1e3 * x:.3g} ms" for x in (found.total, found.computing, found.communicating))
    return {"predicted": f"{total} a microbatch: computing {computing}, over {', '.join(axes)} {communicating}"}


def _decided_table(trace: Trace) -> list[Any]:
    """Make the table of the pins or ops that decided how parameters are sharded; there is none for a recipe."""
    rows = dict.fromkeys((starred(name), axis, why) for name, by in trace.decided.items() for axis, why in by.items())
    if not rows:
        return []
    several = len({axis for _, axis, _ in rows}) > 1
    columns = ("parameter", *(("over",) if several else ()), "sharded, or not, by")
    return [grid("what decided", columns, [(name, *([axis] if several else []), why) for name, axis, why in rows])]


def _ranges(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _unit_table(mesh: Mesh, trace: Trace, costs: Sequence[UnitCost], cut: StageSplit, width: int) -> Any:
    """Make the table of units; a parameter that several units read counts in the row of each, but once in the total."""
    stage = ["all" if s == EVERYWHERE else f"{s}" for s in cut.stage]
    pipe = cut.stages > 1
    name = max(8, width - (71 if pipe else 72))  # what the other columns leave
    columns = (
        *(("stage",) if pipe else ()),
        "unit",
        "name",
        ">params" if pipe else ">parameters",
        ">forward FLOPs",
        ">backward",
        ">saved",
        ">outputs",
    )
    rows = [
        (
            *((stage[one.index],) if pipe else ()), f"u{one.index}", folded(one.name, OF_NAME, name),
            count(one.parameters), count(one.forward_flops), count(one.backward_flops),
            size(one.saved_bytes), size(one.output_bytes),
        )
        for one in costs
    ]  # fmt: skip
    totals = (
        *(("",) if pipe else ()), "", "total",
        count(sum(math.prod(p.local_shape(mesh, mesh.size - 1)) for p in trace.parameters)),
        count(sum(one.forward_flops for one in costs)),
        count(sum(one.backward_flops for one in costs)), size(sum(one.saved_bytes for one in costs)), "",
    )  # fmt: skip
    return grid("units (of one microbatch on one rank)", columns, rows, totals=totals)
