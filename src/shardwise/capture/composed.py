"""Random functions of torch as calls of other ones, whose numbers can be keyed by sample.

What they draw has the distribution that torch gives it; where an element is rounded to fewer bits, that is done last.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture import recurrent


def composed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return what makes a call by calls of other functions; None where the call can stay as it is."""
    if func in recurrent.FUNCTIONS:
        return recurrent.dropped_between(func, args, kwargs)
    if func == _IS_META:
        given = _truncated_normal()
        return None if given is None else partial(_trunc_normal_, **given)
    make = _COMPOSED.get(func)
    if make is None or make in (_rrelu, _rrelu_) and not _trains(*args, **kwargs):
        return None
    return partial(make, *args, **kwargs)


_PROPERTY: Any = Tensor.is_meta
_IS_META = _PROPERTY.__get__


def _truncated_normal() -> Mapping[str, Any] | None:
    """Return the arguments of ``nn.init.trunc_normal_`` where that asks whether its tensor is on meta, else None.

    It asks for no layer, and draws until all values are between its bounds, so that how often it draws depends on the
    rows that a device has.  For a tensor on meta it does nothing: so it is answered when all is done."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("shardwise."):
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    return None if frame is None or frame.f_code is not nn.init.trunc_normal_.__code__ else frame.f_locals


def _trunc_normal_(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any) -> bool:
    """Draw by the inverse of the distribution function, at the tail that is exact, the lower one; return True."""
    if tensor.device.type != "meta":
        low, high, sign = (a - mean) / std, (b - mean) / std, 1
        if low > 0:
            low, high, sign = -high, -low, -1
        below, above = (math.erfc(-bound / math.sqrt(2)) / 2 for bound in (low, high))
        u = _wide(tensor).uniform_(below, above, generator=generator)
        values = torch.special.ndtri(u.clamp(min=torch.finfo(u.dtype).tiny)).clamp(low, high) * (sign * std) + mean
        with torch.no_grad():
            tensor.copy_(values.clamp(a, b))
    return True


def _wide(input: Tensor) -> Tensor:
    """Return a tensor of this shape with at least the precision of fp32, without values."""
    return torch.empty_like(input.detach(), dtype=torch.promote_types(input.dtype, torch.float32))


def _cauchy_(input: Tensor, median: float = 0.0, sigma: float = 1.0, generator: Any = None) -> Tensor:
    """The quotient of two normal values; the tangent of a uniform value would have no far tails."""
    if sigma <= 0:
        raise RuntimeError(f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    one, other = (_wide(input).normal_(generator=generator) for _ in range(2))
    return input.copy_(one / other * sigma + median)


def _log_normal_(input: Tensor, mean: float = 1.0, std: float = 2.0, generator: Any = None) -> Tensor:
    if std <= 0:
        raise RuntimeError(f"log_normal_ expects std > 0.0, but found std={std}")
    return input.copy_(_wide(input).normal_(mean, std, generator=generator).exp())


def _geometric_(input: Tensor, p: float, generator: Any = None) -> Tensor:
    """An exponential value is above k with the probability of k failures, (1 - p)^k."""
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    return input.copy_(_wide(input).exponential_(-math.log1p(-p), generator=generator).ceil())


def _trains(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> bool:
    return training


def _slopes(input: Tensor, lower: float, upper: float, generator: Any) -> Tensor:
    if lower > upper:
        raise RuntimeError("Lower bound should be less than or equal to the upper bound")
    drawn = _wide(input).uniform_(lower, upper, generator=generator)
    return torch.where(input.detach() > 0, 1.0, drawn).to(input.dtype)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    return input * _slopes(input, lower, upper, generator)


def _rrelu_(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    return input.mul_(_slopes(input, lower, upper, generator))


_COMPOSED: dict[Any, Callable[..., Tensor]] = {
    Tensor.cauchy_: _cauchy_,
    Tensor.log_normal_: _log_normal_,
    Tensor.geometric_: _geometric_,
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu_,
}

__all__ = ["composed"]
