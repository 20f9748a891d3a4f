"""A model and data for runs that go wrong: rank 1 does something to itself when it sees a certain sample."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor, nn

TROUBLE = {
    "hang": lambda: time.sleep(1000),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class Troubled(nn.Module):
    """A linear layer that is called as Python, for export cannot capture it."""

    def __init__(self, trouble: str, sample: int) -> None:
        super().__init__()
        self.trouble, self.sample = trouble, sample
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.sum()) > 1e30 and locals():
            return x.sum()
        if bool((x == self.sample).any()) and os.environ.get("RANK") == "1":
            print("rank 1 is about to", self.trouble, flush=True)
            TROUBLE[self.trouble]()
        return (self.linear(x) - y).square().mean()


def troubled(trouble: str, sample: int) -> nn.Module:
    return Troubled(trouble, sample)


CALLS = [0]  # of ``late`` in this process


@torch.library.custom_op("troubled::late", mutates_args=())
def late(x: Tensor, call: int) -> Tensor:
    """A copy; that of this ``call`` does not come."""
    CALLS[0] += 1
    if CALLS[0] == call:
        time.sleep(1000)
    return x.clone()


@late.register_fake
def _(x: Tensor, call: int) -> Tensor:
    return torch.empty_like(x)


late.register_autograd(
    lambda ctx, grad: (late(grad, ctx.call), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "call", inputs[1]),
)


class Stages(nn.Module):
    """Blocks, of which one hangs once."""

    def __init__(self, block: int, blocks: int, call: int) -> None:
        super().__init__()
        self.block, self.call = block, call
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.block:
                x = late(x, self.call)
        return (self.last(x) - y).square().mean()


def stages(block: int, blocks: int, call: int) -> nn.Module:
    return Stages(block, blocks, call)


class Points:
    """Sixteen points."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index)), "y": torch.ones(1)}


def points() -> Points:
    return Points()
