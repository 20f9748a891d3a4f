"""The memory of one rank: flat buffers for parameters, masters, gradients and optimizer state, one set for each bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.flat import FlatBuffer
from shardwise.core.optim import OptimizerChoice
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.optimizer import FlatOptimizer, Segment
from shardwise.trace.trace import Bucket

DECAY = "decay"
GRAD_DTYPE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass
class BucketMemory:
    """The buffers of a bucket.

    ``leaves`` are the parameters that units compute with, views of ``param`` for life.  ``master`` is ``param`` itself, or its fp32
    copy under low precision; the optimizer updates it.  ``grads`` are views of ``grad``, which collectives sum in place.
    """

    layout: FlatBuffer
    param: Tensor
    master: Tensor
    grad: Tensor
    leaves: dict[str, Tensor]
    grads: dict[str, Tensor]
    optimizer: FlatOptimizer

    @staticmethod
    def allocate(bucket: Bucket, comm: Communicator, choice: OptimizerChoice) -> BucketMemory:
        """Zeroed buffers for ``bucket``, decayed parameters first, so that the optimizer works on at most two segments."""
        items = [(p.name, p.shape, DECAY if choice.decays(p.name, p.shape) else "plain") for p in bucket.parameters]
        wide = GRAD_DTYPE.get(bucket.dtype, bucket.dtype)
        layout = FlatBuffer.pack(items, 1, wide.itemsize)
        grad = comm.allocate(layout.numel, wide)
        param = torch.zeros(layout.numel, dtype=bucket.dtype, device=comm.device)
        master = param if wide == bucket.dtype else torch.zeros(layout.numel, dtype=wide, device=comm.device)
        leaves = {e.name: param[e.offset : e.stop].view(e.shape).detach().requires_grad_() for e in layout.entries}
        grads = {e.name: grad[e.offset : e.stop].view(e.shape) for e in layout.entries}
        segments = [Segment(master[a:b], grad[a:b], group == DECAY, a) for group, a, b in layout.segments]
        return BucketMemory(layout, param, master, grad, leaves, grads, FlatOptimizer(choice, segments))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set the parameters, masters first, so that nothing of their precision is lost."""
        for entry in self.layout.entries:
            self.master[entry.offset : entry.stop].view(entry.shape).copy_(values[entry.name])
        self.publish()

    def publish(self) -> None:
        """Bring the parameters up to date with their masters."""
        if self.master is not self.param:
            with torch.no_grad():
                self.param.copy_(self.master)

    def masters(self) -> dict[str, Tensor]:
        """The parameters in the precision in which they are updated, as views."""
        return {e.name: self.master[e.offset : e.stop].view(e.shape) for e in self.layout.entries}
