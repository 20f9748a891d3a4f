"""``shardwise show``: the plan, the units of the model with their costs, and the program of a step."""

from __future__ import annotations

import json as jsonlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.config import Config, Hardware, build_optimizer
from shardwise.core.instruction import Op
from shardwise.core.layout import Layout
from shardwise.core.pins import starred
from shardwise.core.plan import DATA_PARALLEL_ROWS, Plan
from shardwise.core.program import Program
from shardwise.estimate.traffic import step_traffic
from shardwise.launch.subject import load_anywhere, settled, subject
from shardwise.lower.stages import EVERYWHERE, Cut
from shardwise.lower.versions import steady
from shardwise.parallel.data import batch_axes
from shardwise.parallel.tensor import across_hosts, row_parts, tensor_axes
from shardwise.report.picture import picture as draw
from shardwise.report.plot import check_format
from shardwise.report.tables import count, folded, grid, make_console, pairs, plural, print_json, show, size
from shardwise.runtime.compiled import Compiled
from shardwise.trace.cost import UnitCost, cost
from shardwise.trace.ops import Env
from shardwise.trace.trace import Trace
from shardwise.trace.traffic import Cause, Traffic, UnitTraffic, by_cause
from shardwise.trace.units import Unit

OF_NAME = r"(?<=\.)(?!\d)"
"""Where a name of a parameter or unit may be broken."""


def run(
    path: Path | None, overrides: Sequence[str], json: bool, picture: Path | None = None, per_host: int | None = None
) -> None:
    """Capture the model and print what a step of the plan does, or draw it into ``picture``; nothing is trained."""
    if picture is not None:
        check_format(picture, "--picture")
    config = load_anywhere(path, overrides)
    found = subject(config, 1, weights=False)
    with config.answering():
        compiled = settled(config, Compiled(found.module, found.plan, found.batches[0], found.loss))
    trace, plan = compiled.general, compiled.plan
    per_host = per_host or Hardware.here().gpus or plan.mesh.size
    trace.notes += [note] if (note := across_hosts(plan, per_host)) is not None else []
    rows = trace.rows or config.data.batch_size // plan.microbatches
    costs = cost(trace, rows, plan.mesh.axis_size(batch_axes(plan)), "cuda" if torch.cuda.is_available() else "cpu")
    batches = steady(plan)
    programs = compiled.programs(trace, plan.microbatches, batches)
    if picture is not None:
        what = "A step" if batches == 1 else f"{batches} batches of a window"
        title = f"{what} of {plural(plan.mesh.size, 'rank')}, {plural(plan.microbatches, 'microbatch')}"
        draw(programs[0], title).write(picture, "--picture")
        print(f"{programs[0].name}: {len(programs[0].instructions)} instructions drawn in {picture}")
    elif json:
        buckets = [
            {
                "of": of,
                "axes": over.split(","),
                "kind": kind,
                "buckets": [b for b, _ in own],
                "sent_bytes": sum(n for _, n in own),
            }
            for (of, over, kind), own in _of_buckets(config, plan, trace, compiled.cut(trace)).items()
        ]
        print_json(
            {**_plain(plan, trace, rows, costs, programs), "collectives_of_buckets": buckets, "links": plan.mesh.links(per_host)}
        )
    else:
        _show(config, plan, trace, rows, costs, programs, compiled.cut(trace), per_host)


def _env(trace: Trace, plan: Plan, rows: int) -> Env:
    """The last rank's, of a microbatch of so many rows: the one whose costs are shown."""
    mesh, last, batch = plan.mesh, plan.mesh.size - 1, batch_axes(plan)
    real = tuple(axis for axis in batch if mesh.axis_size(axis) > 1)
    return Env(None, real, mesh.axis_size(batch), mesh.index(last, batch), rows, tensor=mesh.places(last, tuple(trace.tensor)))


