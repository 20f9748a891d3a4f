"""Make the trace of a model: capture it, clean up its graph, shard it, and cut it into units and buckets."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.capture.capture import capture
from shardwise.capture.casts import cast_buffer, cast_field, shadow_dtype
from shardwise.capture.checks import take_checks
from shardwise.capture.computation import Computation
from shardwise.capture.host_draws import notes as draw_notes
from shardwise.capture.host_draws import take_draws
from shardwise.capture.known import Known
from shardwise.capture.outputs import Wanted, number_of
from shardwise.capture.varying import Varying
from shardwise.capture.wrapped import LossFunction
from shardwise.core.errors import ConfigError
from shardwise.core.fields import OUTPUT, has_rows
from shardwise.core.layout import Layout
from shardwise.core.numeric_options import LOW_PRECISIONS
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.expert_loads import keep_loads
from shardwise.graph.functional import Normal, functionalise
from shardwise.graph.normalise import normalise
from shardwise.graph.ones import with_ones
from shardwise.graph.unreached import keep_unreached
from shardwise.ops.experts import stacked
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.shard.op_spec import Shard
from shardwise.shard.rules import find
from shardwise.shard.sharded import shard
from shardwise.units.batch_sums import (
    Meetings,
    described,
    for_buffers,
    mean_cross_entropy,
    meetings,
    summands,
    take_sums,
    written_in_turn,
)
from shardwise.units.exchanges import check_exchanges, inseparable
from shardwise.units.loss_weight import LossWeight
from shardwise.units.numbered_rows import found_again, numbered_rows
from shardwise.units.opaque import ROWS_WEIGH, call_of, first_loss, norms_met, opaque_unit, try_backward
from shardwise.units.row_sums import row_sums
from shardwise.units.split import split, with_backward
from shardwise.units.trace import Bucket, Parameter, Trace, UnbucketedBytes, Unit
from shardwise.units.trials import NOTHING_KEPT, Trials
from shardwise.units.written_buffers import Written

CaptureKey = tuple[str, bool, tuple[str, ...], int | None, Wanted]
"""What a captured graph depends on: precision, training, the fields that are all ones, the static number of rows, and
whether it returns the model's outputs."""
Captures = dict[CaptureKey, Normal]

NOTHING_LEARNS = (
    "model: no trainable parameter has a gradient, for the loss depends on none; legal: a loss made of the model's "
    "output, and "
    "parameters with requires_grad"
)

ALONE = "microbatches = 1"
APART = f'"microbatch", or {ALONE}'


