"""Hooks on parameters act on the gradient of the whole batch, once a step, under every plan; or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import run_steps, run_threads, verify

PLAIN, SCALE = OptimizerChoice("sgd", lr=0.1, momentum=0.0), ScaleChoice.fixed(1024.0)

MASK = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1])}


def in_place(gradient: Tensor) -> None:
    gradient.mul_(3)


def halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad / 2 + p.detach()


HOOKS: dict[str, Callable[[Model], object]] = {
    "masked": lambda m: m.first.weight.register_hook(lambda g: g * MASK[:, None].to(g.dtype)),
    "clamped": lambda m: [p.register_hook(lambda g: g.clamp(-0.01, 0.02)) for p in m.parameters()],
    "of norm 1": lambda m: m.second.weight.register_hook(lambda g: g / g.norm()),
    "two": lambda m: [m.second.bias.register_hook(lambda g, k=k: g.sin() * k) for k in (2, 3)],
    "in place": lambda m: m.second.weight.register_hook(in_place),
    "after": lambda m: m.first.bias.register_post_accumulate_grad_hook(halved),
}
ELEMENTWISE = ("clamped", "two", "in place", "after")


def hooked(name: str) -> Model:
    model = Model()
    HOOKS[name](model)
    return model


@pytest.mark.parametrize("name", HOOKS)
def test_the_gradient_of_the_whole_batch(name: str) -> None:
    truth, plain = Model().double(), Subject(Model(), batch())
    HOOKS[name](truth)
    truth(**plain.batch).backward()
    expected = plain_run(plain)
    assert any(not torch.equal(p.grad, expected.gradients[n]) for n, p in truth.named_parameters())
    expected.gradients = {n: p.grad for n, p in truth.named_parameters()}
    subject = Subject(hooked(name), batch())
    for dp, microbatches in ((1, 1), (2, 1), (1, 3), (3, 2)):
        found = errors(sharded_run(subject, dp, microbatches), expected)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


PLANS = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero 1": data_parallel(Plan.of(microbatches=2), 2, 1),
    "zero 3": data_parallel(Plan.of(), 3, 3),
    "tp": tensor_parallel(Plan.of(microbatches=2), 2),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", HOOKS)
def test_parts_of_a_gradient(name: str, plan: str) -> None:
    """A hook that acts on each element by itself acts on the elements that a rank has; another one needs them all."""
    if plan == "ddp" or name in ELEMENTWISE:
        report = verify(hooked(name), [batch()] * 2, PLANS[plan])
        assert report.passed, report.worst[:3]
    else:
        with pytest.raises(ConfigError, match="needs the whole gradient, of which each rank has a part"):
            verify(hooked(name), [batch()] * 2, PLANS[plan])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in self.layers:
            layer.weight.register_hook(lambda g: g / g.norm())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return F.cross_entropy(x, y)


def test_stages() -> None:
    report = verify(Blocks(), [batch()] * 2, pipeline(Plan.of(microbatches=3), 2))
    assert report.passed, report.worst[:3]


def test_a_hook_is_called_once_a_step() -> None:
    seen: list[float] = []
    model = Model()
    model.second.bias.register_hook(lambda g: seen.append(float(g.norm())))
    subject = Subject(model, batch())
    sharded_run(subject, 1, 3, steps=4)
    assert len(seen) == 4


def test_under_a_loss_scale() -> None:
    """Hooks see gradients without the scale of fp16: they are clamped as without it."""
    truth = Model()
    HOOKS["clamped"](truth)
    truth(**batch()).backward()
    plan = Plan.of(Mesh.of(dp=2), precision="fp16")
    given = batch()  # by this thread: ranks are threads, which have one generator
    compiled = Compiled(hooked("clamped"), plan, given)
    steps = run_threads(compiled, lambda comm: run_steps(compiled, comm, [given], PLAIN, None, 0, SCALE))
    for name, p in truth.named_parameters():
        torch.testing.assert_close(steps[0][0].gradients[name], p.grad, rtol=0.02, atol=1e-4)


def test_a_hook_that_takes_the_step_itself() -> None:
    model = Model()
    model.second.bias.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    with pytest.raises(ConfigError, match="parameter second.bias: its post-accumulate hook changes the parameter"):
        sharded_run(Subject(model, batch()), 1)


def test_verify_sees_hooks_that_the_plan_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.runtime.hooks.GradientHooks.apply", lambda *_: None)
    assert not verify(hooked("masked"), [batch()] * 2, PLANS["ddp"]).passed


@pytest.mark.parametrize("where", ["module", "tensor", "node", "saved"])
def test_hooks_inside_the_model(where: str) -> None:
    """What sees gradients inside the model trains as one unit, or is in a part that runs as written: its own backward
    calls it."""

    class Inside(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = self.first(x)
            if where == "tensor" and hidden.requires_grad:
                hidden.register_hook(lambda g: g * 2)
            if where == "node" and hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(lambda g: (g[0] * 2,))
            saved = torch.autograd.graph.saved_tensors_hooks(lambda one: one * 2, lambda one: one)
            with saved if where == "saved" else nullcontext():
                hidden = hidden * hidden
            return F.cross_entropy(self.second(hidden.tanh()), y)

    def model() -> Model:
        one = Inside()
        if where == "module":
            one.first.register_full_backward_hook(lambda module, taken, given: (taken[0],))
            one.second.register_full_backward_pre_hook(lambda module, given: (given[0] * 2,))
        return one

    given = {"x": torch.randn(6, 4), "y": torch.tensor([0, 1, 2, 2, 1, 0])}
    truth = model().double()
    truth(given["x"].double(), given["y"]).backward()
    subject = Subject(model(), given)
    assert where == "saved" or subject.trace.opaque is not None and "hook" in subject.trace.opaque
    for dp in (1, 2, 3):
        found = sharded_run(subject, dp).gradients
        for name, p in truth.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-14)
    assert verify(model(), [given], Plan.of(Mesh.of(dp=2))).passed
