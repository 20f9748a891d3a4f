"""What the loss of a model that was not captured is of its rows, found by trial: its graph is not there to be read.

The example batch is computed whole and in two parts, in evaluation mode (without dropout, and with BatchNorm's running
statistics). The loss is a mean over rows if the parts' losses by their shares of the rows make that of the whole; it is
a sum if they add up to it; and it is a mean over targets if they do so by the numbers of targets that a field does not
ignore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, fx

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.units.batch_sums import BatchSums, SumPart, SumStage

IGNORED = -100  # torch's own number for a target that does not count
FITS = 1e-4  # relative; the trial is in the precision that trains, fp32 at least

Fields = Mapping[str, Tensor]


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


def found_weight(loss: Callable[[Fields], float], batch: Fields) -> LossWeight | None:
    """Return what ``loss``, which a trial computes of some rows, is of them; None where nothing fits or it fails."""
    rows = len(next(iter(batch.values())))
    if rows < 2:
        batch, rows = {k: torch.cat([v, v]) for k, v in batch.items()}, 2
    first = max(1, rows // 3)
    try:
        fits = _fitting(loss, batch, first)
        for changed in _with_ignored(loss, batch, first) if fits else ():
            fits &= _fitting(loss, changed, first)
    except Exception:  # the user's code may take no other number of rows, or fail in evaluation mode
        return None
    return min(fits, key=lambda weight: ("rows", "sum", "targets").index(weight.kind), default=None)


def _fitting(loss: Callable[[Fields], float], batch: Fields, first: int) -> set[LossWeight]:
    """Return the ways in which the loss of a batch is that of its ``first`` rows and that of its others."""
    rows, parts = len(next(iter(batch.values()))), _cut(batch, first)
    whole, losses = loss(batch), list(map(loss, parts))
    ways = {LossWeight("rows"): [first / rows, 1 - first / rows], LossWeight("sum"): [1.0, 1.0]}
    for name, value in batch.items():
        if not value.is_floating_point():
            counts = [int(targets(part[name])) for part in parts]
            ways[LossWeight("targets", name)] = [n / max(sum(counts), 1) for n in counts]
    totals = {way: sum(s * x for s, x in zip(shares, losses, strict=True)) for way, shares in ways.items()}
    return {way for way, total in totals.items() if _close(total, whole)}


def _cut(batch: Fields, first: int) -> list[Fields]:
    return [{k: v[:first] for k, v in batch.items()}, {k: v[first:] for k, v in batch.items()}]


def _with_ignored(loss: Callable[[Fields], float], batch: Fields, first: int) -> Iterator[Fields]:
    """Yield batches in which a field ignores most of its first part, where the model takes that."""
    for name, value in batch.items():
        if value.is_floating_point() or value.dtype is torch.bool or value.device.type != "cpu":
            continue  # on an accelerator a wrong index ends the process
        changed = value.clone()
        changed[:first].view(-1)[1:] = IGNORED
        changed[first:].view(-1)[: changed[first:].numel() // 4] = IGNORED
        try:
            if torch.isfinite(torch.tensor(loss({**batch, name: changed}))):
                yield {**batch, name: changed}
        except Exception:
            continue


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= FITS * max(abs(one), abs(other), 1e-6)
