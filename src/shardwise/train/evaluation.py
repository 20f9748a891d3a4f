"""Evaluate the model of an engine on a dataset, and give its outputs in the dataset's order, under any plan."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.example import example_rows
from shardwise.capture.in_form import InForm
from shardwise.capture.outputs import Wanted, number_of, rebuilt
from shardwise.core.errors import ConfigError
from shardwise.core.local_options import ISLANDS
from shardwise.core.structure import like
from shardwise.core.tensor_options import NON_TENSOR_AXES
from shardwise.data.forming import formed, with_tensors
from shardwise.data.loader import Batch
from shardwise.data.stream_loader import part_of
from shardwise.graph.torch_private import version
from shardwise.runtime.communicator import host_gather_bytes, host_sum
from shardwise.runtime.engine import Engine

from .metrics import Metric, kind


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found, the same on all ranks.

    ``loss`` is the mean over the targets (or rows) of the ``rows`` rows, NaN where there is none; ``metrics`` are
    numbers by name, and ``seconds`` what it has taken.
    """

    loss: float
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    metrics: Sequence[Metric] = (),
    example: Mapping[str, Tensor] | None = None,
) -> Evaluation:
    """Return the mean loss and the metrics of ``batches``; all ranks call it together, each with its own rows.

    ``example`` has rows of batches whose fields are others than those that train; it is the same on all ranks.  The
    host reads results once, at the end, so that a GPU runs the batches without waiting.
    """
    start = time.perf_counter()
    device = engine.comm.device
    wanted: Wanted = "both" if any(one.of_outputs for one in metrics) else "loss"
    total = torch.zeros((), dtype=Backend.of(device).widest_float, device=device)
    weight = torch.zeros_like(total)
    states = [one.begin(device) for one in metrics]
    compiled = engine.compiled.evaluation(wanted, example)
    rows = 0
    for batch in batches:
        found = engine.evaluate(batch.fields, batch.rows, batch.ones, compiled, batch.alike)
        counted = found.weight > 0  # a batch without targets has no mean
        total += torch.where(counted, found.loss.to(total.dtype) * found.weight.to(total.dtype), 0.0)
        weight += found.weight.to(total.dtype)
        rows += batch.rows
        if leads(engine, found.outputs) and any(batch.counts):
            structure, outputs = compiled.general.outputs, found.outputs or []
            there = {name: Backend.of(device).to_device(value, device) for name, value in batch.fields.items()}
            fields = like(there, batch.fields)
            with torch.no_grad():
                states = [
                    _added(one, state, structure, outputs, fields) if one.of_outputs else state
                    for one, state in zip(metrics, states, strict=True)
                ]
    loss = _of_first_island(engine, float(total / weight) if rows else math.nan)
    values: dict[str, float] = {}
    if metrics:
        every = _of_all_ranks(engine, [one.packed(state) for one, state in zip(metrics, states, strict=True)])
        for place, one in enumerate(metrics):
            new = one.values([each[place] for each in every], loss)
            if twice := [name for name in new if name in values]:
                raise ConfigError.on(f"metric {one.name}", f"it gives {twice[0]}, as another one does", "other names")
            values |= new
    return Evaluation(loss, rows, values, time.perf_counter() - start)


def _of_first_island(engine: Engine, loss: float) -> float:
    """Return the loss that the first of the islands has found, by which all ranks decide alike; all call it."""
    comm = engine.comm
    if comm.mesh.axis_size(ISLANDS) == 1:
        return loss
    mine = torch.tensor([loss if comm.rank == 0 else 0.0], dtype=torch.float64)
    return float(host_sum(comm, mine, "the loss of the first island"))


def _added(metric: Metric, state: Any, structure: Any, outputs: Sequence[Tensor], fields: Mapping[str, Tensor]) -> Any:
    """Return a metric's state with these rows, of which it gets dicts of its own; raise :class:`ConfigError` where it
    changes tensors that other metrics see, too."""
    tensors = [*outputs, *fields.values()]
    before = [version(one) for one in tensors]
    state = metric.add(state, rebuilt(structure, outputs), like(dict(fields), fields))
    if [version(one) for one in tensors] != before:
        wrong = "it writes in place to the outputs or the batch, which other metrics see, too"
        raise ConfigError.on(f"metric {metric.name}", wrong, "a write to a clone()")
    return state


