"""What a forward keeps: buffers that it assigns are state as on one device; what Python keeps is told or refused."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

Body = Callable[["Keeping", Tensor, Tensor], Tensor]


CALLS: list[int] = []


class Keeping(nn.Module):
    made = 0
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
        self.queue = deque([1])
        self.factors, self.numbers, self.counter = itertools.cycle([1.0, 2.0]), array("d", [1.0]), Counter()
        self.options = SimpleNamespace(factor=1.0, numbers=np.random.default_rng(0))

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
    m.centre = torch.zeros(4) + x.detach().mean()
    return h.square().mean()


def of_a_parameter(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.clamp_(-1, 1)
    return h.square().mean()


def in_an_object(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.options.factor *= 2
    return h.square().mean() * m.options.factor


def in_a_queue(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.queue.append(len(m.queue))
    return h.square().mean() * sum(m.queue)


def in_its_class(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    Keeping.made += 1
    return h.square().mean() / Keeping.made


def in_a_global(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    CALLS.append(1)
    return h.square().mean() * len(CALLS)


def from_the_third_on(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.seen += 1
    return h.square().mean() * (2 if m.seen > 2 else 1)


def table_of_parameters(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    if not m.ready:
        m.plain, m.ready = m.layer.bias.detach().clone(), True
    return (h - m.plain).square().mean()


class Counter:
    """It counts in its class, which no attribute of a module is."""

    calls = 0

    def __call__(self) -> int:
        Counter.calls += 1
        return Counter.calls


def by_an_iterator(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    return h.square().mean() * next(m.factors)


def by_an_array(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.numbers[0] += 1
    return h.square().mean() * m.numbers[0]


def by_a_class_elsewhere(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    return h.square().mean() * m.counter()


def by_a_clock(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    return h.square().mean() * (1 + time.perf_counter())


UNSEEN = r"depends on something that no look .*, which it changes \(.*test_state.py:\d+\)"

REFUSED: dict[str, tuple[Body, str]] = {
    "an object": (
        in_an_object,
        r"depends on options.factor \(from 1.0 to 2.0\), which it changes \(.*test_state.py:\d+\)",
    ),
    "a queue": (in_a_queue, r"depends on queue \(from \[1\] to \[1, 1\]\)"),
    "its class": (in_its_class, r"depends on Keeping.made \(from \d+ to \d+\)"),
    "a global": (in_a_global, r"depends on .*test_state.CALLS"),
    "a number that matters later": (from_the_third_on, r"depends on seen \(from 0 to 1\)"),
    "values of a first forward": (table_of_parameters, "depends on plain"),
    "a rare draw": (
        lambda m, x, h: h.square().mean() * (2 if random.random() < 1e-9 else 1),
        "the generator of random",
    ),
    "a rare large draw": (
        lambda m, x, h: h.square().mean() * (2 if np.random.rand() > 1 - 1e-9 else 1),
        "numpy.random",
    ),
    "a generator of its own": (lambda m, x, h: h.square().mean() * m.options.numbers.random(), "options.numbers"),
    "a plain tensor in place": (
        in_place,
        r"depends on plain \(a tensor that is no buffer\), which it changes \(.*:\d+\)",
    ),
    "a plain tensor": (assigned, r"depends on plain \(a tensor that is no buffer\), which it changes"),
    "a list of tensors": (remembered, r"depends on memory \(tensors that are no buffers\), which it changes"),
    "a number": (scheduled, r"depends on seen \(from 0 to 1\), which it changes"),
    "random": (lambda m, x, h: h.square().mean() * random.random(), "depends on the generator of random"),
    "numpy.random": (lambda m, x, h: h.square().mean() * np.random.rand(), "depends on the generator of numpy.random"),
    "an iterator": (by_an_iterator, UNSEEN),
    "an array of Python's": (by_an_array, UNSEEN),
    "the class of an object": (by_a_class_elsewhere, "depends on "),
    "a clock": (by_a_clock, UNSEEN),
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


@pytest.mark.quick(10)
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
    """A count, a log, or a generator that decides nothing is told; a flag that is set once is nothing to tell."""
    trace = Subject(Keeping(logged), batch()).trace
    assert trace.opaque is None
    assert [note for note in trace.notes if note.startswith("forward ")] == [
        "forward changes seen (from 0 to 1), history (from [] to [1.0]): what it computes is the same in 5 forwards, "
        "and the steps see no later values",
        "forward draws from random: what it computes does not depend on it; the steps draw none",
    ]


def counted_rows(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    m.seen += 1
    chosen = [h[(x[:, 0] > 0.1 * i).nonzero()[:, 0]] for i in range(6)]  # sizes that depend on data
    return torch.cat(chosen).sum() + h.square().mean()


@pytest.mark.slow
def test_a_count_beside_sizes_that_depend_on_data() -> None:
    subject = Subject(Keeping(counted_rows), batch())
    assert any("forward changes seen (from 0 to 1): what it computes is the same" in one for one in subject.trace.notes)
    truth = plain_run(subject)
    assert max(errors(sharded_run(subject, 2), truth).values()) <= TOLERANCE


def table(m: Keeping, x: Tensor, h: Tensor) -> Tensor:
    if not m.ready:
        angles = torch.arange(3.0, dtype=h.dtype).outer(torch.tensor([1.0, 0.1, 0.01], dtype=h.dtype))
        m.plain, m.ready = angles.cos()[1], True
    return (h - m.plain).square().mean()


def test_a_table_that_is_made_when_it_is_first_needed() -> None:
    """It follows from constants alone, so that each forward computes the same."""
    subject, truth = Subject(Keeping(table), batch()), Keeping(table).double()
    assert subject.trace.opaque is None and not [note for note in subject.trace.notes if note.startswith("forward")]
    truth(batch()["x"].double()).backward()
    ours = sharded_run(subject, 2, 2)
    for name, p in truth.named_parameters():
        torch.testing.assert_close(ours.gradients[name], p.grad, rtol=1e-10, atol=1e-12)


def test_the_users_generators_stay_where_they_are() -> None:
    random.seed(3)
    np.random.seed(3)
    assert Subject(Keeping(logged), batch()).trace.opaque is None
    after = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert after == (random.random(), np.random.rand())


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
