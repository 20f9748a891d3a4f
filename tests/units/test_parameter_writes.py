"""A forward that writes to a parameter is refused, in the trial or in the step that does so; a trial writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

Write = Callable[["Writing"], Any]


class Writing(nn.Module):
    """A branch on values keeps it from being captured, and ``locals()`` the branch from running as a part; it writes in
    the steps from ``after`` on."""

    steps: Tensor

    def __init__(self, write: Write, after: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write, self.after, self.layer = write, after, nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if int(self.steps) >= self.after and locals():
            self.write(self)
        self.steps += 1
        return self.layer(x).square().mean()


def in_place(m: Writing) -> None:
    with torch.no_grad():
        m.layer.weight.clamp_(-0.1, 0.1)


def through_data(m: Writing) -> None:
    m.layer.weight.data.mul_(0.5)


def through_a_view_of_data(m: Writing) -> None:
    m.layer.weight.data.view(-1)[0] = 5.0


def through_data_of_a_view(m: Writing) -> None:
    m.layer.weight.detach().T.data.zero_()


def swapped(m: Writing) -> None:
    m.layer.weight.data = m.layer.weight.data * 0.5


def new_parameter(m: Writing) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight.detach() * 0.5)


def by_numpy(m: Writing) -> None:
    m.layer.weight.detach().numpy()[:] *= 0.5


def same_values(m: Writing) -> None:
    m.layer.weight.data.clamp_(-10, 10)


WRITES = [
    in_place, through_data, through_a_view_of_data, through_data_of_a_view, swapped, new_parameter, by_numpy,
    same_values,
]  # fmt: skip
MESSAGE = "model: forward writes to the parameter layer.weight; legal: to write to buffers"


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_write_is_refused_and_destroys_nothing(write: Write, precision: str) -> None:
    model = Writing(write)
    model = model.double() if precision == "fp64" else model
    weight = model.layer.weight
    before, place = weight.detach().clone(), weight.data_ptr()
    # numpy has no bf16: there such a forward fails.
    message = "model: its forward fails" if (write, precision) == (by_numpy, "bf16") else MESSAGE
    with pytest.raises(ConfigError, match=message):
        assert Compiled(model, Plan.of(precision=precision), {"x": torch.randn(8, 4)}).general
    assert model.layer.weight is weight and weight.data_ptr() == place and torch.equal(weight, before)


@pytest.mark.parametrize("write", [w for w in WRITES if w is not by_numpy])
def test_a_write_in_a_later_step(write: Write) -> None:
    subject = Subject(Writing(write, after=2), {"x": torch.randn(8, 4)})
    assert subject.trace.opaque is not None
    sharded_run(subject, 2, steps=2)
    with pytest.raises(ConfigError, match=MESSAGE):
        sharded_run(subject, 2, steps=3)


def reads(m: Writing) -> None:
    copy = m.layer.weight.data.clone()
    copy.mul_(2)


def test_reading_is_legal() -> None:
    subject = Subject(Writing(reads), {"x": torch.randn(8, 4)})
    for dp, microbatches in ((1, 1), (2, 1), (1, 2), (2, 2)):
        assert max(errors(sharded_run(subject, dp, microbatches), plain_run(subject)).values()) <= TOLERANCE


class Fields(Writing):
    def forward(self, x: Tensor) -> Tensor:
        x[x > 1] = 0
        return super().forward(x)


def test_the_users_batch_stays_as_it_is() -> None:
    given = {"x": torch.randn(8, 4)}
    before = given["x"].clone()
    assert Compiled(Fields(reads), Plan.of(), given).general.opaque is not None
    assert torch.equal(given["x"], before)
