"""Weights that torch's parametrizations make of others: the buffers that these write are state, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from harness import TOLERANCE, OptimizerChoice, Subject, errors, oracle_run, plain_run, sharded_run

MADE: dict[str, Callable[[nn.Module], Any]] = {
    "spectral": spectral_norm, "spectral, of three iterations": lambda m: spectral_norm(m, n_power_iterations=3),
    "spectral, by hooks": nn.utils.spectral_norm, "weight norm": weight_norm, "orthogonal": orthogonal,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, made: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = made(nn.Conv1d(1, 4, 3)), made(nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.conv(x[:, None]).flatten(1).tanh()).square().mean()
        return result


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MADE)
def test_it_trains(name: str) -> None:
    """A step, and then two, each of which writes the vectors of the power iteration once, whatever the microbatches."""
    subject = Subject(Model(MADE[name]), {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(1))})
    assert subject.trace.opaque is None, subject.trace.opaque
    truth = plain_run(subject)
    vectors = [n for n in truth.state if n.endswith(("._u", "_u"))]
    assert bool(vectors) == name.startswith("spectral")
    moved = [float((truth.state[n] - subject.module.state_dict()[n]).abs().max()) for n in vectors]
    assert not vectors or max(moved) > 1e-6
    for dp, microbatches in ((1, 1), (2, 1), (2, 2)):
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)
        two = {"steps": 2, "optimizer": OptimizerChoice("adamw", lr=0.01, eps=1e-3)}
        found = errors(sharded_run(subject, dp, microbatches, **two), oracle_run(subject, microbatches, **two))
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)
