"""Models that write in place, keep buffers, and hide from autograd: the same numbers, or a refusal that says why."""

from __future__ import annotations

import pytest
import torch
from functional_cases import CASES, DRAWN, REFUSED, Machine, average_with_gradient

from harness import OptimizerChoice, Subject, errors, parity, plain_run, sharded_run
from shardwise.core.errors import ConfigError

ADAM = OptimizerChoice("adamw", lr=0.01, eps=1e-3)  # a larger eps: gradients of pure rounding stay small


def fields() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(7, 4, generator=torch.Generator().manual_seed(1))}


@pytest.mark.quick(1)
@pytest.mark.few(20)
@pytest.mark.parametrize("name", CASES)
def test_writes(name: str) -> None:
    """Gradients, loss and buffers of one step; then two steps of two uneven microbatches, forward run twice."""
    subject = Subject(Machine(CASES[name]), fields())
    trace = parity(subject, dp=(2, 3), keyed=name in DRAWN)
    assert not trace.replicated
    parity(subject, dp=2, rows=(5,), microbatches=2, recompute="full", steps=2, optimizer=ADAM)


def test_buffers_change() -> None:
    """The comparison above would not see buffers that neither side writes."""
    subject = Subject(Machine(CASES["average"]), fields())
    ours = sharded_run(subject, 2)
    assert (ours.state["state"] - subject.module.state).abs().max() > 1e-3
    ours.state["state"] = subject.module.state
    assert errors(ours, plain_run(subject))["state state"] > 1e-3


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_named(name: str) -> None:
    function, reason = REFUSED[name]
    trace = Subject(Machine(function), fields()).trace
    assert trace.opaque is not None
    assert reason in trace.opaque


def test_a_buffer_that_keeps_its_graph_is_refused() -> None:
    """Plain PyTorch takes one step and ends in the second with "backward through the graph a second time"."""
    with pytest.raises(ConfigError, match=r"its graph in the buffer passing \(.*functional_cases.py:\d+\).*detach"):
        _ = Subject(Machine(average_with_gradient), fields()).trace
