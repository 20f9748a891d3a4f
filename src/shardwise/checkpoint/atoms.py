"""A checkpoint is made of pieces: each is a box (a rectangular part) of a named tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Box


class Gather(Protocol):
    """A collective that returns every rank's bytes in rank order.  A writer calls it from its own thread, in the same
    order on all ranks."""

    def __call__(self, data: bytes, everywhere: bool = True) -> list[bytes]:
        """Return the ``data`` of all ranks; without ``everywhere`` rank 0 alone gets it and the others an empty list,
        so that they need no memory for large messages."""


def alone(data: bytes, everywhere: bool = True) -> list[bytes]:
    """Return ``data`` alone: this is the :class:`Gather` of a single rank."""
    return [data]


DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
"""The dtypes that a checkpoint can hold, by their names in safetensors."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and its values.

    Args:
        name: the name of the tensor, such as ``model.blocks.0.attention.weight``.
        shape: the shape of the whole tensor, over all ranks.
        box: the part of the tensor that this piece holds; ``Box((), ())`` for a scalar.
        tensor: the values, of shape ``box.shape``, on any device; a view is allowed.  Loading fills it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values."""
        return self.box.numel * self.tensor.dtype.itemsize

    def check(self) -> None:
        """Raise :class:`ShardwiseError` unless box, shape and tensor belong together."""
        where = f"piece of {self.name!r}"
        if not self.name or self.name == "__metadata__":
            raise ShardwiseError(f"{where}: the name is not legal; legal: any but an empty one and '__metadata__'")
        if len(self.box.start) != len(self.shape) or any(size < 0 for size in self.shape):
            raise ShardwiseError(
                f"{where}: box {span(self.box)} does not belong to a tensor of shape {list(self.shape)}"
            )
        if not inside(self.box, self.shape):
            raise ShardwiseError(f"{where}: box {span(self.box)} lies outside a tensor of shape {list(self.shape)}")
        if tuple(self.tensor.shape) != self.box.shape:
            raise ShardwiseError(f"{where}: box {span(self.box)} has values of shape {list(self.tensor.shape)}")
        if self.tensor.layout != torch.strided or self.tensor.is_meta:
            raise ShardwiseError(
                f"{where}: a {self.tensor.layout} tensor on {self.tensor.device} has no values to save or fill"
            )


def inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether ``box`` lies inside a tensor of ``shape``."""
    sizes = zip(box.start, box.stop, shape, strict=True)
    return all(0 <= start <= stop <= size for start, stop, size in sizes)


def span(box: Box) -> str:
    """Return a box in words, such as ``[0:4, 2:3]``."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.start, box.stop, strict=True))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of ``dtype``; raise :class:`ShardwiseError` where it has none."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ShardwiseError(f"a checkpoint cannot hold {dtype}; legal: {', '.join(map(str, DTYPES.values()))}")
