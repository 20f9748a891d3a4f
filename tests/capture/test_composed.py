"""Random functions that are made of others have the distribution of torch's in every dtype, and refuse the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.intercept import Intercept
from shardwise.capture.keyed_calls import KeyedRandom

NUMBER = 40_000


def _between(low: float, high: float, p: float) -> float:
    below, above = (0.5 * math.erfc(-bound / math.sqrt(2)) for bound in (low, high))
    return float(torch.special.ndtri(torch.tensor(below + p * (above - below), dtype=torch.float64)))


QUANTILES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "cauchy_": (lambda x: x.cauchy_(1.0, 2.0), lambda p: 1 + 2 * math.tan(math.pi * (p - 0.5))),
    "log_normal_": (
        lambda x: x.log_normal_(0.5, 0.25), lambda p: math.exp(0.5 + 0.25 * float(torch.special.ndtri(torch.tensor(p))))
    ),
    "geometric_": (lambda x: x.geometric_(0.4), lambda p: math.ceil(math.log1p(-p) / math.log1p(-0.4))),
    "trunc_normal_": (lambda x: nn.init.trunc_normal_(x, 1.0, 2.0, 0.0, 5.0), lambda p: 1 + 2 * _between(-0.5, 2, p)),
    "trunc_normal_ of an upper tail": (
        lambda x: nn.init.trunc_normal_(x, a=3.0, b=4.0), lambda p: -_between(-4, -3, 1 - p)
    ),
    "trunc_normal_ of a lower tail": (lambda x: nn.init.trunc_normal_(x, a=-9.0, b=-3), lambda p: _between(-9, -3, p)),
    "rrelu": (lambda x: F.rrelu(x.fill_(-1.0), 0.2, 0.7, training=True), lambda p: -0.7 + 0.5 * p),
    "rrelu_": (lambda x: F.rrelu_(x.fill_(-1.0), 0.2, 0.7, training=True), lambda p: -0.7 + 0.5 * p),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", QUANTILES)
def test_as_many_are_below_a_quantile_as_should_be(name: str, dtype: torch.dtype) -> None:
    draw, quantile = QUANTILES[name]
    random = KeyedRandom(3)
    random.begin(0, 0)
    with Intercept(random):
        drawn = draw(torch.empty(NUMBER, dtype=dtype))
    assert len(random.draws) == (2 if name == "cauchy_" else 1)
    assert drawn.dtype is dtype and bool(drawn.isfinite().all())
    for p in (0.1, 0.25, 0.5, 0.8, 0.97):
        at, near = quantile(p), 2.0**-7 if dtype is torch.bfloat16 else 2.0**-9  # values are rounded
        below, above = (float((drawn.double() < at + s * abs(at) * near).double().mean()) for s in (-1, 1))
        noise = 5 * math.sqrt(p * (1 - p) / NUMBER)
        assert below - noise <= p <= above + noise


def test_truncated_values_are_between_their_bounds() -> None:
    random = KeyedRandom(3)
    random.begin(0, 0)
    for low, high in ((-2.0, 2.0), (2.0, 2.001), (-30.0, 0.0), (-math.inf, 1.0)):
        x = torch.empty(NUMBER, requires_grad=True)
        with Intercept(random):
            assert nn.init.trunc_normal_(x, a=low, b=high) is x
        assert low <= float(x.detach().min()) < float(x.detach().max()) <= high
        assert bool(x.detach().isfinite().all()) and x.grad_fn is None
    with Intercept(random):
        assert nn.init.trunc_normal_(torch.empty(3, device="meta")).is_meta
    assert len(random.draws) == 4


def test_values_above_zero_stay_and_outside_training_the_slope_is_the_mean() -> None:
    x = torch.tensor([-1.0, 2.0, 0.0], requires_grad=True)
    random = KeyedRandom(3)
    random.begin(0, 0)
    with Intercept(random):
        y = F.rrelu(x, 0.2, 0.6, training=True)
        z = F.rrelu(x, 0.2, 0.6)
    assert torch.equal(z, F.leaky_relu(x, 0.4)) and torch.equal(y[1:], x[1:])
    slope = float(torch.autograd.grad(y.sum(), x)[0][0])
    assert 0.2 <= slope < 0.6 and float(y.detach()[0]) == -slope
    assert [one.name for one in random.draws] == ["uniform_"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.cauchy_(0, 0), "sigma=0"),
        (lambda x: x.log_normal_(0, -1.0), "std=-1"),
        (lambda x: x.geometric_(1.0), "p=1"),
        (lambda x: F.rrelu(x, 0.5, 0.2, training=True), "Lower bound"),
    ],
)
def test_what_torch_refuses_is_refused(call: Callable[[Tensor], Tensor], message: str) -> None:
    for mode in (contextlib.nullcontext(), Intercept()):
        with pytest.raises(RuntimeError, match=message), mode:
            call(torch.ones(3))
