"""Which ops have their weight gradients outside autograd, and that these are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Subject, parity
from shardwise.graph.torch_private import TorchDispatchMode
from shardwise.ops.env import Env
from shardwise.ops.weight_gradients import GradientFactors, Kernels, accumulate, convolved
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.tracing import trace
from shardwise.units.weight_products import Multiplier, Operand, watch

Op = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """x → tanh(linear(x)) → op(·, weight) → mean of squares."""

    def __init__(self, op: Op, inner: tuple[int, ...], weight: tuple[int, ...]) -> None:
        super().__init__()
        self.op, self.inner = op, inner
        self.before, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(weight) / 3)
        self.wide = nn.Linear(4, int(torch.Size(inner).numel()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.wide(torch.tanh(self.before(x))).unflatten(-1, self.inner)
        return (self.op(h, self.weight).flatten(1).mean(1) - y).square().mean()


PRODUCTS: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (3, 4), (5, 4)),
    "linear over a transposed weight": (lambda x, w: F.linear(x, w.t()), (3, 4), (4, 5)),
    "matmul": (torch.matmul, (3, 4), (4, 5)),
    "matmul with a transposed weight": (lambda x, w: x @ w.transpose(0, 1), (3, 4), (5, 4)),
    "mm": (lambda x, w: torch.mm(x.flatten(0, 1), w).unflatten(0, x.shape[:2]), (3, 4), (4, 5)),
    "addmm": (lambda x, w: torch.addmm(x.new_ones(5), x.flatten(0, 1), w).unflatten(0, x.shape[:2]), (3, 4), (4, 5)),
    "bmm": (lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (3, 4), (3, 4, 5)),
    "bmm with a permuted weight": (lambda x, w: torch.bmm(x.transpose(0, 1), w.permute(2, 0, 1)).transpose(0, 1),
    (3, 4), (4, 5, 3)),
    "batched matmul": (lambda x, w: (x.transpose(0, 1) @ w.mT).transpose(0, 1), (3, 4), (3, 5, 4)),
    "baddbmm": (lambda x, w: torch.baddbmm(x.new_ones(3, 1, 5), x.transpose(0, 1), w).transpose(0, 1), (3, 4),
    (3, 4, 5)),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2), (3, 9), (4, 3, 3)),
    "conv1d, padded to the same": (lambda x, w: F.conv1d(x, w, padding="same", dilation=3), (3, 9), (4, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(2, 1)), (4, 6, 5), (6, 4, 3, 2)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (4, 6, 5), (6, 2, 3, 2)),
    "conv2d, one by one": (F.conv2d, (4, 6, 5), (6, 4, 1, 1)),
    "conv2d, unpadded by name": (lambda x, w: F.conv2d(x, w, padding="valid"), (4, 6, 5), (6, 4, 3, 3)),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (2, 3, 4, 3), (3, 2, 2, 3, 2)),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=3, output_padding=2), (3, 5), (3, 4, 4)),
    "conv_transpose2d in groups": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, groups=2, dilation=2), (4, 6, 5), (4, 3, 3, 2)),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1), (4, 6, 5), (6, 4, 3, 2)),
    "a weight used twice": (lambda x, w: torch.tanh(x @ w) @ w, (3, 4), (4, 4)),
}  # fmt: skip

OTHERS: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...]]] = {
    "a slice of a parameter": (lambda x, w: x @ w[0], (3, 4), (2, 4, 5)),
    "a parameter on the left": (lambda x, w: torch.matmul(w, x), (3, 4), (5, 3)),
    "a sum over matrices": (lambda x, w: x @ w, (2, 3, 4), (2, 4, 5)),
    "scaled": (
        lambda x, w: torch.addmm(x.new_ones(5), x.flatten(0, 1), w, alpha=2.0).unflatten(0, x.shape[:2]),
        (3, 4),
        (4, 5),
    ),
    "padded on one side": (lambda x, w: F.conv1d(x, w, padding="same"), (3, 9), (4, 3, 2)),
    "twice as large": (lambda x, w: x @ (2 * w), (3, 4), (4, 5)),
}


def subject(op: Op, inner: tuple[int, ...], weight: tuple[int, ...]) -> Subject:
    torch.manual_seed(0)
    return Subject(Layer(op, inner, weight), {"x": torch.randn(5, 4), "y": torch.randn(5)})


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    one = subject(*PRODUCTS[name])
    parity(one, dp=(1, 2))
    parity(one, dp=2, microbatches=2, recompute="selective", steps=2)
    (unit,) = [u for u in one.trace.units if "weight" in u.parameters]
    assert "weight" in unit.products and "weight" not in unit.inside


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product(name: str) -> None:
    one = subject(*OTHERS[name])
    parity(one, dp=(1, 2))
    (unit,) = [u for u in one.trace.units if "weight" in u.parameters]
    assert "weight" not in unit.products and "weight" in unit.inside


def test_a_parameter_that_is_both() -> None:
    one = subject(lambda x, w: x @ w + w[0] ** 2, (3, 4), (4, 5))
    parity(one, dp=(1, 2), microbatches=2)
    (unit,) = one.trace.units
    assert "weight" in unit.products and "weight" in unit.inside


def test_a_product_with_itself_stays_with_autograd() -> None:
    """Its weight may be taken out, the other operand may not."""
    parity(subject(lambda x, w: x @ torch.mm(w, w), (3, 4), (4, 4)), dp=(1, 2))


class Waves(nn.Module):
    """A product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(x, x.square()) @ torch.view_as_complex(self.weight)).abs().mean()


