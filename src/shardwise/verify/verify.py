"""Verify that a plan trains a model as one device does: both run a few steps in fp64 on the same batches, and
everything is compared.

The plan's side runs as in training, apart from its precision; the other side is
:class:`shardwise.verify.oracle.Oracle`.  A plan in low precision is judged a second time: its first gradients may be at
most 1.25 times as far from the fp64 truth as one device's in that precision.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.capture.in_form import InForm
from shardwise.capture.wrapped import LossFunction, rows_in
from shardwise.core.averaging import check_average
from shardwise.core.clipping import check_clipping
from shardwise.core.errors import ShardwiseError
from shardwise.core.fields import has_rows
from shardwise.core.instruction import OP_INFO
from shardwise.core.layout import rank_rows
from shardwise.core.local_options import ISLANDS
from shardwise.core.numeric_options import LOW_PRECISIONS
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.core.structure import like
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.lower.outer import fragments
from shardwise.lower.traced_for import solves
from shardwise.parallel.local import island_rows
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.whole_tensors import whole_tensors_for
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.verify.compare import Comparison, Difference, total_norm
from shardwise.verify.islands import Islands
from shardwise.verify.oracle import Oracle, OracleStep, on_host, plain_optimizer
from shardwise.verify.rounding import TURNS
from shardwise.verify.served import compare_served

CPU = torch.device("cpu")
TOLERANCE = 1e-10
LOW_PRECISION_FACTOR = 1.25
LEAST_SCALE = 2.0**-16  # overflows at this loss scale are not its fault
STEPS = 3
OVERLAPPING_STEPS = 12
OPTIMIZER = OptimizerChoice("adamw", lr=1e-3, eps=1e-4, weight_decay=0.1)
"""AdamW; its eps is large enough that a gradient of pure rounding noise (an attention key's bias) moves nothing."""
OPTIMIZER_BY_ROWS = OptimizerChoice("adagrad", lr=1e-2, eps=1e-4)
"""The same for plans under which only some rows of tables are updated."""

Batches = Sequence[Mapping[str, Tensor]]
Runner = Callable[[Compiled, Callable[[Communicator], list["VerifiedStep"]]], list[list["VerifiedStep"]]]
"""This runs a function on every rank of a plan and returns what each rank returned."""


@dataclass
class VerifiedStep:
    """This is what a rank has after a step: the plan's counterpart of :class:`OracleStep`."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)  # of the parameters, if the optimizer has any
    repeated: bool | None = None  # whether the update was made again by the norm over all stages


@dataclass
class Report:
    """This is the verdict, and what it rests on.

    ``microbatches`` is in how many pieces one device took each batch: several where a note says that they matter."""

    passed: bool
    largest: float
    tolerance: float
    worst: list[Difference]
    summary: dict[str, float]
    compared: int
    promotions: int
    ranks_agree: bool
    seconds: float
    notes: list[str] = field(default_factory=list)
    low_precision: dict[str, float] | None = None
    microbatches: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``."""
        return asdict(self)


def verify(
    module: nn.Module,
    batches: Batches,
    plan: Plan,
    *,
    loss: LossFunction | None = None,
    optimizer: OptimizerChoice | None = None,
    clip_norm: float | None = 1.0,
    clip_value: float | None = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    run: Runner | None = None,
    captured: Compiled | None = None,
    device: torch.device | str = "cpu",
) -> Report:
    """Compare ``plan`` with one device on ``batches``, one global batch a step.

    The loss, the gradient norm, the gradient of every parameter, and every parameter and buffer after the step are
    compared step by step, with the average of every parameter if the ``optimizer`` has an ``ema``; where batches
    overlap, what a step leaves is compared where the pipeline is empty.
    Under an asynchronous schedule one device uses the old weights that the programs say.  Islands that train apart are
    compared with as many runs on one device, which meet as they do.  ``module`` is not changed.
    With ``clip_value`` gradients are clipped element by element, in place of ``clip_norm``.
    ``optimizer`` is by default AdamW, or Adagrad where tables have gradients by rows.
    ``run`` runs the ranks; by default they are threads of this process, in any number.  ``captured``
    is ``module`` with its loss, compiled for any plan and batches like these: it is not captured again.  Where a solver
    decides on tensor plans, it does so as ``captured`` says, by default for the devices of this machine; the run in
    fp64 takes what it decided for ``plan``.  Both sides compute on ``device``, or on that of ``captured``: the ranks
    share this one device, each in a stream of its own.
    """
    start = time.perf_counter()
    loss = InForm.of_all(loss, batches)
    if captured is not None and isinstance(captured.loss, InForm) and isinstance(loss, InForm):
        captured.loss.objects = loss.objects  # of all batches
    optimizer = optimizer or optimizer_for(plan)
    optimizer = optimizer.resolved(name for name, _ in module.named_parameters())
    clip_norm = clip_norm if clip_value is None else None
    check_clipping(plan, clip_norm, clip_value)
    check_average(plan, optimizer)
    plan = whole_tensors_for(plan, optimizer)
    if plan.serving.apart:
        return _verify_apart(module, batches, plan, loss, optimizer, clip_norm, seed, tolerance, captured, start)
    device = torch.device(device) if captured is None else captured.device
    only = 0 if run is None else None  # what runs the ranks otherwise may compare on each of them
    run = run or run_threads
    exact = plan.replace(precision="fp64", dropout="exact")
    if captured is None and solves(plan):
        captured = Compiled(module, plan, batches[0], loss, device, kind=Backend.here().kind)
    compiled = _ready(module, plan, exact, batches[0], loss, captured, device)
    mesh, islands = exact.mesh, exact.mesh.axis_size(ISLANDS)
    only = only if islands == 1 else None
    steps = functools.partial(run_steps, compiled, clip_value=clip_value, only=only)
    ours = run(compiled, lambda comm: steps(comm, batches, optimizer, clip_norm, seed))
    pieces = in_pieces(compiled)
    oracle_of = functools.partial(
        Oracle,
        module,
        loss,
        plain_optimizer(optimizer),
        seed=seed,
        clip_norm=clip_norm,
        clip_value=clip_value,
        averaging=optimizer,
        group_of=optimizer.group_of,
        version=versions(compiled, len(batches), pieces.microbatches) if exact.asynchronous else None,
        device=device,
        microbatches=pieces.microbatches,
        parts=pieces.parts,
    )
    met = _fragments(compiled) if islands > 1 else {}

    def islands_of(turns: int = 0) -> Islands:
        each = [oracle_of(drawing=functools.partial(_drawn, islands, i), turns=turns) for i in range(islands)]
        return Islands(each, exact.local, met)

    oracle = islands_of()
    every = _trained(oracle, batches, optimizer)
    truth, firsts = every[0], [mesh.rank({ISLANDS: i} if islands > 1 else {}) for i in range(islands)]
    comparison = compare_all([ours[first] for first in firsts], every)
    for turns in range(1, TURNS + 1):
        if not comparison.passes(tolerance):
            noise = compare_all(_trained(islands_of(turns), batches, optimizer), every)
            comparison = comparison.limited(noise)
    agree = all(_same(ours[firsts[mesh.index(r, ISLANDS)]][-1], rank[-1]) for r, rank in enumerate(ours))
    low = None
    if plan.numeric.precision in LOW_PRECISIONS:
        low = low_precision(module, batches[0], plan, loss, optimizer, seed, run, truth[0].gradients, captured, device)
    passed = comparison.passes(tolerance) and agree and (low is None or low["ratio"] <= LOW_PRECISION_FACTOR)
    notes = compiled.notes
    if broken := next((s for s in truth if not math.isfinite(s.loss)), None):
        notes.append(
            f"one device's own loss is {broken.loss} at step {broken.step}: it is the model, its data or its numbers, "
            "not the plan"
        )
    if islands > 1:
        notes.append(
            f"compared with {islands} runs on one device, one for each island, which meet every {plan.local.steps} "
            "steps"
        )
    if plan.post_validates:
        notes.append(
            f"of {len(ours[0])} updates {sum(bool(step.repeated) for step in ours[0])} were made again by the norm "
            "over all stages"
        )
    if plan.numeric.dropout == "fast":
        notes.append('dropout = "fast" gives other masks on another layout; compared here with dropout = "exact"')
    notes += comparison.notes(tolerance)
    if oracle.promotions:
        notes.append(
            f"{oracle.promotions} casts to fp32 or lower inside the model were made casts to fp64, on both sides"
        )
    return Report(
        passed, comparison.largest, tolerance, comparison.worst(10), comparison.summary(), len(comparison.differences),
        oracle.promotions, agree, time.perf_counter() - start, notes, low,
        max(pieces) if compiled.general.meets else pieces.microbatches,
    )  # fmt: skip


def optimizer_for(plan: Plan) -> OptimizerChoice:
    """Return the optimizer of a comparison that names none: AdamW, or Adagrad where tables have gradients by rows."""
    return OPTIMIZER if plan.data.tables == "dense" else OPTIMIZER_BY_ROWS


def _verify_apart(
    module: nn.Module, batches: Batches, plan: Plan, loss: LossFunction | None, optimizer: OptimizerChoice,
    clip_norm: float | None, seed: int, tolerance: float, captured: Compiled | None, start: float,
) -> Report:  # fmt: skip
    """Compare workers and servers that do not wait for each other with a replay of what the servers have recorded: each
    batch is one push."""
    compiled = _ready(module, plan, plan.replace(precision="fp64", dropout="exact"), batches[0], loss, captured, CPU)
    pieces = in_pieces(compiled)
    oracle = Oracle(module, loss, None, seed=seed, device=CPU, microbatches=pieces.microbatches, parts=pieces.parts)
    in_training(oracle)
    found = compare_served(compiled, oracle, batches, optimizer, clip_norm=clip_norm, seed=seed)
    comparison = found.comparison
    return Report(
        comparison.passes(tolerance) and found.holds, comparison.largest, tolerance, comparison.worst(10),
        comparison.summary(), len(comparison.differences), oracle.promotions, found.holds, time.perf_counter() - start,
        [*compiled.notes, *found.notes],
    )  # fmt: skip


def _ready(
    module: nn.Module, plan: Plan, changed: Plan, batch: Mapping[str, Tensor], loss: LossFunction | None,
    captured: Compiled | None,
    device: torch.device,
) -> Compiled:  # fmt: skip
    """Return the model compiled for ``changed``, with what a solver decides for ``plan``, and with hooks of its own."""
    if captured is None:
        found = Compiled(module, changed, batch, loss, device)
    else:
        found = captured.under(plan).decided(changed) if solves(plan) else captured.under(changed)
    found.hooks = None if found.hooks is None else found.hooks.copied()
    return found


class Pieces(NamedTuple):
    """How many pieces of a batch one device computes as batches of their own, and how many parts BatchNorm sees."""

    microbatches: int
    parts: int


def in_pieces(compiled: Compiled) -> Pieces:
    """Return in how many pieces one device computes a batch: in one, but for the statistics of BatchNorm, unless each
    microbatch is a batch of its own, by a note or by the weights that it uses."""
    plan, trace = compiled.plan, compiled.general
    if not trace.cuts_batch:
        return Pieces(plan.microbatches, 1)
    # A BatchNorm of a model that is not captured may run on some batches alone.
    return Pieces(1, plan.microbatches if trace.meets or trace.opaque is not None else 1)


def _finite(gradients: Mapping[str, Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients.values())


def in_training(oracle: Oracle) -> None:
    """Put one device's module into training mode, as the plan does, if it is in evaluation mode as a whole."""
    if not oracle.module.training:
        oracle.module.train()


def run_threads(
    compiled: Compiled, rank: Callable[[Communicator], list[VerifiedStep]], delay_seed: int | None = None
) -> list[list[VerifiedStep]]:
    """Run every rank as a thread of this process, on the device of ``compiled``; they pause at random if there is a
    ``delay_seed``."""
    return run_ranks(compiled.plan.mesh, rank, timeout=120, device=compiled.device, delay_seed=delay_seed)


def run_steps(
    compiled: Compiled,
    comm: Communicator,
    batches: Batches,
    optimizer: OptimizerChoice,
    clip_norm: float | None,
    seed: int,
    scale: ScaleChoice | None = None,
    only: int | None = None,
    clip_value: float | None = None,
) -> list[VerifiedStep]:
    """Train one rank on its rows of each of the batches, and return what it has after each.

    With ``only``, the other ranks return parameters and buffers of the last step alone, and gradients only if that
    rank is on their pipeline.
    """
    engine = Engine(
        compiled, comm, optimizer, clip_norm=clip_norm, clip_value=clip_value, seed=seed, strict=True, loss_scale=scale
    )
    parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
    needed = only is None or only in comm.mesh.group(comm.rank, PIPELINE)  # stages send each other their gradients
    out = []
    for start, stop in windows(compiled.plan, len(batches)):
        given = []
        for batch in batches[start:stop]:
            first, last = island_rows(comm.mesh, comm.rank, rows_in(batch))
            ranges = rank_rows(last - first, compiled.plan.microbatches, parts, index)
            own = [first + i for a, b in ranges for i in range(a, b)]
            mine = {name: value[own] if has_rows(name) else value for name, value in batch.items()}
            given.append((like(mine, batch), last - first, False))
        kept: list[dict[str, Tensor]] = []
        engine.interpreter.keep_gradients, engine.interpreter.needs_gradients = kept, needed
        many = len(given) > 1
        results = list(engine.steps(iter(given), len(given))) if many else [engine.step(*given[0], alike=True)]
        values = dict(engine.whole.collect(only if stop < len(batches) else None))
        steps = [
            VerifiedStep(
                float(result.loss),
                float(result.grad_norm),
                on_host(engine.everywhere(gradients)) if needed else {},
                {},
                {},
                repeated=result.repeated,
            )
            for result, gradients in zip(results, kept, strict=True)
        ]
        steps[-1].buffers = {name: values.pop(name) for name in engine.memory.buffers if name in values}
        steps[-1].parameters = values
        if optimizer.ema is not None:
            with engine.averaged():
                values = dict(engine.whole.collect(only if stop < len(batches) else None))
            steps[-1].averages = {name: value for name, value in values.items() if name in steps[-1].parameters}
        out += steps
    return out


def windows(plan: Plan, batches: int) -> list[tuple[int, int]]:
    """Return the ranges of batches that are one program each."""
    size = plan.pipeline.window if plan.overlaps else 1
    return [(start, min(start + size, batches)) for start in range(0, batches, size)]


def versions(compiled: Compiled, batches: int, pieces: int) -> Callable[[str, int], int]:
    """Return the version of the weights that the programs use: for a parameter and one of the ``pieces`` in which one
    device computes each batch, counted over all batches, the number of updates before it.  Raises ShardwiseError where
    stages disagree, or the microbatches of a piece."""
    found: dict[tuple[str, int], int] = {}
    trace, microbatches = compiled.general, compiled.plan.microbatches
    for start, stop in windows(compiled.plan, batches):
        for program in compiled.programs(trace, microbatches, stop - start):
            for one in program.instructions:
                if OP_INFO[one.op].runs_unit:
                    for name in trace.units[one.unit].parameters:
                        number, version = start * microbatches + one.microbatch, start + one.version
                        key = name, number * pieces // microbatches
                        if found.setdefault(key, version) != version:
                            raise ShardwiseError(
                                f"microbatch {number} uses {name} of {found[key]} updates and of {version}"
                            )
    return lambda name, piece: found[name, piece]


def _drawn(islands: int, island: int, step: int) -> int:
    """Return what keys the random numbers of an island's step."""
    return step * islands + island


def _fragments(compiled: Compiled) -> dict[str, int]:
    """Return the fragment of each parameter that learns, by name."""
    place = fragments(compiled.buckets, compiled.plan.local)
    return {p.name: place[b.index] for b in compiled.buckets if b.learns for p in b.parameters}


def _trained(oracle: Islands, batches: Batches, optimizer: OptimizerChoice) -> list[list[OracleStep]]:
    """Return the steps of one device on the batches, of each island."""
    for one in oracle.oracles:
        in_training(one)
    every = [oracle.step(batch, optimizer.settings(i)) for i, batch in enumerate(batches)]
    return [list(steps) for steps in zip(*every, strict=True)]


def compare_all(
    ours: Sequence[Sequence[VerifiedStep | OracleStep]], truth: Sequence[Sequence[OracleStep]]
) -> Comparison:
    """Compare all steps of all islands; of one whose steps are in another process, what it has after the last."""
    found = Comparison()
    for number, (mine, right) in enumerate(zip(ours, truth, strict=True)):
        if number and len(mine) < len(right):
            found.add(right[-1].step, "parameter", mine[-1].parameters, right[-1].parameters)
        else:
            found.differences += compare(mine, right).differences
    return found


def compare(ours: Sequence[VerifiedStep | OracleStep], truth: Sequence[OracleStep]) -> Comparison:
    """Compare all steps and return all differences."""
    comparison = Comparison()
    for mine, right in zip(ours, truth, strict=True):
        scale = total_norm(right.parameters)  # what stands for the size of all where a step's numbers are exactly zero
        comparison.add_number(right.step, "loss", mine.loss, right.loss, scale)
        comparison.add_number(right.step, "grad_norm", mine.grad_norm, right.grad_norm, scale)
        comparison.add(right.step, "gradient", mine.gradients, right.gradients, scale)
        if mine.parameters:  # the pipeline is empty
            comparison.add(right.step, "parameter", mine.parameters, right.parameters)
            comparison.add(right.step, "buffer", mine.buffers, right.buffers)
            comparison.add(right.step, "average", mine.averages, right.averages)
    return comparison


def low_precision(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    plan: Plan,
    loss: LossFunction | None,
    optimizer: OptimizerChoice,
    seed: int,
    run: Runner,
    truth: Mapping[str, Tensor],
    captured: Compiled | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Return the error of the first gradients against the fp64 truth, of the plan and of one device, and their ratio.

    The one device computes in the plan's precision.  Under fp16 both multiply their loss by the largest power of two
    under which no gradient of either overflows, since they sum in different parts.
    """
    device = torch.device(device) if captured is None else captured.device
    compiled = _ready(module, plan, plan.replace(dropout="exact"), batch, loss, captured, device)
    pieces = in_pieces(compiled)
    scale = ScaleChoice().initial if plan.numeric.precision == "fp16" else 1.0
    while True:
        oracle = Oracle(
            module, loss, None, precision=plan.numeric.precision, seed=seed, loss_scale=scale, device=device,
            microbatches=pieces.microbatches, parts=pieces.parts,
        )  # fmt: skip
        in_training(oracle)
        own = island_rows(plan.mesh, 0, rows_in(batch))
        single = oracle.step({name: value[slice(*own)] for name, value in batch.items()}).gradients
        last = scale <= LEAST_SCALE or plan.numeric.precision != "fp16"
        if last or _finite(single):
            fixed = ScaleChoice.fixed(scale)
            steps = functools.partial(
                run_steps, compiled, batches=[batch], optimizer=optimizer, clip_norm=None, seed=seed, scale=fixed
            )
            ours = run(compiled, steps)[0][0].gradients
            if last or _finite(ours):
                break
        scale /= 2
    mine, theirs = distance(ours, truth), distance(single, truth)
    return {
        "plan": mine,
        "one_device": theirs,
        "ratio": mine / theirs if theirs > 0 else (0.0 if mine == 0 else math.inf),
    }


def distance(gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Return ||g - truth|| / ||truth|| over all parameters together, or ||g|| where the truth is zero; it is infinite
    if their names differ."""
    if set(gradients) != set(truth):
        return math.inf
    difference = math.hypot(*(float(torch.linalg.vector_norm(gradients[n].double() - truth[n])) for n in truth))
    return difference / (math.hypot(*(float(torch.linalg.vector_norm(t)) for t in truth.values())) or 1.0)


def _same(a: VerifiedStep, b: VerifiedStep) -> bool:
    """Return whether two ranks have exactly the same parameters and buffers."""
    pairs = [(a.parameters, b.parameters), (a.buffers, b.buffers), (a.averages, b.averages)]
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine) for mine, theirs in pairs
    )
