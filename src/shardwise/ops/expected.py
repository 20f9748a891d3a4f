"""Checks on values that a forward makes in Python, made in each step by the ranks on their own elements."""

from __future__ import annotations

from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.ops.own_op import own_op


@own_op(shares=True, blind=True)
def expected(mask: Tensor, wanted: bool, what: str) -> Tensor:
    """Return ``mask``, a tensor of truth values; raise :class:`ShardwiseError` where one is not as ``wanted``, with
    ``what`` says where it is checked (`` in encoder (model.py:7)``).  Elements that others have are checked there."""
    if not mask.is_meta and mask.numel() and not bool(mask.all() if wanted else ~mask.any()):
        raise ShardwiseError(
            f"model: a check of values{what} has another outcome than when forward was captured: a number is not "
            "finite, or forward would raise here; legal: values that pass, as in the first step"
        )
    return mask


__all__ = ["expected"]
