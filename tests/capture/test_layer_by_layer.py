"""Recurrent networks run layer by layer where they drop elements between layers, and compute what torch's own do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.capture.intercept import Intercept

CELLS = {
    "lstm": nn.LSTM(3, 4, 3, dropout=0.4, bidirectional=True, proj_size=2),
    "gru": nn.GRU(3, 4, 2, dropout=0.4, batch_first=True),
    "rnn_tanh": nn.RNN(3, 4, 3, dropout=0.4, bias=False),
    "rnn_relu": nn.RNN(3, 4, 2, dropout=0.4, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_layer_by_layer_is_the_same(name: str, train: bool) -> None:
    """With torch's own generator even what is dropped is the same."""
    cell, calls = CELLS[name].train(train), list[str]()

    def noted(func: Any, args: Any, kwargs: Any, proceed: Any) -> Any:
        calls.append(func.__name__)
        return proceed(func, args, kwargs)

    x = torch.randn(5, 2, 3)
    torch.manual_seed(0)
    expected = cell(x)
    torch.manual_seed(0)
    with Intercept(noted):
        found = cell(x)
    torch.testing.assert_close(found, expected)
    drops = cell.num_layers - 1 if train else 0
    assert calls.count("dropout") == drops
    assert calls.count(name) == (1 + cell.num_layers if train else 1)
