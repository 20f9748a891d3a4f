"""What the loss of a model that was not captured is of its rows, found by trial: its graph is not there to be read.

The example batch is computed whole and in two parts, in the mode of the trace: random numbers are keyed by row, and
BatchNorm normalises by 0 and 1, so that rows are independent. The loss is a mean over rows if the parts' losses by
their shares of the rows make that of the whole; it is a sum if they add up to it; and it is a mean over targets if they
do so by the numbers of targets that a field does not ignore. It has to be that of varied batches, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, fx

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.units.batch_sums import BatchSums, SumPart, SumStage
from shardwise.units.varied_batches import (
    IGNORED,
    Fields,
    Numbers,
    cut,
    diverse,
    first_part,
    marked,
    repeated,
    rows_of,
    uneven,
)

FITS = {"fp64": 1e-6}  # relative, by precision; the model may compute a part of it in fp32 all the same
FITS_FP32 = 1e-4

TRIED_ROWS = 6  # the rows of the batches that trials vary


class Probe(NamedTuple):
    """``loss(fields, first)`` computes that of some rows, the first of which is row ``first`` of a batch."""

    loss: Callable[[Fields, int], float]
    precision: str


class LossWeight(NamedTuple):
    """How the loss of a part of a batch weighs: as the part has ``rows``, as it is (``sum``), or as it has ``targets``
    in ``field`` that are not ignored."""

    kind: str
    field: str = ""

    @staticmethod
    def parsed(text: str, fields: Fields) -> LossWeight:
        """Return what ``model.loss_weight`` says; raise :class:`ConfigError` if it says nothing legal."""
        kind, _, field = text.partition(":")
        integer = [name for name, value in fields.items() if not value.is_floating_point()]
        legal = kind in ("rows", "sum") and not field or kind == "targets" and field in integer
        if not legal:
            every = ['"rows"', '"sum"', *(f'"targets:{name}"' for name in integer)]
            raise ConfigError.on("model.loss_weight", f"{text!r} is not legal", ", ".join(every))
        return LossWeight(kind, field)

    def __str__(self) -> str:
        return {"rows": "a mean over rows", "sum": "a sum over rows"}.get(
            self.kind, f"a mean over the targets of {self.field}"
        )

    def sums(self, fields: Fields) -> BatchSums | None:
        """Return what a step counts beforehand."""
        if self.kind != "targets":
            return None
        graph = fx.Graph()
        graph.placeholder("env")
        graph.output((graph.call_function(targets, (graph.placeholder("field"),)),))
        part = SumPart(torch.empty((), dtype=torch.int64, device="meta"), Layout.replicated(()), "targets")
        function = fx.GraphModule(torch.nn.Module(), graph).forward
        return BatchSums((SumStage((part,), function, graph, (), (), (), (self.field,), False),), 0)

    def share(self, env: Env, fields: Fields) -> Tensor | float:
        """Return what the loss of this rank's rows of a microbatch is multiplied by; a batch's parts are then added."""
        own = collectives.local_rows(env)
        if self.kind == "targets":
            counted = targets(fields[self.field])
            return counted.to(Backend.of(counted.device).widest_float) / env.counts[0] if own else 0.0
        return own / max(env.rows, 1) if self.kind == "rows" else float(bool(own))


def targets(field: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, an int64 scalar."""
    return (field != IGNORED).sum()


def found_weight(example: Probe, there: Probe, batch: Fields, numbers: Numbers) -> tuple[LossWeight | None, str]:
    """Return what the loss is of the rows; None where nothing fits, or where a trial fails: then also why.

    ``there`` runs on a CPU, with parameters that differ from each other: on an accelerator a wrong index would end the
    process."""
    few = repeated(batch, TRIED_ROWS)
    try:
        fits = (fitting(example, batch) or set()) & (fitting(there, few) or set())
    except Exception as error:  # the user's code may take no other number of rows
        return None, " ".join(str(error).split())

    def legal(changed: Fields) -> bool:
        nonlocal fits
        with suppress(Exception):  # nor need it take other values
            found = fitting(there, changed)
            fits = fits if found is None else fits & found
            return found is not None
        return False

    base = diverse(few)
    if fits and not legal(base):
        base = few
        for name in few:
            one = diverse(base, name)
            base = one if legal(one) else base
    for changed in chain(uneven(base), marked(base, numbers)):
        if not fits:
            break
        legal(changed)
    order = ("rows", "sum", "targets")
    return min(fits, key=lambda weight: order.index(weight.kind), default=None), ""


def fitting(probe: Probe, batch: Fields, sizes: Sequence[int] = ()) -> set[LossWeight] | None:
    """Return the ways in which the loss of a batch is that of its parts, of these ``sizes`` in rows, two by default;
    None where it is not finite."""
    rows = rows_of(batch)
    sizes = sizes or (first_part(batch), rows - first_part(batch))
    parts = cut(batch, sizes)
    whole = probe.loss(batch, 0)
    if not math.isfinite(whole):
        return None
    losses = [probe.loss(part, sum(sizes[:i])) for i, part in enumerate(parts)]
    ways = {LossWeight("rows"): [size / rows for size in sizes], LossWeight("sum"): [1.0] * len(sizes)}
    for name, value in batch.items():
        if not value.is_floating_point():
            counts = [int(targets(part[name])) for part in parts]
            ways[LossWeight("targets", name)] = [n / max(sum(counts), 1) for n in counts]
    # A mean over no targets is 0/0, and counts nothing.
    totals = {way: sum(s * x for s, x in zip(shares, losses, strict=True) if s) for way, shares in ways.items()}
    near = FITS.get(probe.precision, FITS_FP32)
    return {way for way, total in totals.items() if abs(total - whole) <= near * max(abs(total), abs(whole), 1e-6)}
