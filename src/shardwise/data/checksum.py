"""Checksums of tensors and of whole batches, by which ranks, and runs that resume, see that they read the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, uint8

from shardwise.core.structure import objects_of, parts_of, structure_of
from shardwise.graph.layouts import is_sparse, parts_of_sparse
from shardwise.graph.torch_private import without_torch_functions


def checksum(tensor: Tensor, word: int = 0) -> int:
    """Return the checksum of a tensor's bytes, on from ``word``."""
    if is_sparse(tensor):
        for part in parts_of_sparse(tensor):
            word = checksum(part, word)
        return word
    with without_torch_functions():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(uint8)
    return zlib.crc32(raw.numpy().data, word)


def checksum_of(batch: Mapping[str, Tensor], word: int = 0) -> int:
    """Return the checksum of all that a batch has: its tensors, its constants and its objects."""
    form, objects = structure_of(batch), objects_of(batch)
    numbered = () if form is None else [name for name, kind in form.kinds.items() if kind in ("object", "objects")]
    for name in sorted(batch):
        if name in numbered or name.partition(" ")[2] in numbered:
            for one in batch[name].reshape(-1).tolist():
                word = checksum_of_object(objects.get(one), word)
        else:
            word = checksum(batch[name], word)
    return word if form is None else checksum_of_object(dict(form.constants), word)


def checksum_of_object(value: Any, word: int = 0) -> int:
    """Return the checksum of text, numbers, tensors, and containers of these; of other objects their class counts."""
    if isinstance(value, Tensor):
        return checksum(value, word)
    parts = parts_of(value)
    if parts is None:  # of an object that no library knows its class alone is the same in all processes
        said = repr(value) if isinstance(value, str | bytes | bool | int | float | None) else type(value).__qualname__
        return zlib.crc32(said.encode(), word)
    for key, part in parts.items():
        word = checksum_of_object(part, zlib.crc32(repr(key).encode(), word))
    return word
