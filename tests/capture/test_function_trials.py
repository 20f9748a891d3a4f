"""What a trial of an autograd.Function finds: dependence between rows at any size of numbers, state, and gradients that
are not linear; the truth is plain torch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_functions import Body, Model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness import TOLERANCE, Subject, errors, plain_run, planned_run
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel

PLANS = {
    "one": Plan.of(),
    "two ranks": data_parallel(Plan.of(), 2),
    "zero 3": data_parallel(Plan.of(), 3, 3),
    "tp": tensor_parallel(Plan.of(), 2),
}
MICROBATCHES = {
    "two": data_parallel(Plan.of(microbatches=2), 2),
    "zero 3": data_parallel(Plan.of(microbatches=3), 2, 3),
    "tp": tensor_parallel(Plan.of(microbatches=2), 2),
}
TOGETHER = data_parallel(Plan.of(microbatches=2, rows="batch"), 2)


def backward_of(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A Function that changes the gradient alone."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return change(grads[0])

    return Changed.apply


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1, 1])}


def assert_as_plain(body: Body, plan: Plan) -> Compiled:
    subject = Subject(Model(body), batch())
    compiled = Compiled(subject.module, plan.replace(precision="fp64"), subject.batch)
    found = errors(planned_run(compiled, subject.batch), plain_run(subject))
    assert max(found.values()) <= TOLERANCE, found
    return compiled


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"norm below {at}": lambda g, at=at: torch.where(g.norm() < at, g, 2 * g) for at in (1e-9, 0.2, 1e3, 1e10)},
    **{f"largest below {at}": lambda g, at=at: torch.where(g.max() < at, g, 2 * g) for at in (1e-9, 0.05, 1e10)},
    **{f"mean below {at}": lambda g, at=at: torch.where(g.mean() < at, g, 2 * g) for at in (-1e-3, 1e-3, 10.0)},
    "a branch": lambda g: g if g.norm() < 1e25 else g / g.norm(),
    "the first row": lambda g: g * torch.where(g[0].abs().max() < 0.1, 1.0, 2.0),
    "the number of rows": lambda g: g * (2 if g.shape[0] > 5 else 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_threshold_over_rows(name: str) -> None:
    apply = backward_of(CHANGES[name])
    for plan in PLANS.values():
        compiled = assert_as_plain(lambda x, layer: apply(layer(x)), plan)
        assert any("Changed" in one for one in compiled.general.meets)
    if name == "the number of rows":  # this one is linear, and sees all rows
        assert_as_plain(lambda x, layer: apply(layer(x)), TOGETHER)
        return
    with pytest.raises(ConfigError, match="backward of autograd.Function Changed in the model is not linear"):
        assert_as_plain(lambda x, layer: apply(layer(x)), TOGETHER)


@pytest.mark.slow
def test_a_threshold_in_forward() -> None:
    class Bounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.where(x.abs().max() < 5, x, 2 * x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0]

    for plan in (*PLANS.values(), TOGETHER):  # its backward is linear
        assert_as_plain(lambda x, layer: Bounded.apply(layer(x)), plan)


clamp = backward_of(lambda g: g.clamp(-0.01, 0.01))
of_row = backward_of(lambda g: g * torch.clamp(0.01 / g.norm(dim=-1, keepdim=True), max=1))
twice = backward_of(lambda g: 2 * g)


@pytest.mark.quick(2)
@pytest.mark.parametrize("apply", [clamp, of_row])
@pytest.mark.parametrize("plan", [*PLANS.values(), *MICROBATCHES.values(), TOGETHER])
def test_rows_are_independent(apply: Callable[[Tensor], Tensor], plan: Plan) -> None:
    compiled = assert_as_plain(lambda x, layer: F.linear(apply(layer(x)), layer.weight.T), plan)
    assert not compiled.general.meets and not compiled.general.undivided


WITHOUT_ROWS: dict[str, Callable[[Callable[[Tensor], Tensor]], Body]] = {
    "weight": lambda apply: lambda x, layer: F.linear(x, apply(layer.weight)),
    "of a weight": lambda apply: lambda x, layer: F.linear(x, apply(layer.weight * 2)),
    "scalar": lambda apply: lambda x, layer: layer(x) * apply(layer.weight.norm()),
    "mean of rows": lambda apply: lambda x, layer: layer(x) + apply(layer(x).mean(0)),
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_gradient_that_microbatches_add_up(name: str) -> None:
    """Each microbatch has a part of it: a backward that is not linear needs the whole."""
    make = WITHOUT_ROWS[name]
    for plan in PLANS.values():
        assert_as_plain(make(clamp), plan)
    for plan in (*MICROBATCHES.values(), TOGETHER):
        with pytest.raises(
            ConfigError, match="microbatches: the backward of autograd.Function Changed .*is not linear"
        ):
            assert_as_plain(make(clamp), plan)
    for plan in (TOGETHER, *(MICROBATCHES.values() if name != "mean of rows" else ())):
        assert_as_plain(make(twice), plan)


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Counted.calls += 1
        return grads[0] / Counted.calls


def test_a_function_that_keeps_state() -> None:
    for body in (lambda x, layer: Counted.apply(layer(x)), lambda x, layer: F.linear(x, Counted.apply(layer.weight))):
        with pytest.raises(ConfigError, match="Counted gives another result each time of the same numbers"):
            assert_as_plain(body, PLANS["one"])


class Results(torch.autograd.Function):
    """Two of its results have no gradient, and one is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        index, mask = x.argmax(-1), x > 0
        ctx.mark_non_differentiable(index, mask)
        ctx.set_materialize_grads(False)
        return x * 2, index, mask, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3 if grads[3] is None else grads[0] + grads[3]


class Needs(torch.autograd.Function):
    """Its gradients depend on which are asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), (of_x, of_weight), g = ctx.saved_tensors, ctx.needs_input_grad, grads[0]
        return g @ weight * 2 if of_x else None, g.T @ x * (3 if of_x else 5) if of_weight else None


class Itself(torch.autograd.Function):
    """Returns what it is given; torch may vectorise it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 7


def results(x: Tensor, layer: nn.Linear) -> Tensor:
    values, index, mask, _ = Results.apply(layer(x))
    return values * mask + F.one_hot(index, 5)


def without_gradient(x: Tensor, layer: nn.Linear) -> Tensor:
    with torch.no_grad():
        found = Itself.apply(layer(x))
    return layer(x) * found.sigmoid() * Itself.apply(layer(x).detach()).cos()


KINDS: dict[str, Body] = {
    "results without gradients": results,
    "needs both": lambda x, layer: Needs.apply(x, layer.weight),
    "needs a weight": lambda x, layer: Needs.apply(x.detach(), layer.weight),
    "needs rows": lambda x, layer: Needs.apply(x, layer.weight.detach()),
    "itself": lambda x, layer: Itself.apply(layer(x)),
    "without gradient": without_gradient,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("plan", [*PLANS.values(), *MICROBATCHES.values()])
def test_kinds_of_functions(name: str, plan: Plan) -> None:
    compiled = assert_as_plain(KINDS[name], plan)
    assert compiled.general.opaque is None and not compiled.general.meets