def test_a_product_of_complex_numbers_stays_with_autograd() -> None:
    (unit,) = trace(Waves(), {"x": torch.randn(5, 4)}).units
    assert unit.parameters == unit.inside == ("weight",) and not unit.products


class Experts(nn.Module):
    """Rows in groups, each with a matrix of its own, one of them without rows."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.before, self.transposed = nn.Linear(8, 16), transposed
        self.experts = nn.Parameter(torch.randn((3, 8, 16) if transposed else (3, 16, 8)) / 4)

    def forward(self, x: Tensor, stops: Tensor) -> Tensor:
        weight = self.experts.transpose(1, 2) if self.transposed else self.experts
        return F.grouped_mm(self.before(x), weight, offs=stops[0]).float().square().mean()


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_rows(transposed: bool) -> None:
    """The kernel has bf16 alone: the unit's own functions, against autograd over the plain graph."""
    torch.manual_seed(0)
    module = Experts(transposed)
    batch = {"x": torch.randn(8, 8), "stops": torch.tensor([[3, 3, 8]] * 8, dtype=torch.int32)}
    found = trace(module, batch, precision="bf16")
    (unit,) = found.units
    assert unit.products == ("before.weight", "experts") and unit.inside == ("before.bias",)
    leaves = {n: p.detach().to(torch.bfloat16, copy=True).requires_grad_() for n, p in module.named_parameters()}
    arguments = [
        *(leaves[n] for n in unit.parameters),
        *(batch[f].to(torch.bfloat16) if f == "x" else batch[f] for f in unit.fields),
    ]
    (truth,) = torch.autograd.grad(unit.function(Env(rows=8), *arguments)[0], [leaves["experts"]])
    assert unit.training_function is not None
    loss, *operands = unit.training_function(Env(rows=8), *arguments)
    goals = {n: torch.zeros(leaves[n].shape) for n in unit.products}

    def add(factors: GradientFactors) -> None:
        accumulate(goals[factors.weight], factors, True, Kernels("cpu"))

    later = watch(unit.products, [*map(Operand._make, operands)], add, add)
    torch.autograd.grad(loss, [leaves["before.bias"], *(o.y for _, o in later)])
    assert torch.equal(goals["experts"][1], torch.zeros_like(goals["experts"][1])) and goals["experts"].abs().sum() > 0
    assert float((goals["experts"] - truth.float()).norm()) <= 1e-6 * float(truth.float().norm())


@pytest.mark.parametrize("single", [False, True], ids=["rows", "one sample"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "with a bias"])
def test_backward_of_a_convolution_leaves_its_weight_alone(single: bool, biased: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*(() if single else (3,)), 4, 6, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(6, 2, 3, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x, weight, bias if biased else None, stride=(2, 1), padding=1, groups=2)
    ours = convolved(x, weight, bias if biased else None, [2, 1], [1, 1], [1, 1], False, [0, 0], 2)
    assert torch.equal(ours, y)
    wanted = [x, bias] if biased else [x]
    seed = torch.randn_like(y)
    found = torch.autograd.grad(ours, wanted, seed)
    for got, true in zip(found, torch.autograd.grad(y, wanted, seed), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-13, atol=1e-13)
    assert weight.grad is None


def test_no_kernel_makes_the_gradient_of_a_convolution_s_weight_beside_that_of_its_bias() -> None:
    """As oneDNN does, if it is asked for either."""
    made: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.convolution_backward.default:
                made.extend(r for r in results[1:2] if r is not None)
            return results

    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((3, 4, 6, 5), (6, 4, 3, 2), (6,)))
    for op, kernels in ((F.conv2d, 1), (lambda *a: convolved(*a, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), 0)):
        made.clear()
        with Watch():
            torch.autograd.grad(op(x, weight.detach(), bias).sum(), [x, bias])
        assert len(made) == kernels


class TwoLayers(nn.Module):
    """Of which Megatron's plan splits the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        return self.third(torch.tanh(h)).square().mean()


class Wire:
    """A communicator that notes what is done in turn; nobody is at the other end."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def all_reduce(self, *args: Any, **kwargs: Any) -> Wire:
        self.seen.append("posted")
        return self

    def wait(self) -> None:
        self.seen.append("waited for")


class Noting(Multiplier):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def multiply(self, factors: GradientFactors) -> None:
        self.wire.seen.append(factors.weight)


def test_a_weight_gradient_is_multiplied_while_ranks_sum_the_gradient_of_its_input() -> None:
    batch, wire = {"x": torch.randn(4, 6)}, Wire()
    (unit,) = trace(TwoLayers(), batch, tensor=TensorParallelSpec({"tp": 2})).units
    noting = Noting(wire)
    env = Env(wire, rows=4, tensor={"tp": (2, 0)}, meanwhile=noting.flush)
    shapes = {
        "first.weight": (4, 6),
        "first.bias": (4,),
        "second.weight": (6, 4),
        "second.bias": (6,),
        "third.weight": (4, 6),
    }
    leaves = [torch.randn(shapes.get(n, (4,))).requires_grad_() for n in unit.parameters]
    assert unit.training_function is not None
    loss, *operands = unit.training_function(env, *leaves, batch["x"].requires_grad_())
    assert wire.seen == ["posted", "waited for"]  # the second layer's sum
    wire.seen.clear()
    watch(unit.products, [*map(Operand._make, operands)], noting.multiply, noting.behind)
    torch.autograd.grad(loss, [n for n in leaves if n.dim() == 1], allow_unused=True)
    noting.flush()
    assert wire.seen == ["posted", "third.weight", "waited for", "second.weight", "first.weight"]
