"""Parameters that a program has though it computes nothing with them."""

from __future__ import annotations

from torch import Tensor

from shardwise.ops.own_op import own_op


@own_op(shares=True, blind=True)
def beside(x: Tensor, *parameters: Tensor) -> Tensor:
    """Return ``x``; autograd gives the ``parameters``, on which nothing depends, no gradient."""
    return x


__all__ = ["beside"]