def trace(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: LossFunction | None = None,
    precision: str = "fp32",
    training: bool = True,
    dropout: str = "exact",
    device: torch.device | None = None,
    ones: tuple[str, ...] = (),
    rows: int | None = None,
    opaque: bool = True,
    group: Callable[[str], Hashable] | None = None,
    tensor: TensorParallelSpec | None = None,
    captures: Captures | None = None,
    varying: Varying | None = None,
    loss_weight: str | None = None,
    over_batch: bool = False,
    wanted: Wanted = "loss",
    segments: bool = False,
    dense: Container[str] | None = None,
    first: bool = True,
) -> Trace:
    """Trace ``module`` on rows like those of ``batch``; its graphs are sharded over the axes of the batch.

    Raises :class:`ConfigError` if no parameter learns, and if ``tensor`` has axes and the model cannot be captured.

    Args:
        loss: it is called as ``loss(output, fields)``; without it the module returns its loss.
        ones: the fields that are known to be all ones in the batches that will use this trace.
        rows: if given, the graph is static and takes exactly this number of rows.
        group: parameters never share a bucket if it gives different values for their names.
        tensor: this says what tensor parallelism shards.
        opaque: whether a model that cannot be captured becomes one unit; otherwise :class:`Uncapturable` is raised.
        loss_weight: what the loss of a model that is not captured is of its rows, if a trial is not to find that.
        over_batch: whether microbatches exchange, as ranks do, where rows meet (``units/exchanges.py``).
        wanted: whether units give the model's outputs too, for an evaluation, or the load of experts.
        segments: whether blocks are cut where they exchange something (``units/segments.py``).
        first: whether the trace says which parameters learn, also in batches by which forward decides in another way.
        dense: the parameters whose gradients are as large as they are, though all their lookups are sparse; None: all.
        captures: the graphs that earlier traces of this module, loss and batch captured; a new graph is added to them.
        varying: what is known of batches of other shapes, and the captures that serve several of them.
    """
    try:
        key: CaptureKey = (precision, training, ones, rows, wanted)
        captures, varying = {} if captures is None else captures, varying or Varying()
        normal = _normal(module, batch, loss, key, captures, varying)
        captured = normal.captured
        sharded = shard(
            normal, find, summands=summands(normal), dropout=dropout, device=device, tensor=tensor,
            over_batch=over_batch, sampled=varying.sampled,
        )  # fmt: skip
        meet, exchanges, (numbered, own) = meetings(sharded), list[fx.Node](), numbered_rows(normal)
        if numbered and not (numbered := found_again(numbered, normal, captures.values())):
            own = None
        buffers, exchangeable = for_buffers(sharded), not inseparable(meet.others)  # BatchNorms can be cut
        if over_batch:
            meet, exchanges = Meetings(meet.known, [], []), [*meet.norms, *meet.others]
            check_exchanges(exchanges, buffers, ALONE if numbered else APART)
        behind = row_sums(sharded)
        sums = take_sums(sharded, meet.known, mean_cross_entropy(normal))
        units = split(sharded, exchanges, segments)
        learning = _learning(units)
        if _decides(normal) and training and first:
            _check_reached(module, learning)
    except Uncapturable as error:
        if not opaque:
            raise
        if tensor is not None and tensor.axes:
            wrong = f"the model could not be captured, so nothing inside it can be sharded: {error}"
            raise ConfigError.on("tp", wrong, "tp = 1") from error
        loss = loss.bare() if isinstance(loss, Computation) else loss
        one = _opaque(
            module,
            batch,
            loss,
            precision,
            training,
            str(error),
            group,
            device or torch.device("cpu"),
            loss_weight,
            "loss" if wanted == "load" else wanted,
        )
        if over_batch:
            wrong = f'"batch" is not possible: the model could not be captured, so it cannot be cut: {error}'
            legal = APART if one.divisible and not one.unknown_buffers else f"dp = 1 and {ALONE}"
            raise ConfigError.on("rows", wrong, legal) from error
        return one
    drawn = {} if normal.draws is None else normal.draws.examples
    used = dict.fromkeys(name for unit in units for name in unit.parameters)  # in the same order in every process
    if training and not learning:
        raise ConfigError(NOTHING_LEARNS)
    tables = () if dense is None else _tables(units, sharded.layouts, sharded.summed, dense)
    buckets = _buckets(units, module, precision, learning, group, sharded.layouts, sharded.summed, tables)
    return Trace(
        units=units,
        buckets=buckets,
        frozen=tuple(n for n in used if n not in learning),
        fields=(*batch, *drawn),
        sums=sums,
        row_sums=behind,
        cuts_batch=not meet.others,
        meets=tuple(described([*meet.norms, *meet.others], buffers)),
        numbered=numbered,
        own_numbers=own,
        exchangeable=exchangeable,
        sequential=written_in_turn(sharded, meet),
        undivided=sharded.undivided,
        precision=precision,
        rows=captured.rows,
        notes=[*captured.notes, *(draw_notes(normal.draws) if normal.draws is not None else ()), *sharded.notes],
        replicated=tuple(sharded.replicated),
        beside=_beside(module, {**batch, **drawn}, buckets, precision),
        tensor=sharded.tensor,
        decided=sharded.decided,
        predicted=sharded.predicted,
        repeats=sharded.repeats,
        decisions=sharded.decisions,
        kept=sharded.kept,
        outputs=captured.outputs,
        checks=normal.checks,
        draws=normal.draws,
        skips=any(node.target is stacked or getattr(node.target, "skips", False) for node in normal.graph.nodes),
    )


def _normal(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, key: CaptureKey, captures: Captures,
    varying: Varying,
) -> Normal:  # fmt: skip
    """Return the graph that is to be sharded. All plans share it, so it must not be changed."""
    if key not in captures:
        _, _, ones, _, wanted = key
        normal = functionalise(with_ones(_captured(module, batch, loss, key, captures, varying), ones))
        normal.checks = take_checks(normal)
        normal.draws = take_draws(normal)
        normalise(normal)
        if _decides(normal) and key[1] and varying.drawing is None:
            keep_unreached(normal)
        if wanted == "load":
            keep_loads(normal)
        captures[key] = normal
    return captures[key]


