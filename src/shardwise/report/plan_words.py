"""A plan is told in sentences, and as a table of its options."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.core.data_options import DATA_PARALLEL_ROWS, ParameterRule
from shardwise.core.local_options import ISLANDS
from shardwise.core.plan import CHOICES, COUNTS, NUMBERS, OPTIONS, Plan
from shardwise.core.schedules import traits
from shardwise.core.tensor_options import CONTEXT, EXPERTS, parameter_axes
from shardwise.parallel.data import batch_axes

from .tables import plural

STATES = {
    "DDP": "Every rank holds all parameters, gradients and states of the optimizer.",
    "ZeRO-1": "The optimizer's state is sharded over the ranks of dp (ZeRO-1).",
    "ZeRO-2": "Gradients and the optimizer's state are sharded over the ranks of dp (ZeRO-2).",
    "ZeRO-3": "Parameters, gradients and the optimizer's state are sharded over the ranks of dp (ZeRO-3).",
}
SERVED = (
    "The optimizer's state is on {servers} of the ranks of dp: all push gradients to these servers, and pull from them."
)
RECOMPUTE = {
    "none": "",
    "selective": "Backward computes a unit's forward again, without its products, convolutions and attention.",
    "full": "Backward computes each unit's forward again, so that only its inputs are kept.",
}
OFFLOAD = {
    "none": "",
    "optimizer": "Master weights and the optimizer's state are on the host, which also takes the step.",
    "activations": "What autograd saves is moved to the host between forward and backward.",
    "all": "Master weights, the optimizer's state, and what autograd saves are on the host.",
}


def sentences(plan: Plan) -> list[str]:
    """Return the plan in sentences."""
    ranks = plan.mesh.size
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)
    one = "" if plan.local.steps else " as one device"
    alone = [*_apart(plan)] if plan.serving.apart else ["One rank trains alone."]
    found = alone if ranks == 1 else [f"{ranks} ranks train{one} ({axes})."]
    found += [*_islands(plan), *_rows(plan), *_pipeline(plan), *_tensors(plan)]
    if ranks > 1:
        found += [_states(rule) for rule in plan.data.parameters]
    precision = plan.numeric.precision
    low = precision in ("bf16", "fp16")
    found.append(f"The model computes in {precision}{', with masters of the weights in fp32' if low else ''}.")
    return [*found, *filter(None, (RECOMPUTE[plan.memory.recompute], OFFLOAD[plan.memory.offload]))]


def _apart(plan: Plan) -> Iterator[str]:
    serving = plan.serving
    each = "batches of its own" if serving.workers > 1 else "one batch after the other"
    yield (
        f"{plural(serving.workers, 'worker')} and {plural(serving.servers, 'server')} are processes of their own: each "
        f"worker trains on {each} and pushes gradients to the servers, which update."
    )
    if serving.bound is not None:
        yield f"The fastest worker is at most {plural(serving.bound, 'push')} ahead of the slowest."
    if serving.push != "whole":
        yield f"Gradients are sent as {serving.push}."
    if serving.pull_every > 1:
        yield f"A worker pulls parameters before one of {serving.pull_every} pushes."
    if serving.rate == "staleness":
        yield "The rate of an update is divided by one more than the updates of others since its pull."


def _islands(plan: Plan) -> Iterator[str]:
    local, islands = plan.local, plan.mesh.axis_size(ISLANDS)
    if not local.steps:
        return
    yield (
        f"Each of {islands} islands trains on its part of the batch by itself, for {plural(local.steps, 'step')}; then "
        f"an outer step of rate {local.outer_lr:g} and momentum {local.outer_momentum:g} brings them together."
    )
    if local.streams:
        yield (
            f"They meet in {local.fragments} fragments, one after the other and under the computing of a step, and "
            f"keep {local.mix:g} of their own parameters."
        )


def _rows(plan: Plan) -> Iterator[str]:
    parts = plan.mesh.axis_size(batch_axes(plan.mesh))
    if parts > 1:
        of = "of an island" if plan.local.steps else "of each step"
        yield f"The rows {of} are divided over {parts} ranks or groups of ranks, whose gradients are summed."
    if plan.microbatches > 1:
        yield f"A step is computed in {plan.microbatches} microbatches, whose gradients add up before the update."


def _pipeline(plan: Plan) -> Iterator[str]:
    size = plan.mesh.axis_size("pp")
    if size == 1:
        return
    options = plan.pipeline
    yield (
        f"The model's units are cut into {size * options.stages_per_rank} stages on {size} ranks, "
        f"{plural(options.stages_per_rank, 'stage')} each, which compute in the order {options.schedule}."
    )
    if plan.asynchronous:
        old = "one step old" if traits(options.schedule).double_buffered else "older on earlier stages"
        yield f"Steps overlap, with weights that are {old}; the pipeline is drained after {options.window} steps."
    if plan.post_validates:
        yield "Stages update before the norm over all of them is known, and go back if it clips or skips."


def _tensors(plan: Plan) -> Iterator[str]:
    parts = plan.mesh.axis_size(CONTEXT)
    if parts > 1:
        how = {
            "gathered": "which gather keys and values",
            "ring": "which pass keys and values on",
            "heads": "which exchange it for parts of the heads",
        }
        yield f"Each sequence is shared by {parts} ranks, {how[plan.tensor.context]} for attention."
    experts = plan.mesh.axis_size(EXPERTS)
    if experts > 1:
        yield f"The experts of each layer are shared by {experts} ranks, to which tokens go, and come back."
    if plan.tensor.overlap == "pairs":
        yield "Microbatches run in pairs: one computes while what the other one exchanges is under way."
    size = plan.mesh.axis_size(parameter_axes(plan.mesh))
    if size > 1:
        by = {"recipe": f"by the recipe {plan.tensor.recipe}"}.get(plan.tensor.plan, f"by the plan {plan.tensor.plan}")
        yield f"Each layer is shared by {size} ranks, {by}."
        if plan.tensor.experts == "by-number":
            yield "Of a layer's experts each of these ranks has some, for which it computes the rows of all tokens."


def _states(rule: ParameterRule) -> str:
    kind = DATA_PARALLEL_ROWS[rule.rest, rule.grad, rule.state]
    words = SERVED.format(servers=rule.servers) if rule.servers else STATES[kind]
    return words if rule.pattern == "*" else f"{rule.pattern}: {words}"


def options(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's options and their values, both as text; options that are empty are left out."""
    found = [("mesh", " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh.axes) or "one rank")]
    found.append(("microbatches", str(plan.microbatches)))
    for key in (*CHOICES, *COUNTS, *NUMBERS, "vertical_sync", "stages"):
        group, option = OPTIONS[key]
        value = getattr(getattr(plan, group), option.name)
        if value not in ((), ""):
            found.append((key, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)))
    found += [(f"timetable of rank {rank}", text) for rank, text in enumerate(plan.pipeline.timetable)]
    found += [(f"pin {pattern}", text) for pattern, text in plan.tensor.pins]
    for rule in plan.data.parameters:
        found.append((f"parameters {rule.pattern}", f"rest {rule.rest}, gradient {rule.grad}, state {rule.state}"))
    return found
