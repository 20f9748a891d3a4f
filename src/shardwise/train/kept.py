"""Values that a program has kept for the user's loop: ranks have them in parts until the loop looks at one."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.layout import rank_rows
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import KeptParts
from shardwise.runtime.communicator import Communicator, host_sum
from shardwise.shard.op_spec import Shard
from shardwise.train.values import Known

_SUMMED = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint8: torch.uint8}  # what every backend can sum


class KeptValue(Known):
    """A value of a batch of ``rows`` rows like ``meta``, whose parts were left by a program."""

    def __init__(self, comm: Communicator, plan: Plan, kept: KeptParts, meta: Tensor, rows: int) -> None:
        self.comm, self.plan, self.kept, self.meta, self.rows = comm, plan, kept, meta, rows
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        """Return the whole tensor on this rank's device; the first time, all ranks call it together."""
        if self.value is None:
            self.value = self._whole().to(self.meta.dtype)
            self.kept.parts.clear()
        return self.value

    def _whole(self) -> Tensor:
        mesh, (placement, parts) = self.comm.mesh, self.kept
        if mesh.size == 1 and len(parts) == 1 and (one := parts[0]) is not None:
            return one
        first = next((part for part in parts if part is not None), None)
        dtype = self.meta.dtype if first is None else first.dtype
        whole = torch.zeros(self.meta.shape, dtype=dtype, device=self.comm.device if first is None else first.device)
        index = mesh.index(self.comm.rank, AXES)
        if mesh.index(self.comm.rank, mesh.other_axes((*AXES, PIPELINE))) == 0:  # the others have the same
            ranges = rank_rows(self.rows, len(parts), mesh.axis_size(AXES), index)
            for m, part in enumerate(parts):
                if part is None:
                    continue
                if isinstance(placement, Shard):
                    _put(whole, part, placement, self.rows, ranges[m])
                elif placement == "P":
                    whole += part
                elif index == 0 and m == 0:
                    whole.copy_(part)
        if mesh.size == 1:
            return whole
        summed = host_sum(self.comm, whole.to("cpu", _SUMMED.get(dtype, dtype)).contiguous(), "a value of the loop")
        return summed.to(whole.device, dtype)


def _put(whole: Tensor, part: Tensor, place: Shard, rows: int, own: tuple[int, int]) -> None:
    """Copy a rank's rows to their place."""
    start, stop = own

    def seen(x: Tensor, size: int) -> Tensor:
        return x.reshape(*x.shape[: place.dim], place.pre, size, place.post, *x.shape[place.dim + 1 :])

    if stop > start:
        view = whole.view(*whole.shape[: place.dim], place.pre, rows, place.post, *whole.shape[place.dim + 1 :])
        view.narrow(place.dim + 1, start, stop - start).copy_(seen(part, stop - start))
