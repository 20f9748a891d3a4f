"""Microbatches whose forward reads other values in Python than that of the whole batch does: each has the trace that is
captured for what it reads of its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.capture.coins import Drawing
from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.core.structure import like
from shardwise.units.trace import Trace

MOST = 16
"""Of so many ways to decide, microbatches of one size have traces at once; the one that was made first ends."""


@dataclass
class OwnReads:
    """The traces of a computation's microbatches: ``first(size)`` returns the one for the first rows of its example,
    ``capture(part)`` a new one for other rows, and ``agree(sizes)`` says whether the loss of a batch is that of its
    microbatches."""

    first: Callable[[int], Trace]
    capture: Callable[[Mapping[str, Tensor]], Trace]
    agree: Callable[[tuple[int, ...]], bool]
    others: dict[int, list[Trace]] = field(default_factory=dict)

    def traces(
        self, whole: Trace, fields: Mapping[str, Tensor], sizes: Sequence[int], buffers: Mapping[str, Tensor],
        drawing: Drawing,
    ) -> tuple[Trace, ...] | None:  # fmt: skip
        """Return the traces of the microbatches of a batch, of these sizes; None where all decide as the ``whole``.

        Raises :class:`ConfigError` where a trial does not show that they make the step of the whole batch."""
        assert whole.checks is not None
        if all(one.checks is None or one.checks.reads == whole.checks.reads for one in map(self.first, sizes)):
            return None
        found, start = list[Trace](), 0
        for size in sizes:
            part = like({n: v[start : start + size] if has_rows(n) else v for n, v in fields.items()}, fields)
            found.append(self._of(part, size, buffers, drawing))
            start += size
        if not self.agree(tuple(sizes)):
            wrong = f"{len(sizes)}, of which each decides in Python by its own values, and a trial does not show that"
            raise ConfigError.on("microbatches", f"{wrong} the loss of a batch is that of its microbatches", "1")
        return tuple(found)

    def _of(self, part: Mapping[str, Tensor], size: int, buffers: Mapping[str, Tensor], drawing: Drawing) -> Trace:
        others = self.others.setdefault(size, [])
        for one in (self.first(size), *others):
            if one.checks is None or one.checks.hold(part, buffers, drawing):
                return one
        found = self.capture(part)
        others.append(found)
        del others[:-MOST]
        return found
