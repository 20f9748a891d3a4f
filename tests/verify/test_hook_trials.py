"""What a trial of a hook finds before the first step, and what it leaves untouched; the truth is a plain loop."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, planned_run, sharded_run
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

SGD = OptimizerChoice("sgd", lr=0.1, momentum=0.0)
DDP = data_parallel(Plan.of(microbatches=2), 2)
ZERO = data_parallel(Plan.of(), 3, 3)  # two ranks have parts of first.weight
TENSOR = tensor_parallel(Plan.of(), 2)
Hook = Callable[[Tensor], Tensor | None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1, 2])}


def with_hook(hook: Callable[..., Any], after: bool = False) -> Model:
    model = Model()
    weight = model.first.weight
    _ = weight.register_post_accumulate_grad_hook(hook) if after else weight.register_hook(hook)
    return model


def plain_steps(model: nn.Module, steps: int) -> dict[str, Tensor]:
    """The parameters after some steps of an ordinary loop, in which hooks act as torch calls them."""
    fields = {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**fields).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(model: nn.Module, plan: Plan, steps: int) -> dict[str, Tensor]:
    subject = Subject(model, batch())
    compiled = Compiled(subject.module, plan.replace(precision="fp64"), subject.batch)
    return planned_run(compiled, subject.batch, steps=steps, optimizer=SGD).state


def assert_as_plain(make: Callable[[], nn.Module], plan: Plan, steps: int = 3) -> None:
    truth, found = plain_steps(make(), steps), trained(make(), plan, steps)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


class Counted:
    """Scales by how often it has been called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / self.calls


class Ema:
    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def hook(self, gradient: Tensor) -> Tensor:
        self.mean = gradient.clone() if self.mean is None else self.mean * 0.9 + gradient * 0.1
        return self.mean


def silent_counter() -> Hook:
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient * 2 if calls > 1000 else gradient * 3

    return hook


def logging() -> Hook:
    seen: list[Tensor] = []
    return lambda g: seen.append(g * 2)


DEPENDENT: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "norm below 1e3": (lambda: lambda g: g if g.norm() < 1e3 else g / g.norm(), "linalg_vector_norm"),
    "norm below 1e30": (lambda: lambda g: g if g.norm() < 1e30 else g / g.norm(), "linalg_vector_norm"),
    "mean above 10": (lambda: lambda g: torch.where(g.mean() > 10, g.clamp(max=1), g), "aten.mean"),
    "max": (lambda: lambda g: g * (g.max() > -1e9), "aten.max"),
    "number of elements": (lambda: lambda g: g / g.numel(), "something else on a part"),
    "many elements": (lambda: lambda g: g * 2 if g.numel() > 20 else g, "something else on a part"),
    "first dim": (lambda: lambda g: g * g.shape[0], "something else on a part"),
    "first element": (lambda: lambda g: g if g.flatten()[0] < 1e12 else -g, "aten.select"),
    "place": (lambda: lambda g: g * torch.arange(g.numel()).view(g.shape), "something else on a part"),
    "numpy": (lambda: lambda g: g if numpy.abs(g.numpy()).max() < 1e20 else -g, "Tensor.numpy"),
    "list": (lambda: lambda g: g if max(g.flatten().tolist()) < 1e20 else -g, "Tensor.tolist"),
    "any": (lambda: lambda g: g if g.isfinite().all() else g * 0, "aten.all"),
    "counted": (Counted, "keeps state"),
    "counted for long": (silent_counter, "keeps state"),
    "logging": (logging, "keeps state"),
    "moving average": (lambda: Ema().hook, "keeps state"),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_hook_that_sees_more_than_an_element(name: str) -> None:
    """It is right on whole gradients, and refused on parts."""
    make, why = DEPENDENT[name]
    assert_as_plain(lambda: with_hook(make()), DDP)
    for plan in (ZERO, TENSOR):
        with pytest.raises(ConfigError, match=f"needs the whole gradient, of which each rank has a part: .*{why}"):
            trained(with_hook(make()), plan, 1)


