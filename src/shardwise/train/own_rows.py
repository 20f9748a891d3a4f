"""Batches that a user's loop gives a rank as dicts of tensors: this rank's rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.wrapped import rows_in
from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.core.layout import rank_rows
from shardwise.core.local_options import ISLANDS
from shardwise.core.plan import Plan
from shardwise.core.structure import like, structure_of
from shardwise.data.checksum import checksum_of
from shardwise.data.loader import AXES, Batch
from shardwise.graph.layouts import check_layout
from shardwise.runtime.communicator import Communicator, host_gather, host_sum


def check_fields(batch: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` unless all fields are tensors with the same number of rows."""
    for name, value in batch.items():
        if not has_rows(name):
            continue
        if not isinstance(value, Tensor) or value.dim() == 0:
            what = "a tensor without dims" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise ConfigError(f'batch: field "{name}" is {what}; legal: tensors with rows in their first dim')
        check_layout("batch", f'field "{name}"', value)
    sizes = {name: value.shape[0] for name, value in batch.items() if has_rows(name)}
    if len(set(sizes.values())) != 1:
        raise ConfigError(
            f"batch: fields have different numbers of rows: {sizes}; legal: one number, of at least one field"
        )


def check_same(plan: Plan, comm: Communicator, batch: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` on all ranks unless all have read the same batch, by a checksum of its bytes."""
    if plan.mesh.size > 1:
        check_word(plan, comm, checksum_of(batch))


def check_word(plan: Plan, comm: Communicator, word: int) -> None:
    """Raise :class:`ConfigError` on all ranks unless all have read a batch with this checksum."""
    if plan.mesh.size == 1:
        return
    word %= 1 << 20  # so that the sums below stay within 64 bits
    # Islands that train apart do not wait for each other.
    axes = tuple(name for name in comm.mesh.names if name != ISLANDS) if plan.local.steps else comm.mesh.names
    numbers = torch.tensor([word, word * word])
    total, squares = host_sum(comm, numbers, "the comparison of the batch", axes).tolist()
    if total * total != comm.mesh.axis_size(axes) * squares:  # equal only if all words are
        raise ConfigError(
            "the ranks have read different batches (a dataset that divides itself by rank gives such, and one with "
            "random numbers of its own); legal: the same on all, for example after torch.manual_seed(0); rows that a "
            "rank reads by itself go to trainer.step(batch)"
        )


class OwnRows:
    """Makes a :class:`Batch` of the rows that a rank has read by itself.

    Every rank passes the same number of rows, the same in every call: so a rank knows the rows of the whole batch
    without asking the others.  The first call compares the ranks' numbers, and later ones compare with that of the
    first, alone.  A lone rank may pass any number.
    """

    def __init__(self, plan: Plan, comm: Communicator) -> None:
        self._plan, self._comm = plan, comm
        self._agreed: dict[str, int] = {}

    def batch(self, fields: Mapping[str, Tensor], use: str) -> Batch:
        """Return the batch whose part is ``fields``; batches of another ``use`` may have another number of rows.

        Raises :class:`ConfigError`, in the first call of a use on all ranks, where the numbers of rows do not agree.
        """
        check_fields(fields)
        mesh, microbatches = self._plan.mesh, self._plan.microbatches
        parts, index = mesh.axis_size(AXES), mesh.index(self._comm.rank, AXES)
        rows, form = rows_in(fields), structure_of(fields)
        if form is not None and set(form.kinds.values()) - {"rows", "objects"}:  # what is for all rows
            alike = {name: value for name, value in fields.items() if not has_rows(name)}
            check_same(self._plan, self._comm, like(alike, fields))
        if mesh.size > 1:
            self._compare(rows, use)
        if parts > 1 and rows % microbatches:
            legal = f"a multiple of the plan's microbatches = {microbatches}, or the batches of trainer.loader"
            raise ConfigError.on("batch", f"{rows} rows on each of {parts} ranks", legal)
        ranges = rank_rows(rows * parts, microbatches, parts, index)
        return Batch(
            like(dict(fields), fields), rows * parts, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
        )

    def _compare(self, rows: int, use: str) -> None:
        """Raise :class:`ConfigError` unless all ranks have so many rows."""
        legal = "as many on every rank and in every call, or the batches of trainer.loader"
        if use not in self._agreed:
            every = host_gather(self._comm, torch.tensor([rows]), "the number of rows on each rank").flatten().tolist()
            if len(set(every)) > 1:
                numbers = ", ".join(map(str, every))
                raise ConfigError.on("batch", f"the ranks pass different numbers of rows: {numbers}", legal)
            self._agreed[use] = rows
        elif rows != self._agreed[use]:
            raise ConfigError.on("batch", f"{rows} rows after {self._agreed[use]} in the first call", legal)
