"""torch's hooks on all modules act as on one device: in a graph, or in a model that trains as one unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify


class Model(nn.Module):
    def __init__(self, hooks: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hooks = hooks  # so that tests share no capture with other hooks
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(6, 4), "y": torch.tensor([0, 1, 2, 2, 1, 0])}


Register = Callable[[], Any]
BACKWARD: dict[str, Register] = {
    "backward": lambda: everywhere.register_module_full_backward_hook(
        lambda module, taken, given: tuple(None if one is None else one * 2 for one in taken)
    ),
    "backward, before": lambda: everywhere.register_module_full_backward_pre_hook(
        lambda module, given: tuple(one * 3 for one in given)
    ),
}
FORWARD: dict[str, Register] = {
    "forward": lambda: everywhere.register_module_forward_hook(lambda module, given, found: found * 2),
    "forward, before": lambda: everywhere.register_module_forward_pre_hook(
        lambda module, given: tuple(one * 2 if one.is_floating_point() else one for one in given)
    ),
}


@contextmanager
def registered(register: Register) -> Iterator[None]:
    handle = register()
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("name", [*BACKWARD, *FORWARD])
def test_hooks_on_all_modules(name: str) -> None:
    without = plain_run(Subject(Model(), batch()))
    with registered((BACKWARD | FORWARD)[name]):
        subject = Subject(Model(name), batch())
        truth = plain_run(subject)
        assert max(errors(without, truth).values()) > 0.1
        assert (subject.trace.opaque is not None) == (name in BACKWARD)
        for dp, microbatches in ((1, 1), (2, 1), (2, 2), (1, 3)):
            found = errors(sharded_run(subject, dp, microbatches), truth)
            assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


@pytest.mark.parametrize("name", [*BACKWARD, *FORWARD])
def test_one_device_of_verify_has_them_too(name: str) -> None:
    with registered((BACKWARD | FORWARD)[name]):
        plans = [Plan.of(Mesh.of(dp=2)), *([data_parallel(Plan.of(), 2, 3)] if name in FORWARD else [])]
        for plan in plans:
            report = verify(Model(name), [batch()] * 2, plan)
            assert report.passed, report.worst[:3]
