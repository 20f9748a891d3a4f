"""The layer of experts equals what its papers say, written out as loops over sequences, tokens and choices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covering import covering
from shardwise.nn import MoE
from shardwise.nn.grouped import grouped_mm

WIDTH, HIDDEN = 6, 5


class Forced(MoE):
    """Its tokens choose what a test says."""

    chosen: Tensor

    def route(self, scores: Tensor) -> Tensor:
        return self.chosen


def expert(layer: MoE, e: int, token: Tensor) -> Tensor:
    inside = layer.up[e] @ token
    if layer.gated:
        inside = layer.activation(inside[: layer.down.shape[2]]) * inside[layer.down.shape[2] :]
    else:
        inside = layer.activation(inside)
    return layer.down[e] @ inside


def reference(layer: MoE, x: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """The result, the loss and the number of dropped choices, one after the other; ``x`` is (B, S, width)."""
    experts, top_k, length = layer.experts, layer.top_k, x.shape[1]
    out, balance, z, dropped = torch.zeros_like(x), x.new_zeros(()), x.new_zeros(()), 0
    for b, sequence in enumerate(x):
        logits = [layer.gate.weight @ token for token in sequence]
        scores = [F.softmax(one, 0) if layer.scores == "softmax" else one.sigmoid() for one in logits]
        biased = [one if layer.bias is None else one + layer.bias for one in scores]
        ids = [sorted(range(experts), key=lambda e, one=one: -float(one[e].detach()))[:top_k] for one in biased]
        if forced is not None:
            ids = forced[b].tolist()
        capacity = math.inf
        if layer.capacity_factor is not None:
            capacity = math.ceil(layer.capacity_factor * top_k * length / experts)
        taken = [0] * experts
        for choice in range(top_k):
            for s in range(length):
                e = ids[s][choice]
                taken[e] += 1
                if taken[e] > capacity:
                    dropped += 1
                    continue
                weight = scores[s][e]
                if layer.normalise:
                    weight = weight / sum(scores[s][one] for one in ids[s])
                out[b, s] = out[b, s] + layer.scale * weight * expert(layer, e, sequence[s])
        for s in range(length) if layer.shared else ():
            inside = layer.shared_up(sequence[s])
            if layer.gated:
                inside = layer.activation(inside[: len(inside) // 2]) * inside[len(inside) // 2 :]
            out[b, s] = out[b, s] + layer.shared_down(inside if layer.gated else layer.activation(inside))
        shares = [one / one.sum() for one in scores]
        for e in range(experts):
            mean = sum(one[e] for one in shares) / length
            if layer.balance == "switch":
                fraction = sum(one.count(e) for one in ids) / (length * top_k)
                balance = balance + experts * fraction * mean
            elif layer.balance == "gshard":
                fraction = sum(one[0] == e for one in ids) / length
                balance = balance + fraction * mean / experts
        z = z + sum(torch.logsumexp(one, 0) ** 2 for one in logits) / length
    return out, (layer.balance_weight * balance + layer.z_weight * z) / len(x), dropped


def compared(layer: MoE, x: Tensor, forced: Tensor | None = None) -> int:
    """Compare results, losses and all gradients; return the number of dropped choices."""
    x = x.clone().requires_grad_()
    weight = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    wanted = [x, *layer.parameters()]
    expected, loss, dropped = reference(layer, x, forced)
    right = torch.autograd.grad((expected * weight).sum() + loss, wanted, allow_unused=True, materialize_grads=True)
    bias = None if layer.bias is None else layer.bias.clone()
    found, own = layer(x)
    mine = torch.autograd.grad((found * weight).sum() + own, wanted, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own, loss, rtol=1e-12, atol=1e-12)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    assert bias is None or (layer.bias is not None and not torch.equal(bias, layer.bias)) == (layer.bias_rate > 0)
    return dropped


def tokens(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def made(kind: type[MoE] = MoE, experts: int = 4, top_k: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(WIDTH, HIDDEN, experts, top_k, **options).double()


OPTIONS: list[tuple[Any, ...]] = list(
    itertools.product(
        ((4, 2), (5, 1), (3, 3), (1, 1)),
        ("swiglu", "geglu", "gelu", "relu", "silu"),
        ("softmax", "sigmoid"),
        (None, False),
        (1.0, 2.5),
        (None, 0.5, 1.0, 100.0),
        ("switch", "gshard", None),
        (0.0, 0.1),
        (0.0, 0.01),
        (0, 2),
    )
)


@pytest.mark.quick(12)
@pytest.mark.parametrize("case", list(covering(OPTIONS)), ids=str)
def test_every_option(case: tuple[Any, ...]) -> None:
    """Every pair of values of each two options."""
    (experts, top_k), activation, scores, normalise, scale, factor, balance, z, rate, shared = case
    layer = made(
        experts=experts, top_k=top_k, activation=activation, scores=scores, normalise=normalise, scale=scale,
        capacity_factor=factor, balance=balance, balance_weight=0.3, z_weight=z, bias_rate=rate, shared=shared,
    )  # fmt: skip
    if rate:
        layer.bias.copy_(torch.linspace(-0.2, 0.2, experts))
        layer.bias_rate = rate if experts not in (1, top_k) else 0.0  # where all have as many, it stays
    compared(layer, tokens())


# ---- what tokens choose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("how", ["all to one", "none to one", "exactly the capacity", "one more than it", "random"])
def test_forced_routers(how: str, top_k: int, factor: float | None) -> None:
    rows, length, experts = 2, 8, 4
    layer = made(Forced, experts, top_k, capacity_factor=factor, normalise=False)
    even = torch.arange(length * top_k).remainder(experts).view(length, top_k).expand(rows, -1, -1).clone()
    one_more = even.clone()
    one_more[0, 4] = one_more[0, 5]
    layer.chosen = {
        "all to one": torch.full((rows, length, top_k), 2), "none to one": even.clamp(min=1),
        "exactly the capacity": even, "one more than it": one_more,
        "random": torch.randint(0, experts, (rows, length, top_k), generator=torch.Generator().manual_seed(0)),
    }[how]  # fmt: skip
    dropped = compared(layer, tokens(rows, length), layer.chosen)
    capacity = length * top_k // experts
    counts = torch.stack([torch.bincount(one.flatten(), minlength=experts) for one in layer.chosen])
    assert dropped == (0 if factor is None else int((counts - capacity).clamp(min=0).sum()))
    expected = {"exactly the capacity": 0, "all to one": rows * (length * top_k - capacity), "one more than it": top_k}
    if factor is not None and how in expected:
        assert dropped == expected[how]


def test_first_choices_come_before_second_ones() -> None:
    """The second choice of the first token gives way to the first choice of the last."""
    layer = made(Forced, 2, 2, capacity_factor=0.5, normalise=False)
    layer.chosen = torch.tensor([[[0, 1], [1, 0]]])
    kept = layer._within_capacity(layer.chosen)
    assert kept.tolist() == [[[0, 2], [1, 2]]]  # 2 is no expert


def test_a_sequence_does_not_depend_on_others() -> None:
    layer, x = made(capacity_factor=0.5), tokens()
    whole, loss = layer(x)
    alone = [layer(one[None]) for one in x]
    torch.testing.assert_close(whole, torch.cat([one for one, _ in alone]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, torch.stack([one for _, one in alone]).mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (2, 1), (2, 0)])
def test_shapes(shape: tuple[int, ...]) -> None:
    """A matrix of tokens is one sequence; sequences may have several batch dims, one token, or none."""
    layer, x = made(capacity_factor=1.0, shared=1, balance=None), torch.randn(*shape, WIDTH).double()
    found, _ = layer(x)
    assert found.shape == x.shape
    whole = x.flatten(0, -3) if len(shape) > 1 else x[None]
    torch.testing.assert_close(found, layer(whole)[0].view(x.shape))


def test_bias_balances() -> None:
    """Tokens that all prefer one expert spread as its bias falls; in evaluation it stays."""
    layer = made(experts=4, top_k=1, scores="sigmoid", balance=None, bias_rate=0.02)
    x = tokens(8, 16)
    with torch.no_grad():
        layer.gate.weight[0] += 2 * x.mean((0, 1)) / x.mean((0, 1)).norm()
        layer.bias[0] = 0.3

    def most() -> int:
        ids = layer.route(F.linear(x, layer.gate.weight).sigmoid())
        return int(torch.bincount(ids.flatten(), minlength=4).max())

    before = most()
    for _ in range(60):
        layer(x)
    assert before > 80 and most() < 45  # of 128
    bias = layer.bias.clone()
    layer.eval()(x)
    assert torch.equal(bias, layer.bias)


def test_it_learns_in_an_ordinary_loop() -> None:
    layer = MoE(WIDTH, 16, 4)
    x = tokens().float()
    goal = x.roll(1, -1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        found, extra = layer(x)
        loss = F.mse_loss(found, goal) + extra
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("factor", [None, 0.75])
def test_half_precision(dtype: torch.dtype, size: int, factor: float | None) -> None:
    """Near fp64 with the same weights, with torch's kernel and without."""
    torch.manual_seed(0)
    layer = MoE(size, 2 * size, 4, capacity_factor=factor).to(dtype)
    wide = MoE(size, 2 * size, 4, capacity_factor=factor).double()
    wide.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, size, dtype=dtype, requires_grad=True)
    far = x.detach().double().requires_grad_()
    (found, loss), (expected, right) = layer(x), wide(far)
    assert found.dtype is dtype and loss.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=0)
    (found.double().square().sum() + loss).backward()
    (expected.square().sum() + right).backward()
    torch.testing.assert_close(x.grad.double(), far.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(layer.up.grad.double(), wide.up.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("ends", [(0, 0, 0), (5, 5, 5), (0, 2, 5), (1, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_grouped_product(ends: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(3, 8, 16, dtype=dtype)
    found = grouped_mm(x, weight, torch.tensor(ends, dtype=torch.int32))
    start = 0
    for group, stop in enumerate(ends):
        torch.testing.assert_close(found[start:stop], x[start:stop] @ weight[group])
        start = stop


@pytest.mark.quick(1)
@pytest.mark.parametrize("ends", [(0, 2, 5), (1, 1, 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_is_an_op(ends: tuple[int, ...], transposed: bool) -> None:
    """Its gradients are right, also of rows of no group, and it can be captured."""
    x, stops = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor(ends, dtype=torch.int32)
    weight = torch.randn(3, 2, 3, dtype=torch.float64) if transposed else torch.randn(3, 3, 2, dtype=torch.float64)
    weight.requires_grad_()
    product = lambda x, w: grouped_mm(x, w.mT if transposed else w, stops)  # noqa: E731
    assert torch.autograd.gradcheck(product, (x, weight))
    torch.library.opcheck(torch.ops.shardwise.grouped_mm.default, (x, weight.mT if transposed else weight, stops))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 0}, "experts = 0 is not legal; legal: 1 or more"),
        ({"top_k": 5}, "top_k = 5 is not legal; legal: 1 to 4"),
        ({"top_k": 0}, "top_k = 0 is not legal; legal: 1 to 4"),
        ({"hidden": 0}, "hidden = 0 is not legal"),
        ({"activation": "tanh"}, "activation = 'tanh' is not legal; legal: \"swiglu\", "),
        ({"scores": "relu"}, 'scores = \'relu\' is not legal; legal: "softmax", "sigmoid"'),
        ({"balance": "bias"}, "balance = 'bias' is not legal; legal: \"switch\", \"gshard\", None"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0 is not legal; legal: more than 0"),
        ({"z_weight": -1.0}, "z_weight = -1.0 is not legal; legal: 0 or more"),
        ({"shared": -1}, "shared = -1 is not legal; legal: 0 or more"),
        ({"top_k": 1, "normalise": True}, "normalise = True is not legal; legal: False"),
    ],
)  # fmt: skip
def test_what_is_not_legal(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="MoE: ") as error:
        MoE(**{"width": 4, "hidden": 4, "experts": 4, **options})
    assert words in str(error.value)


def test_it_is_a_module() -> None:
    layer = made(shared=1, bias_rate=0.1)
    assert isinstance(layer, nn.Module) and set(layer.state_dict()) == {
        "bias", "up", "down", "gate.weight", "shared_up.weight", "shared_down.weight"
    }  # fmt: skip
