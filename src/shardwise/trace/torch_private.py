"""The one place that touches what torch does not promise to keep: names here, uses of them everywhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchNormBase", "HigherOrderOperator", "OpOverload", "TorchDispatchMode", "overload_name", "schema", "version"]


def schema(op: Any) -> Any:
    """The schema of an ATen or custom op: its name, arguments and what it writes."""
    return op._schema


def overload_name(op: Any) -> str:
    """Which of the ops of one name it is: ``Tensor``, ``Scalar``, …"""
    return str(op._overloadname)


def version(x: Tensor) -> int:
    """How often a tensor has been written in place."""
    return int(torch.Tensor._version.__get__(x))
