"""The checks of a capture: what forward reads in Python of a batch, and of random numbers that are drawn for all rows,
and what it read when it was captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from shardwise.capture.coins import Drawing
from shardwise.capture.from_batch import FromBatch, from_batch
from shardwise.capture.reads import sized
from shardwise.core.fields import has_rows, is_kept
from shardwise.graph.assumed import keep_checks
from shardwise.graph.functional import Normal
from shardwise.graph.schema import outputs_of


@dataclass(frozen=True)
class Checks:
    """The tensors ``of_batch`` are those that ``reads`` read, one after the other."""

    of_batch: FromBatch
    reads: tuple[Any, ...]
    rows: int | None = None  # of the batches for which it holds, if they all have this number

    @property
    def vary(self) -> bool:
        """Whether a batch, or a step by its random numbers, may decide otherwise, and not new values of buffers alone,
        which no forward writes."""
        return self.of_batch.varies

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that forward reads."""
        return self.of_batch.fields

    @property
    def sized(self) -> bool:
        """Whether forward reads sizes that follow from values."""
        return sized(self.reads)

    def hold(self, fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing) -> bool:
        """Whether forward reads of a batch, all rows of it on the host, in the step of ``drawing`` what it read when it
        was captured."""
        if self.rows is not None and any(value.shape[0] != self.rows for n, value in fields.items() if has_rows(n)):
            return False
        try:
            operands = self.of_batch.of(fields, buffers, drawing)
        except (IndexError, RuntimeError):  # the answers are in this graph: with others its sizes do not fit
            return False
        for read in self.reads:
            own, operands = operands[: read.operands], operands[read.operands :]
            answer = read.of(own)
            if type(answer) is not type(read.answer) or answer != read.answer:
                return False  # what is read later may depend on this
        return True


def take_checks(normal: Normal) -> Checks | None:
    """Take what is read out of the outputs of a graph, in place, and return the checks; None if nothing is read.  What
    the capture took for granted is checked in the graph.

    Raises :class:`Uncapturable` where that depends on parameters, random numbers of rows, or buffers that forward
    writes."""
    reads = normal.captured.reads
    number = sum(read.operands for read in reads)
    if not number:
        return None
    every = outputs_of(normal.graph)
    last = 1 + sum(map(is_kept, normal.updates))
    read = every[last - number : last]
    _keep_outputs(normal, [*every[: last - number], *every[last:]])
    normal.updates[last - 1 - number : last - 1] = []
    nodes = iter(read)
    each = [(one, [next(nodes) for _ in range(one.operands)]) for one in reads]
    keep_checks(normal.graph, [(own[0], bool(one.answer), one.place) for one, own in each if one.assumed])
    before = [(one, own) for one, own in each if not one.assumed]
    if not before:
        return None
    why = "forward decides in Python by values that depend on"
    of_batch = from_batch(normal, [node for _, own in before for node in own], why)
    return Checks(of_batch, tuple(one for one, _ in before), normal.captured.rows)


def _keep_outputs(normal: Normal, kept: Sequence[fx.Node]) -> None:
    (output,) = normal.graph.find_nodes(op="output")
    output.args = (tuple(kept),)
