"""An autograd.Function keeps its own backward, under every plan: the truth is plain torch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from communicating import communicated
from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

Body = Callable[[Tensor, nn.Linear], Tensor]


class Reverse(torch.autograd.Function):
    """Reverses and scales the gradient, as domain-adversarial training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.factor * grads[0], None


class Rounded(torch.autograd.Function):
    """Two results with straight-through gradients; it is written with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.round(), x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1) + grads[1] * 0.1


class Product(torch.autograd.Function):
    """A product whose weight learns twice as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, 2 * grads[0].T @ x


class Scaled(torch.autograd.Function):
    """Multiplies by a number that is a tensor without dims, which learns twice as fast."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(factor, x)
        return factor * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        factor, x = ctx.saved_tensors
        return 2 * (grads[0] * x).sum(), grads[0] * factor


class UnitGradient(torch.autograd.Function):
    """Scales the gradient to the norm 1, over all rows of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / grads[0].norm()


reverse = Reverse.apply  # bound before anything is captured

BODIES: dict[str, Body] = {
    "reversed": lambda x, layer: reverse(layer(x).tanh(), 2.0),
    "two of different arguments": lambda x, layer: reverse(reverse(layer(x), 0.5).tanh(), 2.0) + reverse(x, 0.5),
    "two results": lambda x, layer: Rounded.apply(layer(x) * 2)[0] + Rounded.apply(layer(x))[1],
    "with a parameter": lambda x, layer: Product.apply(x.sin(), layer.weight),
    "with a number that learns": lambda x, layer: Scaled.apply(layer.weight[0, 0], x),
    "with a number of the model": lambda x, layer: Scaled.apply(torch.tensor(0.3, dtype=x.dtype), layer(x)),
    "rows of rows": lambda x, layer: (
        reverse(layer(x)[:, None].expand(-1, 2, -1).flatten(0, 1), 0.3).view(-1, 2, 5).sum(1)
    ),
    "of a parameter alone": lambda x, layer: x @ reverse(layer.weight * 2, 0.1),
    "checkpointed": lambda x, layer: checkpoint(lambda t: layer(t).tanh(), x, use_reentrant=False),
    "checkpointed, reentrant": lambda x, layer: checkpoint(lambda t: layer(t).tanh(), x * 1, use_reentrant=True),
    "reversed in a checkpoint": lambda x, layer: checkpoint(
        lambda t: reverse(layer(t), 0.2).tanh(), x * 1, use_reentrant=True
    ),
}


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.layer, self.out = body, nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.body(self.first(x), self.layer)), y)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1])}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", BODIES)
def test_its_own_backward(name: str) -> None:
    subject = Subject(Model(BODIES[name]), batch())
    assert subject.trace.opaque is None, subject.trace.opaque
    assert subject.trace.cuts_batch and not subject.trace.replicated
    truth = plain_run(subject)
    for dp, microbatches, recompute in ((1, 1, "none"), (2, 2, "full"), (3, 1, "selective"), (2, 3, "none")):
        found = errors(sharded_run(subject, dp, microbatches, recompute), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


class Block(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.layer = body, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x, self.layer)


class Deep(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(body) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, y)


PLANS = {
    "zero": data_parallel(Plan.of(microbatches=2), 2, 3),
    "tp": tensor_parallel(Plan.of(microbatches=2), 2),
    "pp": pipeline(Plan.of(microbatches=2), 2),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["reversed", "two results", "with a parameter"])
def test_under_other_plans(name: str, plan: str) -> None:
    given = {"x": torch.randn(6, 5), "y": torch.tensor([0, 1, -100, 4, 2, 1])}
    report = verify(Deep(BODIES[name]), [given] * 2, PLANS[plan])
    assert report.passed, report.worst[:3]


def test_an_activation_stays_in_pieces() -> None:
    """Its elements are independent along all dims: tensor parallelism communicates as without it."""

    def body(x: Tensor, layer: nn.Linear) -> Tensor:
        return F.linear(Rounded.apply(layer(x) * 2)[0], layer.weight.T)

    compiled = Compiled(Deep(body), PLANS["tp"], {"x": torch.randn(6, 5), "y": torch.tensor([0, 1, 2, 4, 2, 1])})
    kinds = {kind for kind, _, _ in communicated(compiled.general)}
    assert kinds <= {"all_reduce", "all_reduce in backward", "slice"}, kinds
    assert not compiled.general.replicated


def test_rows_that_depend_on_each_other_meet() -> None:
    subject = Subject(Model(lambda x, layer: UnitGradient.apply(layer(x))), batch())
    truth = plain_run(subject)
    assert [op for op, _ in subject.trace.replicated] == ["autograd.Function UnitGradient"]
    assert any("UnitGradient" in one for one in subject.trace.meets)
    for dp in (1, 2, 3):
        assert max(errors(sharded_run(subject, dp), truth).values()) <= TOLERANCE


def test_other_threads_apply_theirs_meanwhile() -> None:
    """Only the thread that captures records Functions; the way in which they are applied is put back."""
    base = torch.autograd.function._SingleLevelFunction
    assert Subject(Model(BODIES["reversed"]), batch()).trace.opaque is None
    assert "apply" not in vars(base)
    x = torch.ones(2, requires_grad=True)
    reverse(x, 3.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-3.0, -3.0]