def _communicated(unit: Unit, trace: Trace, plan: Plan, rows: int) -> list[tuple[Cause, UnitTraffic]]:
    """What a unit communicates, and why."""
    found = [] if unit.graph is None else by_cause(unit.graph, _env(trace, plan, rows), unit.output_grads)
    return [(cause, one) for cause, one in found if one != UnitTraffic()]


def _sent(plan: Plan, one: UnitTraffic) -> float:
    """Bytes that a rank sends by rings."""
    return sum(t.ring(plan.mesh.axis_size(t.axes)) for t in (*one.forward, *one.backward))


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
                "summed": p.summed,
                "bucket": b.index,
                "units": b.units,
                **_rule(plan, p.name),
                **({"decided": trace.decided[p.name]} if p.name in trace.decided else {}),
            }
            for b in trace.buckets
            for p in b.parameters
        ],
        "frozen": trace.frozen,
        "units": [{**asdict(one), "backward_flops": one.backward_flops} for one in costs],
        "collectives": [
            {
                "unit": unit.index,
                **cause._asdict(),
                **{way: [t._asdict() for t in getattr(one, way)] for way in ("forward", "backward")},
                "sent_bytes": _sent(plan, one),
            }
            for unit in trace.units
            for cause, one in _communicated(unit, trace, plan, rows)
        ],
        **({"predicted_seconds": trace.predicted().total} if trace.predicted is not None and tensor_axes(plan) else {}),
        "notes": [*trace.notes, *trace.everywhere(rows)],
        "programs": [jsonlib.loads(program.to_json()) for program in programs],
    }