def _captured(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, key: CaptureKey, captures: Captures,
    varying: Varying,
) -> Captured:  # fmt: skip
    """Return what ``key`` asks for as it is captured: for fields of any values, and by the same forward whether or not
    the load of experts is wanted."""
    precision, training, _, rows, wanted = key
    returns: Wanted = "loss" if wanted == "load" else wanted
    general: CaptureKey = (precision, training, (), rows, returns)
    if general in captures:
        return captures[general].captured
    capturing = partial(
        capture, module, batch, loss=loss, precision=precision, training=training, rows=rows, wanted=returns,
        known=varying.known.setdefault((precision, training, (), None, returns), Known()), drawing=varying.drawing,
    )  # fmt: skip
    return varying.captured(general, batch, lambda dims: capturing(varies=dims))


def _beside(module: nn.Module, batch: Mapping[str, Tensor], buckets: list[Bucket], precision: str) -> UnbucketedBytes:
    def nbytes(values: Iterable[Tensor]) -> int:
        return sum(v.numel() * v.element_size() for v in values)

    with torch.no_grad():
        one = (v[:1] if has_rows(name) else v for name, v in batch.items())
        rows = [cast_field(torch.empty_like(v, device="meta"), precision) for v in one]
        buffers = [cast_buffer(torch.empty_like(b, device="meta"), precision) for _, b in module.named_buffers()]
    placed = {p.name for b in buckets for p in b.parameters}
    unused = [p for n, p in module.named_parameters() if n not in placed]
    return UnbucketedBytes(nbytes(rows), nbytes(buffers), nbytes(unused))


def _learning(units: list[Unit]) -> set[str]:
    """Return the parameters that get a gradient: they are trainable and on a differentiable path to the loss."""
    found = set()
    for unit in units:
        assert unit.graph is not None
        reached = with_backward(unit.graph, unit.output_grads)
        places = [n for n in unit.graph.nodes if n.op == "placeholder"][1:]
        found |= {name for name, place in zip(unit.parameters, places, strict=False) if place in reached}
    return found


def _decides(normal: Normal) -> bool:
    """Whether forward may decide in Python in another way for another batch."""
    return normal.checks is not None and normal.checks.vary


def _check_reached(module: nn.Module, learning: Container[str]) -> None:
    """Raise :class:`Uncapturable` where forward decides by values and does not reach all parameters of the module: for
    another batch it may reach others, of which a program would not know."""
    missed = [name for name, one in module.named_parameters() if one.requires_grad and name not in learning]
    if missed:
        raise Uncapturable(f"it decides in Python by values of a batch, and {missed[0]} has no gradient for the first")


def _tables(
    units: list[Unit], layouts: Mapping[str, Layout], summed: Mapping[str, tuple[str, ...]], dense: Container[str]
) -> set[str]:
    """Return the tables that are read by sparse lookups alone, in one block, and that every rank has whole."""
    users: dict[str, list[Unit]] = {}
    for unit in units:
        for name in unit.parameters:
            users.setdefault(name, []).append(unit)
    return {
        name for name, those in users.items()
        if name not in dense and all(name in unit.lookups for unit in those) and len({u.block for u in those}) == 1
        and not (summed.get(name) or (name in layouts and layouts[name].sharding_axes))
    }  # fmt: skip


def _buckets(
    units: list[Unit], module: nn.Module, precision: str, learning: set[str], group: Callable[[str], Hashable] | None,
    layouts: Mapping[str, Layout] = MappingProxyType({}), summed: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    tables: Container[str] = (),
) -> list[Bucket]:  # fmt: skip
    """Group parameters into buckets; ``layouts`` has an entry for each sharded one, ``summed`` the axes over which its
    gradient is a partial sum. Each of ``tables`` is a bucket of its own.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    users: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, dict[int, None]] = {}  # the blocks that use each parameter, by their first units
    first: dict[str, int] = {}
    for unit in units:
        block = first.setdefault(unit.block, unit.index)
        for name in unit.parameters:
            users[name] = (*users.get(name, ()), unit.index)
            blocks.setdefault(name, {})[block] = None
    groups: dict[tuple[Any, ...], list[Parameter]] = {}
    for name in own:  # the module's own order
        if name in users:
            if name in learning and own[name].is_complex():
                wrong = f"parameter {name} is {own[name].dtype}, which no fused optimizer steps"
                legal = "a real one with a last dim of 2, read through torch.view_as_complex"
                raise ConfigError.on("model", wrong, legal)
            dtype = shadow_dtype(module, name, own[name], precision)
            one = Parameter(name, tuple(own[name].shape), dtype, users[name], layouts.get(name), summed.get(name, ()))
            key = (
                tuple(blocks[name]),
                dtype,
                name in learning,
                one.axes,
                one.summed,
                group(name) if group is not None else None,
                name if name in tables and name in learning else "",
            )
            groups.setdefault(key, []).append(one)
    # The buckets of one block are in the order of the module, so that all processes agree.
    ordered = sorted(groups, key=lambda k: (k[0][0], len(k[0]), k[0], str(k[1]), not k[2], k[3:5], k[6]))
    used = [tuple(sorted({u for one in groups[k] for u in one.units})) for k in ordered]
    return [Bucket(i, tuple(groups[k]), used[i], *k[1:5], table=bool(k[6])) for i, k in enumerate(ordered)]


def _loss_note(found: LossWeight | None, why: str) -> str:
    if found is not None:
        return f"its loss is {found}, as a trial showed"
    if why:
        return f"what its loss is of its rows is not known, for a trial failed: {why}"
    return "its loss is no mean over rows, no sum, and no mean over targets, as a trial showed"


def _idle_norms(module: nn.Module, written: Mapping[str, Written | None], met: Container[str]) -> list[str]:
    """Return the paths of the BatchNorms that train, by the kinds of buffers, and have not run."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name, kind in written.items() if kind == "norm")
    return [p for p in paths if p not in met and (module.get_submodule(p).training or not module.training)]


