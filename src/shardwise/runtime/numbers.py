"""The host reads a step's numbers without waiting for more than that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.backend import Backend


@dataclass
class Numbers:
    """These are 0-d tensors on their way to the host.

    Reading a device's tensor makes the host wait for all that has been issued by then, which includes the step after
    this one.  So the tensors are packed into one, which is copied to page-locked memory as soon as the step has been
    issued, and read once the event behind that copy has occurred.  On a CPU there is nothing to copy.
    """

    tensors: Sequence[Tensor]
    _copy: Tensor | None = None
    _copied: torch.Event | None = None
    _read: list[float] | None = field(default=None, repr=False)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Numbers:
        """Issue the copy of some 0-d tensors, all on one device; nothing waits."""
        device = tensors[0].device
        backend = Backend.of(device)
        if not backend.asynchronous:
            return Numbers(tensors)
        packed = torch.stack([tensor.detach().to(backend.widest_float) for tensor in tensors])
        copy = torch.empty(len(tensors), dtype=packed.dtype, pin_memory=backend.pins)
        copy.copy_(packed, non_blocking=True)
        return Numbers(tensors, copy, backend.event(device))

    def read(self) -> list[float]:
        """Return the numbers; the host waits until their step is done, and no longer."""
        if self._read is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._read = [float(one) for one in self.tensors] if self._copy is None else self._copy.tolist()
        return self._read