def decayed(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad.clamp(-0.05, 0.05) + 0.1 * p.data * (p.data > 0)


def in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.add_(p.detach(), alpha=0.1).nan_to_num_()


def printing(g: Tensor) -> Tensor:
    print("a gradient of", g.dtype)
    return torch.where(g.abs() > 0.01, g.sign() * 0.01, g)


@pytest.mark.parametrize("plan", [DDP, data_parallel(Plan.of(microbatches=2), 2, 1), ZERO, TENSOR])
@pytest.mark.parametrize(("hook", "after"), [(decayed, True), (in_place, True), (printing, False)])
def test_a_hook_of_elements(hook: Callable[..., Any], after: bool, plan: Plan) -> None:
    assert_as_plain(lambda: with_hook(hook, after), plan)


@pytest.mark.parametrize("plan", [ZERO, TENSOR])
def test_a_hook_on_a_parameter_that_reduces(plan: Plan) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad if p.data.norm() > 1e-9 else -p.grad

    assert_as_plain(lambda: with_hook(hook, after=True), DDP)
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook.*linalg_vector_norm"):
        trained(with_hook(hook, after=True), plan, 1)


class Bound(Model):
    """Its hook is a method."""

    factor = 0.5

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.first.weight.register_hook(self.hook)

    def hook(self, gradient: Tensor) -> Tensor:
        return gradient * (self.second.weight.mean() if self.reads else self.factor)


GLOBAL: dict[str, Tensor] = {}


def of_global(gradient: Tensor) -> Tensor:
    return gradient + GLOBAL["weight"].detach()


def adding(gradient: Tensor, other: Tensor) -> Tensor:
    return gradient + other.detach().mean()


def readers() -> dict[str, nn.Module]:
    closure, default, one_partial, holder, of_globals = (Model() for _ in range(5))
    closure.first.weight.register_hook(lambda g: g + 0.1 * closure.first.weight)
    default.first.weight.register_hook(lambda g, w=default.second.bias: g + w.data.sum())
    one_partial.first.bias.register_hook(functools.partial(adding, other=one_partial.first.weight))
    held = {"all": [holder.first.weight]}
    holder.first.weight.register_hook(lambda g: torch.stack([g, *held["all"]]).sum(0))
    GLOBAL["weight"] = of_globals.first.weight
    of_globals.first.weight.register_hook(of_global)
    own_gradient = Model()
    own_gradient.first.weight.register_hook(lambda g: g if own_gradient.first.weight.grad is None else g * 2)
    return {"closure": closure, "default": default, "partial": one_partial, "container": holder, "global": of_globals,
            "method": Bound(reads=True), "its own grad": own_gradient}  # fmt: skip


@pytest.mark.parametrize("name", ["closure", "default", "partial", "container", "global", "method", "its own grad"])
@pytest.mark.parametrize("plan", [Plan.of(), DDP, ZERO])
def test_a_hook_that_reads_the_module(name: str, plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"its hook reads \w+.\w+, whose value is in the engine .*hook_trials.py"):
        trained(readers()[name], plan, 1)
    with pytest.raises(ConfigError, match=r"its hook reads"):
        verify(readers()[name], [batch()], plan)


def test_a_hook_that_reads_the_module_later() -> None:
    """What no trial comes to is refused in the step."""
    model, calls = Model(), [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient + model.first.weight if calls[0] > 2 else gradient

    model.first.weight.register_hook(hook)
    subject = Subject(model, batch())
    sharded_run(subject, 1, steps=2)
    calls[0] = 0
    with pytest.raises(ConfigError, match="its hook reads first.weight"):
        sharded_run(subject, 1, steps=3)


def test_a_method_that_reads_no_tensor() -> None:
    for plan in (DDP, ZERO):
        assert_as_plain(lambda: Bound(reads=False), plan)


def test_a_hook_that_asks_the_module_for_facts() -> None:
    def make() -> Model:
        model = Model()
        model.first.weight.register_hook(lambda g: g * model.first.weight.shape[1] * model.first.weight.dim())
        return model

    for plan in (DDP, ZERO):
        assert_as_plain(make, plan)


DRAWS: dict[str, tuple[Hook, str]] = {
    "torch": (lambda g: g + torch.randn_like(g), "torch"),
    "in place": (lambda g: g.mul(1).bernoulli_(0.5), "torch"),
    "dropout": (lambda g: F.dropout(g, 0.5), "torch"),
    "random": (lambda g: g * random.random(), "random"),
    "numpy": (lambda g: g * float(numpy.random.rand()), "numpy.random"),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("plan", [Plan.of(), DDP, ZERO])
def test_a_hook_that_draws(name: str, plan: Plan) -> None:
    hook, generator = DRAWS[name]
    with pytest.raises(ConfigError, match=f"first.weight: its hook draws from the generator of {generator}: "):
        trained(with_hook(hook), plan, 1)


@pytest.mark.parametrize("plan", [Plan.of(microbatches=2), DDP])
def test_a_hook_with_a_generator_of_its_own(plan: Plan) -> None:
    def make() -> Model:
        draw = torch.Generator().manual_seed(3)
        return with_hook(lambda g: g + torch.randn(g.shape, generator=draw, dtype=g.dtype))

    assert_as_plain(make, plan)
    with pytest.raises(ConfigError, match="something else on a part|keeps state"):
        trained(make(), ZERO, 1)


SEEN: list[int] = []


def counting(gradient: Tensor) -> Tensor:
    SEEN.append(gradient.numel())
    return gradient / len(SEEN)


@pytest.mark.parametrize("kind", ["closure", "object", "method", "partial", "global"])
def test_what_a_hook_keeps(kind: str) -> None:
    """Neither trials nor verify touch it; a step calls it once, and what it computes follows from these calls alone."""

    def make() -> tuple[Model, Callable[[], int]]:
        seen: list[int] = []
        SEEN.clear()
        counted, ema = Counted(), Ema()
        hooks: dict[str, tuple[Callable[..., Any], Callable[[], int]]] = {
            "closure": (lambda g: seen.append(1) or g / len(seen), lambda: len(seen)),
            "object": (counted, lambda: counted.calls),
            "method": (ema.hook, lambda: int(ema.mean is not None)),
            "partial": (functools.partial(lambda log, g: log.append(1) or g / len(log), seen), lambda: len(seen)),
            "global": (counting, lambda: len(SEEN)),
        }
        hook, count = hooks[kind]
        return with_hook(hook), count

    for plan in (Plan.of(microbatches=2), DDP):
        model, count = make()
        report = verify(model, [batch()] * 3, plan)
        assert report.passed, report.worst[:3]
        assert count() == 0
    assert_as_plain(lambda: make()[0], DDP)
    model, count = make()
    trained(model, Plan.of(microbatches=2), 3)
    assert count() == (1 if kind == "method" else 3)


def test_functions_that_share_a_variable() -> None:
    def make() -> Model:
        total = 0.0

        def first(gradient: Tensor) -> Tensor:
            nonlocal total
            total += 1
            return gradient * 1

        def second(gradient: Tensor) -> Tensor:
            return gradient / (1 + total)

        model = Model()
        model.first.weight.register_hook(first)
        model.first.weight.register_hook(second)
        return model

    assert_as_plain(make, DDP)
    assert verify(make(), [batch()] * 2, DDP).passed


def test_an_object_that_cannot_be_copied() -> None:
    lock = threading.Lock()

    def hook(gradient: Tensor) -> Tensor:
        with lock:
            return gradient * 2

    assert_as_plain(lambda: with_hook(hook), Plan.of(microbatches=2))
    with pytest.raises(ConfigError, match=r"first.weight: its hook keeps an object that cannot be copied \(.*lock"):
        verify(with_hook(hook), [batch()], DDP)


def test_hooks_that_depend_on_each_other() -> None:
    """A plan calls the hooks of parameters in its own order: what depends on that is refused."""

    def make(shared: bool) -> Model:
        model, norms = Model(), {name: [1.0] for name in ("first.weight", "second.weight")}
        for name in norms:
            own = norms["first.weight" if shared else name]

            def hook(gradient: Tensor, own: list[float] = own) -> Tensor:
                own.append(float(gradient.norm()))
                return gradient / sum(own)

            model.get_parameter(name).register_hook(hook)
        return model

    for plan in (Plan.of(), DDP):
        assert_as_plain(lambda: make(shared=False), plan)
        with pytest.raises(ConfigError, match="depends on calls of other parameters' hooks"):
            trained(make(shared=True), plan, 1)


def test_a_model_that_is_copied_with_its_hooks() -> None:
    """The engine of a copy calls what the copy has: torch copies no hooks."""
    model = with_hook(lambda g: g * 2)
    found = trained(copy.deepcopy(model), Plan.of(Mesh.of(dp=2)), 1)
    torch.testing.assert_close(found["first.weight"], plain_steps(Model(), 1)["first.weight"])
