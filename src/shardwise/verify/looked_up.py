"""Tables whose gradients are sparse on one device: torch makes a sum of such a gradient and a dense one dense, and does
not clip sparse ones, so they are dense until an optimizer that takes rows alone needs the rows that were looked up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LookedUp:
    """The rows of each lookup of a step, and the sum of the gradients of its microbatches, by table."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._rows.clear()

    def take(self, name: str, table: Tensor, dtype: torch.dtype) -> None:
        """Take the sparse gradient of a microbatch from a table, so that the next is sparse too; sum in ``dtype``."""
        assert table.grad is not None
        self._rows.setdefault(name, []).append(table.grad.coalesce().indices()[0])
        self._sums[name] = table.grad.to_dense().to(dtype) + self._sums.get(name, 0)
        table.grad = None

    def give(self, masters: Mapping[str, Tensor]) -> None:
        """Add the sums to the gradients of the masters."""
        for name, found in self._sums.items():
            master = masters[name]
            master.grad = found + (0 if master.grad is None else master.grad)
        self._sums.clear()

    def make_sparse(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> None:
        """Give those of several optimizers that take rows alone the rows that were looked up."""
        names = {id(master): name for name, master in masters.items()}
        for one in getattr(optimizer, "each", ()):
            if isinstance(one, torch.optim.SparseAdam):
                for p in (p for group in one.param_groups for p in group["params"]):
                    if p.grad is not None and (found := self._rows.get(names[id(p)])):
                        rows = torch.unique(torch.cat(found))
                        p.grad = torch.sparse_coo_tensor(rows[None], p.grad[rows], p.shape)
