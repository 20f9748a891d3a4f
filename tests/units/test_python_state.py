"""What a model that was not captured keeps in Python: right on one rank, refused where each part changes its own."""

from __future__ import annotations

import collections
import copy
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks

Body = Callable[[Any, Tensor], Tensor]
PLANS = [(2, 1), (1, 2), (2, 2)]


class Keeping(nn.Module):
    """A branch on values keeps it from being captured."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer = body, nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.seen, self.history, self.ready = 0, list[float](), False
        self.plain, self.other = torch.zeros(3), torch.zeros(3)
        self.queue = collections.deque([1.0], maxlen=3)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.body(self, h * 2 if bool((h > 100).any()) else h)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 4)}


def counted(m: Keeping, h: Tensor) -> Tensor:
    m.seen += 1
    return h.square().mean() * 0.5**m.seen


def logged(m: Keeping, h: Tensor) -> Tensor:
    m.history.append(float(len(m.history)))
    return h.square().mean() * (1 + len(m.history))


def in_place(m: Keeping, h: Tensor) -> Tensor:
    loss = (h - m.plain.to(h)).square().mean()
    m.plain += 1
    return loss


def assigned(m: Keeping, h: Tensor) -> Tensor:
    loss = (h - m.other.to(h)).square().mean()
    m.other = 0.9 * m.other.to(h) + 0.1 * h.detach().mean(0)
    return loss


def queued(m: Keeping, h: Tensor) -> Tensor:
    m.queue.append(m.queue[-1] + 1)
    return h.square().mean() * sum(m.queue)


def own_generator(m: Keeping, h: Tensor) -> Tensor:
    return h.square().mean() * m.random.random()


def to_a_buffer(m: Keeping, h: Tensor) -> Tensor:
    m.seen += 1
    m.mean = m.mean + m.seen
    return h.square().mean()


def python(m: Keeping, h: Tensor) -> Tensor:
    return h.square().mean() * random.random()


def numpy(m: Keeping, h: Tensor) -> Tensor:
    return h.square().mean() * float(np.random.rand())


def mask(m: Keeping, h: Tensor) -> Tensor:
    """What a part of the rows draws is no part of what all draw: nor does a trial show what the loss is of its rows."""
    return (h * torch.from_numpy(np.random.rand(len(h), 1)).to(h)).square().mean()


DEPENDING: dict[str, tuple[Body, str]] = {
    "a number": (counted, r"seen \(from 0 to 1\)"),
    "a list": (logged, r"history \(from \[\] to \[0.0\]\)"),
    "a tensor in place": (in_place, r"plain \(a tensor that is no buffer\)"),
    "a tensor": (assigned, r"other \(a tensor that is no buffer\)"),
    "a queue": (queued, r"queue \(from \[1.0\] to \[1.0, 2.0\]\)"),
    "a generator of its own": (own_generator, "random"),
    "a buffer made of a number": (to_a_buffer, r"seen \(from 0 to 1\)"),
    "Python's generator": (python, "the generator of random"),
    "numpy's generator": (numpy, "the generator of numpy.random"),
    "a mask by numpy's generator": (mask, "the generator of numpy.random"),
}


def plain_steps(module: nn.Module, given: Mapping[str, Tensor], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    module, losses = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**given)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {k: v.detach() for k, v in module.state_dict().items()}


@pytest.mark.parametrize("name", DEPENDING)
def test_one_rank_goes_on_as_one_device_and_others_are_refused(name: str) -> None:
    body, message = DEPENDING[name]
    subject = Subject(Keeping(body), batch())
    random.seed(5)
    np.random.seed(5)
    assert subject.trace.opaque is not None
    assert any("as on one device" in note for note in subject.trace.notes), subject.trace.notes
    choice = OptimizerChoice("sgd", lr=0.1, momentum=0.0)
    ours = sharded_run(subject, 1, steps=3, optimizer=choice)
    random.seed(5)  # no trial has drawn from it
    np.random.seed(5)
    losses, state = plain_steps(subject.module, subject.batch, 3)
    for one, other in zip(ours.losses, losses, strict=True):
        assert abs(one - other) <= TOLERANCE * abs(other)
    for key, value in state.items():
        torch.testing.assert_close(ours.state[key], value, rtol=TOLERANCE, atol=TOLERANCE)
    for dp, microbatches in PLANS:
        with pytest.raises(ConfigError, match=f"depends on {message}.*legal: buffers"):
            sharded_run(subject, dp, microbatches)
    with pytest.raises(ConfigError, match="recomputation would change it again"):
        sharded_run(subject, 1, recompute="full")


CALLS = [0]


def of_a_global(m: Keeping, h: Tensor) -> Tensor:
    CALLS[0] += 1
    return h.square().mean() * CALLS[0]


def of_a_clock(m: Keeping, h: Tensor) -> Tensor:
    return h.square().mean() * (1 + 1000 * time.perf_counter() % 1)


@pytest.mark.parametrize("body", [of_a_global, of_a_clock])
def test_what_no_copy_of_the_module_has_for_itself(body: Body) -> None:
    """The trials have changed it, so that not even one rank goes on as one device."""
    with pytest.raises(ConfigError, match=r"depend on .*outside of the module .*legal: buffers"):
        assert Subject(Keeping(body), batch()).trace


def independent(m: Keeping, h: Tensor) -> Tensor:
    m.seen += 1
    m.ready = True
    m.features = h
    return h.square().mean()


def test_what_nothing_depends_on_is_told() -> None:
    subject = Subject(Keeping(independent), batch())
    told = [note for note in subject.trace.notes if "forward changes" in note]
    assert len(told) == 1 and "seen (from 1 to 2)" in told[0] and "ready" not in told[0] and "features" not in told[0]
    for dp, microbatches in [(1, 1), *PLANS]:
        found = errors(sharded_run(subject, dp, microbatches), plain_run(subject))
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


def in_evaluation_too(m: Keeping, h: Tensor) -> Tensor:
    m.seen += not m.training
    return h.square().mean() * (0.5**m.seen if m.training else 1.0)


def of_training_alone(m: Keeping, h: Tensor) -> Tensor:
    if not m.training:
        return h.square().mean()
    m.seen += 1
    return h.square().mean() * 0.5**m.seen


@pytest.mark.parametrize("body", [counted, in_evaluation_too])
def test_evaluations_that_training_would_change(body: Body) -> None:
    one = Compiled(Keeping(body), Plan.of(), batch())
    with pytest.raises(ConfigError, match=r"evaluation and training both depend on seen"):
        assert one.evaluation().general


def test_an_evaluation_does_not_advance_training() -> None:
    subject = Subject(Keeping(of_training_alone), batch())
    compiled = subject.compile(1, 1, "none")

    def rank(comm: Any) -> list[float]:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0, momentum=0.0), strict=True)
        losses = []
        for _ in range(3):
            losses.append(float(engine.step(subject.batch, 8).loss))
            losses.append(float(engine.evaluate(subject.batch, 8).loss))
        return losses

    ours = run_ranks(compiled.plan.mesh, rank, timeout=60)[0]
    module, expected = copy.deepcopy(subject.module), []
    for _ in range(3):
        for training in (True, False):
            expected.append(float(module.train(training)(**subject.batch).detach()))
    assert ours == pytest.approx(expected, rel=TOLERANCE)


def test_each_training_starts_from_what_the_model_had() -> None:
    """Also where one thread has several, as where a step is timed before a training."""
    subject = Subject(Keeping(counted), batch())
    compiled, expected = subject.compile(1, 1, "none"), plain_losses(subject.module, subject.batch, 2)
    for _ in range(2):
        comm = AloneCommunicator(compiled.plan.mesh, 0, torch.device("cpu"))
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0, momentum=0.0), strict=True)
        ours = [float(engine.step(subject.batch, 8).loss) for _ in range(2)]
        assert ours == pytest.approx(expected, rel=TOLERANCE)


def plain_losses(module: nn.Module, given: Mapping[str, Tensor], forwards: int) -> list[float]:
    module = copy.deepcopy(module)
    return [float(module(**given).detach()) for _ in range(forwards)]


def test_nothing_that_the_user_holds_is_changed() -> None:
    def changing(m: Keeping, h: Tensor) -> Tensor:
        m.seen += 1
        m.history.append(1.0)
        m.plain.add_(1)
        m.mean.add_(1)
        random.random()
        np.random.rand()
        return h.square().mean()

    model, given = Keeping(changing), batch()
    before, fields = copy.deepcopy(model.state_dict()), {k: v.clone() for k, v in given.items()}
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert Compiled(model, Plan.of(precision="fp32"), given).general.opaque is not None
    assert (model.seen, model.history, float(model.plain.sum())) == (0, [], 0.0)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(torch.equal(fields[k], v) for k, v in given.items())
