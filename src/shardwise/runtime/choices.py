"""Choose how the batches of a rank are computed: by their shapes, their rows and their masks."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.coins import Drawing
from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows, is_drawn
from shardwise.core.layout import rank_rows, shard_sizes
from shardwise.core.plan import Plan
from shardwise.core.structure import check_alike, like
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import batch_axes
from shardwise.runtime.communicator import Communicator, host_gather_bytes
from shardwise.runtime.masks import all_ones
from shardwise.units.trace import Trace


class Choices:
    """The choices of a rank; ``summed`` adds up numbers of the host over the ranks that take its steps, in place, and
    ``buffers`` returns the model's by name."""

    def __init__(
        self, comm: Communicator, plan: Plan, summed: Callable[[Tensor, str], Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:  # fmt: skip
        self.comm, self._plan, self._sum, self.buffers = comm, plan, summed, buffers
        axes = batch_axes(plan.mesh)
        self._parts = comm.mesh.axis_size(axes)
        self._index = comm.mesh.index(comm.rank, axes)
        part = plan.microbatches, self._parts, self._index
        # The number of this rank's rows in a batch, by the number of all its rows.
        self.own_rows = functools.cache(lambda rows: sum(stop - start for start, stop in rank_rows(rows, *part)))

    def traces(
        self,
        fields: Mapping[str, Tensor],
        rows: int,
        compiled: Compiled,
        *,
        ones: tuple[str, ...] | None = None,
        general: bool = False,
    ) -> list[Trace]:
        """Return the trace of each microbatch of a batch; ``ones`` are the masks that are all ones in ``fields``;
        ``general`` chooses traces that hold for any masks.
        """
        self.check(fields, rows, compiled)
        if compiled.checks_numbers and compiled.general.own_numbers is not None:
            compiled.general.own_numbers.check(fields)
        ones = () if general or not compiled.masks else self.agreed_ones(fields, ones, compiled)
        sizes = shard_sizes(rows, min(compiled.plan.microbatches, rows))
        return compiled.traces_of(ones, sizes, rows)

    def fitting(
        self, fields: Mapping[str, Tensor], rows: int, compiled: Compiled, drawing: Drawing, alike: bool = False
    ) -> Compiled:
        """Return a computation for a batch of ``rows`` rows, of which this rank has ``fields``: for their shapes, and
        for what forward reads in Python, of the batch and of the random numbers of the step of ``drawing``.  ``alike``
        says that all ranks have these shapes."""
        found = self._of_shapes(fields, compiled, alike)
        if found.general.checks is None:
            return found
        self.check(fields, rows, found)
        if not found.reads_batch:
            return found.deciding(found.example, self.buffers(), drawing)
        if self._plan.local.steps and self._parts > 1:
            wrong = "forward decides in Python by values of the batch, of which ranks of an island have a part each"
            raise ConfigError.on("local", wrong, "one rank for each island, or no islands")
        return found.deciding(self._whole(fields, rows), self.buffers(), drawing)

    def with_draws(
        self, fields: Mapping[str, Tensor], rows: int, compiled: Compiled, drawing: Drawing
    ) -> Mapping[str, Tensor]:
        """Return the fields of a batch of ``rows`` rows with those that forward draws in Python in the step of
        ``drawing``, this rank's rows of them; all ranks call it together."""
        if compiled.general.draws is None:
            return fields
        self.check(fields, rows, compiled)
        found = compiled.drawn(self._whole(fields, rows), self.buffers(), drawing)
        own = rank_rows(rows, self._plan.microbatches, self._parts, self._index)
        parts = {
            name: torch.cat([value[start:stop] for start, stop in own]) if has_rows(name) else value
            for name, value in found.items()
        }  # fmt: skip
        return like({**fields, **parts}, fields)

    def _whole(self, fields: Mapping[str, Tensor], rows: int) -> Mapping[str, Tensor]:
        """Return all rows of a batch, on the host; all ranks call it together."""
        own = {name: value.detach().cpu() for name, value in fields.items()}
        if self._parts == 1:
            return like(own, fields)
        file = io.BytesIO()
        torch.save({name: value.clone() for name, value in own.items() if has_rows(name)}, file)
        every = host_gather_bytes(self.comm, file.getvalue(), "a batch by which forward decides")
        found = [torch.load(io.BytesIO(data)) for data in every]
        parts = [found[rank] for rank in self.comm.mesh.group(self.comm.rank, batch_axes(self._plan.mesh))]
        ranges = [rank_rows(rows, self._plan.microbatches, self._parts, index) for index in range(self._parts)]
        places = torch.tensor([i for one in ranges for start, stop in one for i in range(start, stop)])
        order = places.argsort()
        whole = {
            name: torch.cat([part[name] for part in parts])[order] if has_rows(name) else value
            for name, value in own.items()
        }  # fmt: skip
        return like(whole, fields)

    def _of_shapes(self, fields: Mapping[str, Tensor], compiled: Compiled, alike: bool) -> Compiled:
        """Return a computation for batches of the shapes of ``fields``; ``alike`` says that all ranks have these.

        Otherwise ranks compare them, where the computation has dims that vary.  Raises :class:`ConfigError` on all
        where they differ and the ranks of a step have to have the same."""
        compiled = compiled.of_constants(fields)
        if alike or self._parts == 1:
            return compiled.fitting(fields)
        if not compiled.varies:
            return compiled  # :meth:`check` refuses other shapes, of which the other ranks would not know
        found = compiled.fitting(fields)
        free = found.apart_from(compiled)
        sizes = [size for _, shape, _ in found.form for size in shape]
        every = torch.zeros(self.comm.mesh.size, 2 + len(sizes), dtype=torch.int64)
        every[self.comm.rank] = torch.tensor([1, free, *sizes])
        every = self._sum(every, "the comparison of the shapes of batches")
        ours = every[every[:, 0] == 1]  # this island's
        if bool((ours[:, 2:] != ours[0, 2:]).any()) and not bool(ours[:, 1].all()):
            wrong = "the ranks have rows of different shapes in a step"
            legal = (
                "one shape on all, unless the loss divides a sum over rows by what is the same for all shapes (the "
                "number of rows or of targets, the sum of a mask) and no rows meet elsewhere"
            )
            raise ConfigError.on("batch", wrong, legal)
        return found

    def check(self, fields: Mapping[str, Tensor], rows: int, compiled: Compiled) -> None:
        """Raise :class:`ConfigError` where ``fields`` are not this rank's part of a batch of ``rows`` rows."""
        expected = compiled.example
        check_alike(fields, expected, "batch", example=True)
        compiled.check_constants(fields)
        fields = {name: value for name, value in fields.items() if not is_drawn(name)}
        if set(fields) != set(expected):
            raise ConfigError(f"batch: fields {sorted(fields)}; the model was traced with {sorted(expected)}")
        if rows < 1:
            raise ConfigError(f"batch: {rows} rows; legal: at least 1")
        own = self.own_rows(rows)
        for name, value in fields.items():
            like = expected[name]
            if not has_rows(name):
                if value.shape != like.shape or value.dtype != like.dtype:
                    wrong = f'field "{name}" is {tuple(value.shape)} {value.dtype}'
                    raise ConfigError.on("batch", wrong, f"{tuple(like.shape)} {like.dtype}")
                continue
            if not value.dim() or value.shape[1:] != like.shape[1:] or value.dtype != like.dtype:
                raise ConfigError(
                    f'batch: field "{name}" is {tuple(value.shape)} {value.dtype}; expected (rows, '
                    f"{', '.join(map(str, like.shape[1:]))}) {like.dtype}" + _hint(value, like, name)
                )
            if value.shape[0] != own:
                wrong = f'field "{name}" has {value.shape[0]} rows on this rank'
                raise ConfigError.on("batch", wrong, f"{own}, its part of {rows}")

    def agreed_ones(
        self, fields: Mapping[str, Tensor], ones: tuple[str, ...] | None, compiled: Compiled
    ) -> tuple[str, ...]:
        """Return the names of all masks if they are all ones in this batch, else none; ``ones`` are those that are all
        ones in ``fields``, if the caller knows.

        On a CPU the ranks agree in one small all-reduce.  On a device no rank may wait for that: each decides for its
        own rows.  Only ranks over the batch axes have other rows, so where the traces would communicate differently
        over these axes, masks are never taken to be ones.
        """
        readable = all(Backend.of(fields[name].device).kind == "cpu" for name in compiled.masks)
        here = ones if ones is not None else all_ones(fields, compiled.masks) if readable else ()
        padded = len(here) < len(compiled.masks)
        if not Backend.of(self.comm.device).asynchronous:
            return () if bool(self._sum(torch.tensor([float(padded)]), "padding in masks")) else compiled.masks
        return () if padded or not compiled.alike_over_batch else compiled.masks


def _hint(value: Tensor, like: Tensor, name: str) -> str:
    """Return how to train on rows of several shapes, where a field has another."""
    if value.dim() != like.dim() or value.dtype != like.dtype:
        return ""
    dim = next(d for d in range(1, value.dim()) if value.shape[d] != like.shape[d])
    return f'; legal in several shapes: dims that are named before the first step, varies = {{"{name}.{dim}": LARGEST}}'
