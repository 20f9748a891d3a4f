"""What a forward keeps: buffers that it assigns are state as on one device; what Python keeps is told or refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

Body = Callable[["Keeping", Tensor, Tensor], Tensor]


class Keeping(nn.Module):
    centre: Tensor
    steps: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer = body, nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.plain = torch.zeros(3)
        self.seen, self.history, self.ready = 0, list[float](), False
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x, self.layer(x))


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4)}


def of_fields(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    loss = (h - m.centre).square().mean()
    m.centre = 0.9 * m.centre + 0.1 * x.mean(0)[:3]
    return loss


def read_again(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.centre = m.centre + x.sum(0)[:3]
    return (h - m.centre).square().mean()


def counted(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.steps += 1
    return h.square().mean() * m.steps


def of_outputs(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    loss = (h - m.centre).square().mean()
    m.centre = 0.9 * m.centre + 0.1 * h.detach().mean(0)
    return loss


BODIES = {"of fields": of_fields, "read again": read_again, "counted": counted, "of outputs": of_outputs}


@pytest.mark.parametrize("name", BODIES)
def test_buffers_that_forward_assigns(name: str) -> None:
    """Against ordinary torch over three steps; microbatches write once, but for what depends on parameters."""
    truth, rate = Keeping(BODIES[name]).double(), 0.1
    optimizer = torch.optim.SGD(truth.parameters(), lr=rate)
    given = {"x": batch()["x"].double()}
    for _ in range(3):
        optimizer.zero_grad()
        truth(**given).backward()
        optimizer.step()
    subject = Subject(Keeping(BODIES[name]), batch())
    assert subject.trace.opaque is None and bool(subject.trace.meets) == (name == "of outputs")
    expected = {k: v.detach() for k, v in truth.state_dict().items()}
    for dp, microbatches in [(1, 1), (2, 1), (3, 1)] + ([(1, 3), (2, 2)] if name != "of outputs" else []):
        ours = sharded_run(subject, dp, microbatches, steps=3, optimizer=OptimizerChoice("sgd", lr=rate, momentum=0.0))
        for key, value in expected.items():
            assert torch.allclose(ours.state[key].double(), value.double(), rtol=1e-12, atol=1e-13), (dp, key)


def test_buffers_under_verify() -> None:
    report = verify(Keeping(of_fields), [batch()] * 3, data_parallel(Plan.of(microbatches=2), 2))
    assert report.passed, report.worst[:3]


def in_place(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.plain.mul_(0.9).add_(1)
    return (h - m.plain).square().mean()


def assigned(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    loss = (h - m.plain).square().mean()
    m.plain = 0.9 * m.plain + h.detach().mean(0)
    return loss


def remembered(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    loss = h.square().mean() + sum(((h - one).square().mean() for one in m.memory), torch.zeros(()))
    m.memory = [*m.memory[-2:], h.detach().mean(0)]
    return loss


def scheduled(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.seen += 1
    return h.square().mean() * 0.5**m.seen


def with_gradient(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.centre = h.mean(0)
    return h.square().mean()


def reshaped(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.centre = torch.zeros(4)
    return h.square().mean()


def of_a_parameter(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.clamp_(-1, 1)
    return h.square().mean()


REFUSED: dict[str, tuple[Body, str]] = {
    "a plain tensor in place": (in_place, "forward writes to plain, a tensor that is no buffer"),
    "a plain tensor": (assigned, r"depends on plain \(a tensor that is no buffer\), which it changes"),
    "a list of tensors": (remembered, r"depends on memory \(tensors that are no buffers\), which it changes"),
    "a number": (scheduled, r"depends on seen \(from 0 to 1\), which it changes"),
    "random": (lambda m, x, h: h.square().mean() * random.random(), "depends on the generator of random"),
    "numpy.random": (lambda m, x, h: h.square().mean() * np.random.rand(), "depends on the generator of numpy.random"),
    "a buffer with a gradient": (
        with_gradient,
        r"tensor with a gradient to the buffer centre; legal",
    ),
    "a buffer of another shape": (
        reshaped,
        r"shape \(4,\), torch.float\d+, to the buffer centre",
    ),
    "a parameter": (of_a_parameter, "forward writes to the parameter layer.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        assert Subject(Keeping(body), batch()).trace


def logged(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.seen += 1
    m.history.append(float(m.seen))
    m.ready = True
    random.random()
    return h.square().mean()


def test_what_the_graph_does_not_depend_on() -> None:
    """A count or a log is told; a generator that decides nothing, or a flag that is set once, is nothing to tell."""
    trace = Subject(Keeping(logged), batch()).trace
    assert trace.opaque is None
    assert [note for note in trace.notes if "forward changes" in note] == [
        "forward changes seen (from 1 to 2), history (from [1.0] to [1.0, 2.0]): its graph is the same after one "
        "forward, and sees no later values"
    ]


def test_nothing_that_the_user_holds_is_changed() -> None:
    model = Keeping(logged)
    assert Subject(model, batch()).trace.opaque is None
    assert (model.seen, model.history, model.ready) == (0, [], False)


def test_gradients_are_those_of_the_whole_batch() -> None:
    """Each microbatch reads the buffer as it was when the batch began."""
    subject, truth = Subject(Keeping(read_again), batch()), Keeping(read_again).double()
    loss = truth(batch()["x"].double())
    loss.backward()
    ours = sharded_run(subject, 2, 3)
    ours.state = {}
    gradients = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    expected = type(ours)([float(loss.detach())], gradients, {})
    assert max(errors(ours, expected).values()) <= TOLERANCE


class Normed(nn.Module):
    """The old weight_norm makes the weight anew in each forward, and keeps it; pruning does so with its mask."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.first, self.second = how, nn.Linear(4, 6), nn.Linear(6, 3)
        self.kept: list[Tensor] = []
        if how == "weight norm":
            self.first = nn.utils.weight_norm(self.first)
        elif how == "pruned":
            nn.utils.prune.random_unstructured(self.second, "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.how == "features":
            self.last, self.kept = hidden, [hidden]
        return self.second(hidden).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("how", ["weight norm", "pruned", "features"])
def test_tensors_with_a_history(how: str) -> None:
    model = Normed(how)
    model(batch()["x"])  # so that it keeps some
    subject, truth = Subject(model, batch()), Normed(how).double()
    truth(batch()["x"].double()).backward()
    assert subject.trace.opaque is None
    ours = sharded_run(subject, 2, 2)
    for name, p in truth.named_parameters():
        torch.testing.assert_close(ours.gradients[name], p.grad, rtol=1e-10, atol=1e-12)
    assert verify(model, [batch()] * 2, data_parallel(Plan.of(), 2)).passed
