"""What may be asked of a tensor whose value is elsewhere: facts, but not values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_FACTS = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_meta", "is_cuda", "is_sparse",
          "itemsize", "nbytes", "is_cpu", "is_xpu", "is_mps", "grad_fn")  # fmt: skip
_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "ndimension",
            "__hash__", "__len__", "new_zeros", "new_ones", "new_empty", "new_full")  # fmt: skip
FACTS = frozenset([*(getattr(Tensor, name).__get__ for name in _FACTS), *(getattr(Tensor, name) for name in _METHODS)])
"""The functions that ask for facts."""

_DATA: Any = Tensor.data
UNSEEN = frozenset([
    _DATA.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage, Tensor.data_ptr,
])  # fmt: skip
"""The functions that give a tensor's memory to somebody who may write to it without autograd's knowledge."""

_OF_GRAD: Any = Tensor.grad
GRAD, SET_GRAD = _OF_GRAD.__get__, _OF_GRAD.__set__
"""The functions that read and set a tensor's gradient."""
