"""The sums over a batch's rows that a step makes before its first forward, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.units.batch_sums import BatchSums, SumPart, at_least_one, flattened


class StepSums:
    """The sums of one batch; ``each`` are the sums of its microbatches' traces, which have the same numbers.

    The parts of a stage lie in one row, (1, elements) if they are of the whole batch and else (microbatches, elements),
    which :meth:`take` makes and whoever asked for it sums over ranks, in place.
    """

    def __init__(self, each: Sequence[BatchSums], cuts_batch: bool) -> None:
        self.each, self.cuts_batch = each, cuts_batch
        self._rows: list[Tensor] = []
        self._shapes: list[list[torch.Size]] = []

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.each[0].stages)

    def take(self, parts: Iterable[Sequence[Tensor]]) -> Tensor:
        """Return the row of the next stage, given this rank's parts of its sums for each microbatch."""
        stage, rows = self.each[0].stages[len(self._rows)], list[Tensor]()
        for own in parts:
            row = flattened(own, stage.floats)
            if not rows:
                self._shapes.append([one.shape for one in own])
            if rows and self.cuts_batch:
                rows[0] += row
            else:
                rows.append(row)
            del own, row  # so that they are not held while the next microbatch's are made
        self._rows.append(rows[0][None] if len(rows) == 1 else torch.stack(rows))
        return self._rows[-1].view(-1)

    def of(self, m: int) -> MicrobatchSums:
        """Return the sums that microbatch ``m`` reads."""
        return MicrobatchSums(self, m)

    @property
    def targets(self) -> Tensor | None:
        """The number of targets, or the sum of their weights, of the batch or of each microbatch, 1-d; None where the
        loss is not a mean over targets."""
        weight = self.each[0].weight
        return None if weight is None else self.elements(weight).squeeze(1)

    def elements(self, number: int) -> Tensor:
        """Return a sum in the dtype of its stage, (1 or microbatches, elements)."""
        stage, first, size, _ = self._place(number)
        return self._rows[stage][:, first : first + size]

    def value(self, number: int, m: int) -> Tensor:
        """Return a sum as microbatch ``m`` reads it."""
        *_, shape = self._place(number)
        found = self.elements(number)[0 if self.cuts_batch else m]
        if not self.cuts_batch and number == self.each[0].weight:
            found = at_least_one(found)
        return found.view(shape).to(self.part(number).dtype)

    def part(self, number: int) -> SumPart:
        """Return what is known of a sum."""
        return [one for stage in self.each[0].stages for one in stage.parts][number]

    def _place(self, number: int) -> tuple[int, int, int, torch.Size]:
        """Return the stage of a sum, the first of its elements and their number in the stage's row, and its shape."""
        for stage, shapes in enumerate(self._shapes):
            if number < len(shapes):
                sizes = [shape.numel() for shape in shapes]
                return stage, sum(sizes[:number]), sizes[number], shapes[number]
            number -= len(shapes)
        raise IndexError(number)


class MicrobatchSums(Sequence[Tensor]):
    """The sums that a microbatch reads, each made when it is asked for: only then has the step summed it."""

    def __init__(self, sums: StepSums, m: int) -> None:
        self._sums, self._m = sums, m

    def __len__(self) -> int:
        return sum(len(stage.parts) for stage in self._sums.each[0].stages)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        return self._sums.value(number, self._m)
