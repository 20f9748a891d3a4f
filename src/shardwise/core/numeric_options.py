"""This module has the options of a plan for the precision in which the model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.options import check_options, word

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Dropout = Literal["exact", "fast"]

LOW_PRECISIONS = ("bf16", "fp16")
"""These precisions compute with low-precision copies of fp32 master weights."""


def scalar_bytes(precision: str) -> int:
    """Return the bytes of a master weight, and of a loss or norm, under a precision."""
    return 8 if precision == "fp64" else 4


@dataclass(frozen=True, slots=True)
class NumericOptions:
    """``precision`` is the dtype in which the model computes; ``dropout = "fast"`` allows fused kernels whose masks
    depend on the layout."""

    precision: Precision = word("fp32", get_args(Precision))
    dropout: Dropout = word("exact", get_args(Dropout))

    def __post_init__(self) -> None:
        check_options(self)
