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
        if float(x.sum()) > 1e30:
            return x.sum()
        if bool((x == self.sample).any()) and os.environ.get("RANK") == "1":
            print("rank 1 is about to", self.trouble, flush=True)
            TROUBLE[self.trouble]()
        return (self.linear(x) - y).square().mean()


def troubled(trouble: str, sample: int) -> nn.Module:
    return Troubled(trouble, sample)


class Points:
    """Sixteen points."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index)), "y": torch.ones(1)}


def points() -> Points:
    return Points()