def evaluate_loader(engine: Engine, given: Iterator[Any], metrics: Sequence[Metric]) -> Evaluation:
    """Return the same of whole batches that every rank has, or of a rank's own (:class:`Batch`)."""
    first = next(given, None)
    if first is None:
        return evaluate(engine, (), metrics)
    every = chain([first], given)
    if isinstance(first, Batch):
        return evaluate(engine, every, metrics)
    example = example_rows(_fields(engine, first), 2)
    return evaluate(engine, own_rows(engine, every), metrics, example)


def _of_all_ranks(engine: Engine, mine: list[Any]) -> list[Any]:
    """Return what all ranks have, in rank order."""
    return [_read(one) for one in host_gather_bytes(engine.comm, _written(mine), "the metrics of all ranks")]


def _written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # another rank of this run has written it


def leads(engine: Engine, outputs: list[Tensor] | None) -> bool:
    """Return whether this rank is the one that counts its rows: of the ranks with the same rows, one that has the
    outputs does, and of islands that train apart the first."""
    if outputs is None:
        return False
    mesh = engine.comm.mesh
    return mesh.index(engine.comm.rank, (ISLANDS, *mesh.other_axes(NON_TENSOR_AXES))) == 0


def predictions(
    engine: Engine, batches: Iterable[Batch], example: Mapping[str, Tensor], rank: int | None = None
) -> Iterator[Any]:
    """Yield the outputs of each batch, whole and on the host, its rows in their order; all ranks iterate together.

    ``example`` has rows of the batches.  With ``rank`` only that rank gets them, and the others None.
    """
    compiled = engine.compiled.evaluation("outputs", example)
    structure, comm = compiled.general.outputs, engine.comm
    number = number_of(structure)
    for batch in batches:
        found = engine.evaluate(batch.fields, batch.rows, batch.ones, compiled, batch.alike)
        mine = [one.cpu() for one in found.outputs or []] if leads(engine, found.outputs) else []
        ranges = [(a, a + n) for a, n in zip(batch.starts, batch.counts, strict=True)]
        parts = [(r, v) for r, v in map(_read, host_gather_bytes(comm, _written((ranges, mine)), "outputs")) if v]
        if rank is not None and comm.rank != rank:
            yield None
            continue
        yield rebuilt(structure, [_in_order([(r, v[i]) for r, v in parts], batch.rows) for i in range(number)])


def _in_order(parts: Sequence[tuple[list[tuple[int, int]], Tensor]], rows: int) -> Tensor:
    """Return the rows of a batch in their order: each part has the rows of its ranges, one after the other."""
    like = parts[0][1]
    whole = like.new_empty((rows, *like.shape[1:]))
    for ranges, values in parts:
        at = 0
        for start, stop in ranges:
            whole[start:stop] = values[at : at + stop - start]
            at += stop - start
    return whole


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of batches as those of all their rows."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, tuple):
        return tuple(joined([one[i] for one in outputs]) for i in range(len(first)))
    return type(first)({name: joined([one[name] for one in outputs]) for name in first})


def _rows_of(batch: Any) -> int:
    """Return the rows of a whole batch; :class:`ConfigError` for what is no dict of tensors with as many rows each."""
    legal = "a dict of tensors, all with a row for each of one row or more"
    if not isinstance(batch, Mapping) or not batch:
        raise ConfigError(f"batch: the loader gave {kind(batch)}; legal: {legal}")
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.dim():
            raise ConfigError(f'batch: field "{name}" is {kind(value)}; legal: {legal}')
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        found = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"batch: fields of the loader have these rows: {found}; legal: {legal}")
    return next(iter(sizes.values()))


def own_rows(engine: Engine, batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield this rank's part of whole batches that every rank has."""
    mesh, microbatches = engine.comm.mesh, engine.compiled.plan.microbatches
    for given in batches:
        yield part_of(_fields(engine, given), mesh, engine.comm.rank, microbatches)


def _fields(engine: Engine, whole: Any) -> Mapping[str, Tensor]:
    """Return the fields of a whole batch; a model that trains on dicts of tensors is evaluated on such ones."""
    if isinstance(engine.compiled.loss, InForm):
        return formed(whole)
    fields: Mapping[str, Tensor] = with_tensors(whole)
    _rows_of(fields)
    return fields