def _show(
    config: Config, plan: Plan, trace: Trace, rows: int, costs: Sequence[UnitCost], programs: Sequence[Program], cut: Cut,
    per_host: int,
) -> None:  # fmt: skip
    console = make_console()
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    each = config.data.batch_size // plan.microbatches
    most = -(-each // (plan.mesh.axis_size(batch_axes(plan)) * row_parts(plan)))  # of uneven shares
    values = {
        "mesh": mesh, "links": _links(plan, per_host), "rows": f"{config.data.batch_size} a step, {each} a microbatch, {most} a rank",
        "tensor": _tensor(config, plan), "microbatches": plan.microbatches, "recompute": plan.recompute, "precision": plan.precision, "schedule": plan.schedule,
        "dropout": plan.dropout, **_predicted(plan, trace),
    }  # fmt: skip
    show(
        console,
        pairs("plan", values),
        _parameter_table(plan, trace, console.width),
        _unit_table(plan, trace, costs, cut, console.width),
    )
    show(
        console,
        *_decided_table(trace),
        *_collective_table(plan, trace, rows),
        *_bucket_table(plan, _of_buckets(config, plan, trace, cut)),
    )
    for note in [*trace.notes, *trace.everywhere(rows)]:
        print(f"note: {note}")
    for operations in sorted({name for one in costs for name in one.unknown}):
        print(f"note: costs do not know {operations}")
    for program in programs:
        print(f"\n{program.text()}")  # one instruction a line, whatever the width


def _links(plan: Plan, per_host: int) -> str | None:
    """``dp across hosts, tp within``; None where there is but one host."""
    if plan.mesh.size <= per_host:
        return None
    words = {"device": "within", "host": "across"}
    return f"{', '.join(f'{axis} {words[link]}' for axis, link in plan.mesh.links(per_host).items())} hosts of {per_host} ranks"


def _rule(plan: Plan, name: str) -> dict[str, str]:
    rule = plan.rule(name)
    return {
        "rest": rule.rest,
        "grad": rule.grad,
        "state": rule.state,
        "kind": DATA_PARALLEL_ROWS[rule.rest, rule.grad, rule.state],
    }


def _parameter_table(plan: Plan, trace: Trace, width: int) -> Any:
    """Parameters that differ only in the number of their block are one row."""
    found: dict[tuple[str, ...], list[int]] = {}
    alike: dict[str, set[Layout]] = {}
    for p in trace.parameters:
        alike.setdefault(starred(p.name), set()).add(p.placed)
    for bucket in trace.buckets:
        for p in bucket.parameters:
            one = starred(p.name)
            name = one if len(alike[one]) == 1 else starred(p.name, count=1)  # blocks' own parts have numbers too
            shape = str(p.placed)[1:-1].replace(", ", "x")
            key = (name, shape, "{rest} {grad} {state} ({kind})".format(**_rule(plan, p.name)))
            found.setdefault(key, []).append(bucket.index)
    room = width - 38  # for names and shapes, beside the other columns
    longest = max((len(shape) for _, shape, _ in found), default=0)
    if (names := max((len(name) for name, _, _ in found), default=0)) + longest > room:
        longest = max(room - names, max(len(dim) for _, shape, _ in found for dim in shape.split("x")) + 1)
    rows = [
        (folded(name, OF_NAME, room - longest), folded(shape, "(?<=x)", longest), len(buckets), _ranges(buckets), rule)
        for (name, shape, rule), buckets in found.items()
    ]
    columns = ("parameter", "shape", ">count", ">bucket", "rest grad state")
    pieces = ", :axis over axis" if tensor_axes(plan) else ""
    return grid(f"parameters (R replicated, P partial sum, S sharded over dp{pieces})", columns, rows)


def _tensor(config: Config, plan: Plan) -> str | None:
    """``1d``, or ``propagate`` where pins say what is sharded; where nothing is, what was asked for in vain."""
    if not tensor_axes(plan):
        return "; ".join(notice for notice in config.notices if "parallel.tensor" in notice) or None
    return plan.tensor if plan.tensor_plan == "recipe" else plan.tensor_plan


def _predicted(plan: Plan, trace: Trace) -> dict[str, str]:
    """The time by which a solver of tensor plans goes, whoever made this one."""
    if trace.predicted is None or not tensor_axes(plan):
        return {}
    found = trace.predicted()
    total, computing, communicating = (f"{1e3 * x:.3g} ms" for x in (found.total, found.computing, found.communicating))
    return {"predicted": f"{total} a microbatch: computing {computing}, over {', '.join(tensor_axes(plan))} {communicating}"}


def _decided_table(trace: Trace) -> list[Any]:
    """Which pin or op made parameters lie as they do; no table where a recipe did."""
    rows = dict.fromkeys((starred(name), axis, why) for name, by in trace.decided.items() for axis, why in by.items())
    if not rows:
        return []
    several = len({axis for _, axis, _ in rows}) > 1
    columns = ("parameter", *(("over",) if several else ()), "sharded, or not, by")
    return [grid("what decided", columns, [(name, *([axis] if several else []), why) for name, axis, why in rows])]


def _ranges(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _collective_table(plan: Plan, trace: Trace, rows: int) -> list[Any]:
    """Units that differ only in the number of their block and communicate the same are one row; no table where none communicates."""
    found: dict[tuple[str, tuple[tuple[Cause, UnitTraffic, int], ...]], list[int]] = {}
    for unit in trace.units:
        counts = Counter((_within(cause, unit.name), one) for cause, one in _communicated(unit, trace, plan, rows))
        if counts:
            found.setdefault((starred(unit.name), tuple((*key, times) for key, times in counts.items())), []).append(unit.index)
    if not found:
        return []
    over = {_over(one) for _, own in found for _, one, _ in own}
    cells, total = [], 0.0
    for (_, own), units in found.items():
        for i, (cause, one, times) in enumerate(own):
            needed = f"{cause.op} {cause.path}".strip() + f" ({times})" * (times > 1)
            axes, sent = [_over(one)] * (len(over) > 1), times * _sent(plan, one)
            cells.append(("" if i else _runs(units), needed, *axes, _kinds(one.forward), _kinds(one.backward), size(sent)))
            total += len(units) * sent
    column, where = (("over",), "") if len(over) > 1 else ((), f" over {over.pop()}")
    columns = ("unit", "needed by", *column, "forward", "backward", ">sent")
    title = f"collectives{where} (sent: by a rank, of a microbatch, forward and backward)"
    return [grid(title, columns, cells, totals=("", "all units", *[""] * (len(columns) - 3), size(total)))]


def _of_buckets(config: Config, plan: Plan, trace: Trace, cut: Cut) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """What rank 0 communicates of whole buckets, (bucket, bytes sent) each time: of gradients that are summed and of parameters that
    ranks do not keep, over which axes, by which collective."""
    words = {Op.REDUCE: "gradients", Op.GATHER: "parameters"}
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    traces, choice = [trace] * plan.microbatches, build_optimizer(config)
    for moment in step_traffic(traces, plan, choice, rows=config.data.batch_size, cut=cut):
        one = moment.instruction
        for t in moment.traffic if one.op in words and one.bucket >= 0 else ():
            sent = t.ring(plan.mesh.axis_size(t.axes))
            found.setdefault((words[one.op], ",".join(t.axes), t.kind), []).append((one.bucket, sent))
    return found


def _bucket_table(plan: Plan, found: dict[tuple[str, str, str], list[tuple[int, float]]]) -> list[Any]:
    """No table where nothing is communicated."""
    if not found:
        return []
    cells = [
        (*key, _runs(sorted({b for b, _ in own}), "b"), len(own), size(sum(n for _, n in own))) for key, own in found.items()
    ]
    batches = steady(plan)
    when = "a step" if batches == 1 else f"{batches} batches of a window"
    total = size(sum(n for own in found.values() for _, n in own))
    columns = ("of", "over", "", "buckets", ">times", ">sent")
    return [grid(f"collectives of buckets (sent: by rank 0, in {when})", columns, cells, totals=("", "", "", "all", "", total))]


def _within(cause: Cause, unit: str) -> Cause:
    """In short, with the path from the unit on."""
    return Cause(cause.op.removeprefix("aten.").partition(".")[0], cause.path.removeprefix(unit).removeprefix("."))


def _over(one: UnitTraffic) -> str:
    return ",".join(dict.fromkeys(axis for t in (*one.forward, *one.backward) for axis in t.axes))


def _kinds(several: Sequence[Traffic]) -> str:
    return ", ".join(t.kind for t in several)


def _runs(units: Sequence[int], letter: str = "u") -> str:
    """``u1-u3, u5``."""
    starts = [u for u in units if u - 1 not in units]
    stops = [u for u in units if u + 1 not in units]
    return ", ".join(f"{letter}{a}" if a == b else f"{letter}{a}-{letter}{b}" for a, b in zip(starts, stops, strict=True))


def _unit_table(plan: Plan, trace: Trace, costs: Sequence[UnitCost], cut: Cut, width: int) -> Any:
    """A parameter that several units read is in the row of each, and once in the sum."""
    stage = ["all" if s == EVERYWHERE else f"{s}" for s in cut.stage]
    pipe = cut.stages > 1
    name = max(8, width - 72 - 8 * pipe)  # beside the other columns
    columns = (*(("stage",) if pipe else ()), "unit", "name", ">parameters", ">forward FLOPs", ">backward", ">saved", ">outputs")
    rows = [
        (
            *((stage[one.index],) if pipe else ()), f"u{one.index}", folded(one.name, OF_NAME, name), count(one.parameters), count(one.forward_flops), count(one.backward_flops),
            size(one.saved_bytes), size(one.output_bytes),
        )
        for one in costs
    ]  # fmt: skip
    totals = (
        *(("",) if pipe else ()), "", "total", count(sum(math.prod(p.local_shape(plan.mesh, plan.mesh.size - 1)) for p in trace.parameters)), count(sum(one.forward_flops for one in costs)),
        count(sum(one.backward_flops for one in costs)), size(sum(one.saved_bytes for one in costs)), "",
    )  # fmt: skip
    return grid("units (of one microbatch on one rank)", columns, rows, totals=totals)
