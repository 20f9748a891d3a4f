"""Functions that no op can stand for are captured as their forward, if their backward gives its gradients; the truth is
the oracle, which applies them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_functions import PLANS, Block, Body, Model
from torch import Tensor, nn

from shardwise.capture.capture import capture
from shardwise.graph.captured import Uncapturable
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import verify


class Dropped(torch.autograd.Function):
    """Dropout with a mask of its own, as DeBERTa has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chance: float) -> Tensor:
        ctx.mask, ctx.scale = (1 - torch.empty_like(x).bernoulli_(1 - chance)).bool(), 1 / (1 - chance)
        ctx.save_for_backward(ctx.mask)
        return x.masked_fill(ctx.mask, 0) * ctx.scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grads[0].masked_fill(mask, 0) * ctx.scale, None


class Reversible(torch.autograd.Function):
    """Two coupled layers that keep no activations: backward computes them again from the results (RevNet, section
    3)."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, layers: nn.ModuleList) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # it says nothing: gradients are off in here
            for layer in layers:
                one, two = two, one + torch.tanh(layer(two))
        ctx.layers = layers
        ctx.save_for_backward(one.detach(), two.detach())
        return one, two

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (one, two), (grad, other) = ctx.saved_tensors, grads
        for layer in reversed(ctx.layers):
            before = one.detach().requires_grad_()
            with torch.enable_grad():
                step = torch.tanh(layer(before))
            step.backward(other)
            one, two = two - step.detach(), before.detach()
            grad, other = other, grad + before.grad
        return grad, other, None


class Marked(torch.autograd.Function):
    """One of two results has no gradient; it is written with ``setup_context``, and takes an object."""

    @staticmethod
    def forward(x: Tensor, names: object) -> Any:
        return x * 2, x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, None


def through(change: str) -> Any:
    """A Function that applies a layer, with a backward that is right but for one ``change``."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (x,), grad = ctx.saved_tensors, grads[0]
            if change == "turned":
                grad = -grad
            if change == "cut off where it is large":
                grad = grad.clamp(-100.0, 100.0)
            if change == "cut off where it is small":
                grad = grad * (grad.abs() > 1e-8)
            if change != "the layer learns nothing":
                with torch.enable_grad():
                    ctx.layer(x.detach()).backward(grad)
            return grad @ ctx.layer.weight, None

    return Through.apply


WHY = "which takes an object or draws random numbers"
BODIES: dict[str, Body] = {
    "draws": lambda x, layer: Dropped.apply(layer(x), 0.3),
    "takes a layer": lambda x, layer: through("nothing")(x, layer),
    "takes an object": lambda x, layer: torch.tanh(layer(sum(Marked.apply(x, object())))),
    "reversible": lambda x, layer: sum(Reversible.apply(x, x.sin(), nn.ModuleList([layer, layer]))),
}


class Deep(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.entry, self.blocks = nn.Linear(4, 5), nn.ModuleList(Block(body) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, y)


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", BODIES)
def test_the_gradients_are_those_of_its_own_backward(name: str, plan: str) -> None:
    torch.manual_seed(1)
    given = {"x": torch.randn(7, 4), "y": torch.tensor([0, 1, -100, 4, 2, 1, -100])}
    report = verify(Deep(BODIES[name]), [given] * 2, PLANS[plan])
    assert report.passed and report.largest < 1e-10, report.worst[:3]
    assert any("was captured as its forward" in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    "change", ["turned", "cut off where it is large", "cut off where it is small", "the layer learns nothing"]
)
def test_another_backward_is_not_captured(change: str) -> None:
    torch.manual_seed(1)
    given = {"x": torch.randn(7, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1])}
    apply = through(change)
    model = Model(lambda x, layer: apply(torch.tanh(x), layer))
    with pytest.raises(Uncapturable, match=f"the backward of the autograd.Function Through, {WHY}.* than its forward"):
        capture(model, given)


def test_what_learns_nothing_for_its_input_learns_nothing() -> None:
    """A Function whose tensors have no gradient has none, whatever the module learns in it."""
    torch.manual_seed(1)
    given = {"x": torch.randn(7, 4), "y": torch.arange(7) % 3}
    body = BODIES["takes a layer"]
    report = verify(Model(lambda x, layer: body(x.detach(), layer)), [given] * 2, PLANS["zero"])
    assert report.passed and not any("was captured as its forward" in note for note in report.notes), report.notes


def test_an_evaluation_needs_no_trial() -> None:
    given = {"x": torch.randn(7, 4), "y": torch.tensor([0, 1, -100, -100, -100, 2, 1])}
    apply = through("turned")
    model = Model(lambda x, layer: F.gelu(apply(x, layer))).eval()
    assert Compiled(model, PLANS["zero"], given, training=False).general.opaque is None
