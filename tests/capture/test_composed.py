"""Random functions that are made of others have the distribution of torch's in every dtype, and refuse the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.capture.intercept import Intercept
from shardwise.capture.keyed_calls import KeyedRandom

NUMBER = 40_000

QUANTILES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "cauchy_": (lambda x: x.cauchy_(1.0, 2.0), lambda p: 1 + 2 * math.tan(math.pi * (p - 0.5))),
    "log_normal_": (
        lambda x: x.log_normal_(0.5, 0.25), lambda p: math.exp(0.5 + 0.25 * float(torch.special.ndtri(torch.tensor(p))))
    ),
    "geometric_": (lambda x: x.geometric_(0.4), lambda p: math.ceil(math.log1p(-p) / math.log1p(-0.4))),
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
    assert drawn.dtype is dtype and bool(drawn.isfinite().all())
    for p in (0.1, 0.25, 0.5, 0.8, 0.97):
        at, near = quantile(p), 2.0**-7 if dtype is torch.bfloat16 else 2.0**-9  # values are rounded
        below, above = (float((drawn.double() < at + s * abs(at) * near).double().mean()) for s in (-1, 1))
        noise = 5 * math.sqrt(p * (1 - p) / NUMBER)
        assert below - noise <= p <= above + noise


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
