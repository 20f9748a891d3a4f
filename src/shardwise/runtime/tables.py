"""The gradient of a table whose lookups are sparse has the rows that were looked up.  Only these rows travel, are
updated, and are sent to ranks that have the table and do not update it.

A gradient is added up over ranks as what it is in the table of data parallelism (``parallel/data.py``): P → R gathers
the rows of all ranks, P → S and P → O send each row to the rank that updates it.  How many rows a rank has is known
only when it has them, so ranks first tell each other, and the hosts wait for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.flat import FlatShard
from shardwise.core.optim import BY_ROWS, OptimizerChoice
from shardwise.core.optimizers import ROWS
from shardwise.core.plan import Plan
from shardwise.parallel.data import SHARDS
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.handles import Completed, Handle, Then
from shardwise.runtime.optimizer import FlatOptimizer, Settings, arrange
from shardwise.units.trace import Bucket


class Rows(NamedTuple):
    """Some rows of a table: their ``numbers`` (n,), ascending and each once, and their ``values`` (n, width)."""

    numbers: Tensor
    values: Tensor

    def between(self, held: FlatShard) -> Rows:
        """Return those in a range of the flat table, which has whole rows."""
        width = self.values.shape[1]
        first, last = _places(self.numbers, [held.start // width, held.stop // width])
        return Rows(self.numbers[first:last], self.values[first:last])


class TableGradient:
    """The gradient of the table of ``bucket``, of which ``held`` is updated here.

    ``touched`` are the numbers of held rows that have been updated since the other ranks were sent what is held; None
    says that it may be any.
    """

    def __init__(self, bucket: Bucket, held: FlatShard, device: torch.device) -> None:
        self.held, self.width = held, bucket.width
        self._rows, self._device = bucket.parameters[0].shape[0], device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._nothing = Rows(none, torch.zeros(0, self.width, dtype=bucket.wide, device=device))
        self._summed, self._added = self._nothing, list[Rows]()
        self.touched: list[Tensor] | None = None

    def clear(self) -> None:
        """Begin a new gradient, which is zero."""
        self._summed, self._added = self._nothing, []

    def add(self, numbers: Tensor, gradient: Tensor, padding: int) -> None:
        """Add the ``gradient`` (..., width) of rows that were looked up by their ``numbers`` (...); that of the row
        ``padding`` does not count."""
        numbers, values = numbers.reshape(-1), gradient.reshape(-1, self.width).to(self._nothing.values.dtype)
        if padding >= 0:
            counts = numbers != padding
            numbers, values = numbers[counts], values[counts]
        self._added.append(Rows(numbers.to(torch.int64), values))

    @property
    def rows(self) -> Rows:
        """Return what the gradient is now; all other rows of it are zero."""
        if self._added:
            self._summed, self._added = self._sum([self._summed, *self._added]), []
        return self._summed

    def replace(self, held: Tensor) -> None:
        """Set the gradient of what is ``held``, given as a flat tensor."""
        every, first = held.view(-1, self.width), self.held.start // self.width
        places = every.any(1)
        places[self.rows.between(self.held).numbers - first] = True  # a row that was looked up stays one
        numbers = places.nonzero()[:, 0]
        self._summed, self._added = Rows(numbers + first, every[numbers]), []

    def dense(self) -> Tensor:
        """Return the gradient of what is held, flat, with the rows that are zero."""
        mine, found = self.rows.between(self.held), self._nothing.values.new_zeros(self.held.numel)
        found.view(-1, self.width)[mine.numbers - self.held.start // self.width] = mine.values
        return found

    def norm(self, part: FlatShard) -> Tensor:
        """Return the norm of the gradient of a range of the table, a 0-d tensor."""
        found: Tensor = torch.linalg.vector_norm(self.rows.between(part).values)
        return found

    def _sum(self, each: Sequence[Rows]) -> Rows:
        """Add up rows, the numbers of which may come several times, in the order given: all ranks get the same bits."""
        if not any(len(one.numbers) for one in each):
            return self._nothing
        numbers, where = torch.unique(torch.cat([one.numbers for one in each]), return_inverse=True)
        values = torch.cat([one.values for one in each])
        total = values.new_zeros(len(numbers), self.width)
        if Backend.of(self._device).kind == "cpu":
            return Rows(numbers, total.index_add_(0, where, values))
        return Rows(numbers, total.index_put_((where,), values, accumulate=True))  # in a fixed order, on a GPU as well

    # ---- over ranks --------------------------------------------------------------------------------------------------

    def reduce(self, comm: Communicator, axes: tuple[str, ...], lane: str, what: str) -> Handle:
        """Post the sum over ``axes``, which all ranks get."""
        return _gather(comm, axes, self.rows, lane, what, self._set)

    def send_to_owners(self, comm: Communicator, owners: Sequence[FlatShard], lane: str, what: str) -> Handle:
        """Post the rows to the ranks over ``dp``, the first of which own these ranges; each is left with the sum of its
        own."""
        mine, size = self.rows, comm.group(SHARDS).size
        edges = [owners[0].start // self.width, *(owner.stop // self.width for owner in owners)]
        places = _places(mine.numbers, edges)
        sent = [last - first for first, last in zip(places, places[1:], strict=False)]
        counts = _counts(comm, SHARDS, sent + [0] * (size - len(sent)), lane, what)
        came, packed = sum(row[comm.group(SHARDS).index] for row in counts), _packed(mine)
        inbox, each = packed.new_empty(came, packed.shape[1]), packed.shape[1]
        sizes = [[count * each for count in row] for row in counts]
        handle = comm.all_to_all(inbox.view(-1), packed.view(-1), SHARDS, lane=lane, what=what, sizes=sizes)
        return Then([handle], lambda: self._set([_unpacked(inbox, mine.values.dtype)]))

    def _set(self, each: Sequence[Rows]) -> None:
        self._summed = self._sum(each)

    def refresh(self, comm: Communicator, param: Tensor, owners: int, lane: str, what: str) -> Handle:
        """Post the rows that have been updated on the first ``owners`` ranks over ``dp``, to be written into the flat
        table ``param`` of all ranks."""
        table = param[: self._rows * self.width].view(-1, self.width)
        touched: Tensor = torch.unique(torch.cat([self._nothing.numbers, *(self.touched or ())]))
        self.touched = []

        @torch.no_grad()
        def write(each: Sequence[Rows]) -> None:
            for one in each:
                table[one.numbers] = one.values

        with torch.no_grad():
            mine = Rows(touched, table[touched])
        return _gather(comm, (SHARDS,), mine, lane, what, write, owners)


class TableOptimizer(FlatOptimizer):
    """An optimizer of one segment of a table, which updates rows and leaves all others, and their state, as they are.

    Its numbers are those of :mod:`torch.optim` on a sparse gradient, and on a dense one whose other rows are zero.
    """

    @torch.no_grad()
    def step_rows(
        self, settings: Settings, rows: Rows, grad_scale: Tensor | None, skip: Tensor, clip_value: float | None = None
    ) -> None:
        """Update ``rows`` of the table by their gradient; the other arguments are those of :meth:`step`.

        The host looks at ``skip``, as it has waited for the number of rows before.
        """
        if not self.segments or bool(skip):
            return
        assert self._optimizer is not None
        arrange(self._optimizer, settings)
        width, (segment,), (group,) = rows.values.shape[1], self.segments, self._optimizer.param_groups
        at, state = rows.numbers - segment.start // width, self._state(0)
        change = rows.values if grad_scale is None else rows.values * grad_scale
        if clip_value is not None:
            change = change.clamp(-clip_value, clip_value)
        if group.get("maximize"):
            change = -change
        rate = group["lr"]
        if self.choice.name == "adagrad":
            sums = state["sum"].view(-1, width)
            new = sums.index_select(0, at).addcmul_(change, change)
            sums.index_copy_(0, at, new)
            change = change / new.sqrt_().add_(group["eps"])
            state["step"] += 1
        elif self.choice.name == "sparse_adam":
            state["step"] += 1
            change, rate = _adam(change, at, state, group)
        segment.param.view(-1, width).index_add_(0, at, change, alpha=-rate)


def check_tables(buckets: Iterable[Bucket], plan: Plan, optimizer: OptimizerChoice) -> None:
    """Raise :class:`ConfigError` where the gradient of a parameter is not what its optimizer takes: rows, or all."""
    for parameter, table in ((p, b.table) for b in buckets if b.learns for p in b.parameters):
        own = optimizer.part_of(parameter.name, tuple(parameter.shape))
        if table and not own.by_rows:
            wrong = f'"{own.name}" updates all rows of {parameter.name}, whose lookups are sparse'
            raise ConfigError.on("optimizer", wrong, f'{BY_ROWS}; or sparse_gradients = "dense"')
        if own.name in ROWS and (not table or plan.serving.apart):
            why = "which servers apart do not know" if table else "whose gradient is dense"
            wrong = f'"{own.name}" updates the rows that were looked up of {parameter.name}, {why}'
            legal = (
                "a table of nn.Embedding(sparse=True) that lookups alone read, under a plan with sparse_gradients = "
                '"rows" where every rank has it whole, and another optimizer for all else'
            )
            raise ConfigError.on("optimizer", wrong, legal)


def _adam(
    change: Tensor, at: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> tuple[Tensor, float]:  # fmt: skip
    """Update the averages of the rows ``at`` by their gradient; return by what and at which rate these rows move."""
    (first, second), step = group["betas"], int(state["step"])
    averages, squares = (state[key].view(-1, change.shape[1]) for key in ("exp_avg", "exp_avg_sq"))
    average = averages.index_select(0, at).lerp_(change, 1 - first)
    square = squares.index_select(0, at).mul_(second).addcmul_(change, change, value=1 - second)
    averages.index_copy_(0, at, average)
    squares.index_copy_(0, at, square)
    rate = group["lr"] * math.sqrt(1 - second**step) / (1 - first**step)
    return average.div_(square.sqrt_().add_(group["eps"])), rate


def _gather(
    comm: Communicator, axes: tuple[str, ...], mine: Rows, lane: str, what: str,
    finish: Callable[[Sequence[Rows]], None], senders: int = 0,
) -> Handle:  # fmt: skip
    """Post the rows of all ranks over ``axes``, or of the first ``senders`` of them, to all, who ``finish`` with them
    in the order of ranks."""
    group, own = comm.group(axes), _packed(mine)
    counts = [row[0] for row in _counts(comm, axes, [len(own)], lane, what)]
    if not any(counts):
        return Completed()
    if 0 < senders < group.size:  # then only they send, each as much as it has
        inbox = [own if k == group.index else own.new_empty(counts[k], own.shape[1]) for k in range(senders)]
        handles = [
            comm.broadcast(one, axes, root, lane=lane, what=f"{what} of server {root}")
            for root, one in enumerate(inbox)
        ]  # fmt: skip
    else:
        every = own.new_zeros(group.size, max(counts), own.shape[1])
        every[group.index, : len(own)] = own
        handles = [comm.all_gather(every, every[group.index], axes, lane=lane, what=what)]
        inbox = [*every]
    dtype = mine.values.dtype
    return Then(handles, lambda: finish([_unpacked(one[:n], dtype) for n, one in zip(counts, inbox, strict=False)]))


def _packed(rows: Rows) -> Tensor:
    """Return rows as bytes (n, bytes of a row): they are sent together with their numbers."""
    return torch.cat([rows.numbers[:, None].view(torch.uint8), rows.values.contiguous().view(torch.uint8)], 1)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Rows:
    """Return what :func:`_packed` was given."""
    size = torch.int64.itemsize
    numbers, values = (
        part.clone(memory_format=torch.contiguous_format)  # a single row has other strides, and counts as contiguous
        for part in (packed[:, :size], packed[:, size:])
    )
    return Rows(numbers.view(torch.int64)[:, 0], values.view(dtype))


def _counts(comm: Communicator, axes: str | tuple[str, ...], mine: list[int], lane: str, what: str) -> list[list[int]]:
    """Return the counts of every rank over ``axes``; the host waits for them."""
    here = torch.tensor(mine, device=comm.device)
    every = here.new_zeros(comm.group(axes).size, len(mine))
    comm.all_gather(every, here, axes, lane=lane, what=f"number of rows of {what}").wait()
    found: list[list[int]] = every.tolist()
    return found


def _places(numbers: Tensor, edges: Sequence[int]) -> list[int]:
    """Return how many of the ascending ``numbers`` are below each edge."""
    found: list[int] = torch.searchsorted(numbers, torch.tensor(edges, device=numbers.device)).tolist()
    return found
