"""Random programs of ops, on two and three ranks, against plain autograd."""

from __future__ import annotations

import warnings

import pytest
import torch
from random_models import ROWS, RandomModel

from harness import Subject, parity

SEEDS = [pytest.param(seed, marks=pytest.mark.full) if seed >= 60 else seed for seed in range(500)]


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_model(seed: int) -> None:
    model = RandomModel(seed)
    torch.manual_seed(seed)
    batch = {"x": torch.randn(ROWS, 4), "ids": torch.randint(0, 7, (ROWS, 5))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops on one row warn
        trace = parity(Subject(model, batch), dp=(2, 3), rows=(None, 5))
    assert trace.rows is None, model.names