def _opaque(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, precision: str, training: bool,
    reason: str,
    group: Callable[[str], Hashable] | None, device: torch.device, loss_weight: str | None,
    wanted: Wanted = "loss",
) -> Trace:  # fmt: skip
    real = not any(p.is_meta for p in module.parameters())
    weight = LossWeight.parsed(loss_weight, batch) if loss_weight else ROWS_WEIGH
    known, written, kept = True, dict[str, Written | None](), NOTHING_KEPT
    exact = "fp32" if precision in LOW_PRECISIONS else precision
    notes = [f"not captured, trains as one unit: {reason}"]
    if real and wanted != "outputs":  # without a loss there is nothing to try
        kept = Trials(module, batch, loss, precision, device, training).kept()
        trials = Trials(module, batch, loss, exact, device, training)
        if not loss_weight:
            found, why = trials.weight()
            known, weight = found is not None, found or weight
            notes.append(_loss_note(found, why))
        written, why = trials.written()
        notes += [f"what it writes to buffers is not known, for a trial failed: {why}"] if why else []
    if loss_weight:
        notes.append(f"its loss is {weight}, as model.loss_weight says")
    unit = opaque_unit(module, tuple(batch), loss, precision, training, weight, written=written, wanted=wanted)
    structure, names = None, list[str]()
    first = first_loss(unit, module, batch, precision, device) if real or wanted != "loss" else None
    if wanted != "loss":
        structure = call_of(unit).outputs.structure
        names = [f"{OUTPUT}{i}" for i in range(number_of(structure))]
        unit.updates += tuple(names)
    if real and training and first is not None:
        if not first.requires_grad:
            raise ConfigError(NOTHING_LEARNS)
        try_backward(first)
    trainable = {n: p.requires_grad for n, p in module.named_parameters()}
    learning = {n for n, good in trainable.items() if good}
    notes += [
        "lost with it: overlap of reductions with backward, and per-unit recomputation; ZeRO-3 gathers all parameters "
        "while it runs; what lets rows meet, but for BatchNorm, is computed on each rank's own rows",
        "branches that depend on values are decided by each rank's own rows",
        *kept.notes(),
    ]
    met = norms_met(unit)
    if idle := _idle_norms(module, written, met):
        notes.append(
            f"{', '.join(idle)}: such a BatchNorm did not run on the first batch; where it runs, its rows are "
            "those of a microbatch"
        )
    buckets = _buckets([unit], module, precision, learning, group)
    return Trace(
        units=[unit],
        buckets=buckets,
        frozen=tuple(n for n in trainable if n not in learning),
        fields=tuple(batch),
        sums=weight.sums(batch),
        precision=precision,
        opaque=reason,
        divisible=known,
        keeps=kept.once,
        unknown_buffers=tuple(name for name, kind in written.items() if kind is None),
        sequential=frozenset(name for name, kind in written.items() if kind == "norm"),
        added=frozenset(name for name, kind in written.items() if kind in ("sum", "mean")),
        meets=tuple(f"{path or 'forward'} (batch_norm)" for path in met),
        kept=dict.fromkeys(names, Shard(0)),
        outputs=structure,
        notes=notes,
        beside=_beside(module, batch, buckets, precision),
    )
