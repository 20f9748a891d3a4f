"""What a model's code, or torch, warns of while it is captured is a note: a step runs the graph and warns no more."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled


class Warns(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.body, self.cell = own, nn.Linear(3, 1), nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.own:
            warnings.warn("the head is\n  small", stacklevel=1)
            return self.body(self.cell(x[:, None])[0]).mean() + y.mean()
        return F.mse_loss(self.body(x), y)  # (rows, 1) against (rows,)


def notes(own: bool) -> list[str]:
    batch = {"x": torch.randn(6, 3), "y": torch.randn(6)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # notes, and no warnings beside them
        return Compiled(Warns(own), Plan.of(), batch).notes


def test_a_warning_of_the_model() -> None:
    (note,) = notes(True)  # what export says of the LSTM's weights is none of the user's business
    assert note.startswith("warned while it was captured: the head is small (") and "test_warnings.py" in note


def test_a_warning_of_torch() -> None:
    (note,) = notes(False)
    assert "Using a target size" in note and "test_warnings.py" in note
