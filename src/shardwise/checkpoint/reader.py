"""A checkpoint can be read in any boxes, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import Box

from .atoms import Piece, dtype_name
from .container import hash_file, opened, read_header
from .folder import checkpoints, latest
from .manifest import Manifest, TensorRecord
from .strict import FileError, regular_size

__all__ = ["Checkpoint", "checkpoints", "latest"]


@dataclass(frozen=True)
class _Copy:
    """A copy from the slices ``source`` of tensor ``key`` in a file to ``target``, of the same shape."""

    key: str
    source: tuple[slice, ...]
    target: Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose manifest has been read and checked; make one with :meth:`open`."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Read the manifest of a checkpoint's folder.

        Raises:
            ConfigError: the manifest, which is named, is missing, damaged, of another program or of a newer shardwise.
        """
        path = Path(path)
        return Checkpoint(path, Manifest.read(path))

    @property
    def step(self) -> int:
        """The training step after which it was saved."""
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """The ``meta`` that rank 0 gave to ``save``."""
        return MappingProxyType(dict(self.manifest.meta))

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The shape, dtype and pieces of each tensor, by name."""
        return MappingProxyType(dict(self.manifest.tensors))

    @property
    def nbytes(self) -> int:
        """The number of bytes of all data files."""
        return sum(file.nbytes for file in self.manifest.files.values())

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Check every ``parts``-th file from number ``part`` on: its size, SHA-256 and header against the manifest.

        Ranks that load may share the work; each raises ConfigError, which names the file, for its own files only.
        """
        for name in sorted(self.manifest.files)[part::parts]:
            self._check_header(name)
            found = hash_file(self.path / name)
            if found != self.manifest.files[name].sha256:
                raise FileError(
                    self.path / name,
                    f"damaged: its SHA-256 is {found}, the manifest says {self.manifest.files[name].sha256}",
                )

    def load(self, pieces: Iterable[Piece]) -> None:
        """Fill each ``piece.tensor`` from the stored boxes that overlap it.

        The sizes and headers of the files are checked but not their digests, which :meth:`verify` checks.  Everything
        is checked before the first byte is copied.

        Raises:
            ConfigError: a name is not there, a shape or dtype differs, or a file is missing or not as in the manifest.
            ShardwiseError: a piece contradicts itself.
        """
        copies: dict[str, list[_Copy]] = {}
        for piece in pieces:
            piece.check()
            self._check_piece(piece)
            for file, copy in _copies(self.record(piece.name), piece):
                copies.setdefault(file, []).append(copy)
        for file in copies:
            self._check_header(file)
        for file, listed in copies.items():
            self._read(file, listed)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in its recorded shape and dtype, on the CPU."""
        record = self.record(name)
        for file in {piece.file for piece in record.pieces}:
            self._check_header(file)  # before memory is allocated
        values = torch.empty(record.shape, dtype=record.dtype)
        self.load([Piece(name, record.shape, Box.whole(record.shape), values)])
        return values

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor; raise ConfigError where there is none of this name."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise ConfigError(f"{self.path}: holds no tensor {name!r}") from None

    def _check_piece(self, piece: Piece) -> None:
        record = self.record(piece.name)
        if tuple(piece.shape) != record.shape:
            raise ConfigError(
                f"{self.path}: {piece.name!r} has the shape {list(record.shape)}, not {list(piece.shape)}"
            )
        if piece.tensor.dtype != record.dtype:
            raise ConfigError(f"{self.path}: {piece.name!r} is {record.dtype}, not {piece.tensor.dtype}")

    def _check_header(self, name: str) -> None:
        """Check that a file has the size that the manifest says and holds exactly the tensors that it should."""
        path, record = self.path / name, self.manifest.files[name]
        size = regular_size(path)
        if size != record.nbytes:
            raise FileError(path, f"damaged: has {size} bytes, the manifest says {record.nbytes}")
        changed = path.stat().st_mtime_ns
        if self._checked.get(name) == changed:  # tensors are often read one by one
            return
        entries, _ = read_header(path)
        found = {key: (entry.shape, entry.dtype) for key, entry in entries.items()}
        wanted = self._wanted[name]
        for key in sorted(found.keys() | wanted.keys()):
            if found.get(key) != wanted.get(key):
                raise FileError(
                    path, f"damaged: {key!r} is {_kind(found.get(key))}, the manifest says {_kind(wanted.get(key))}"
                )
        self._checked[name] = changed

    @cached_property
    def _checked(self) -> dict[str, int]:
        """The files whose header has been found right, and when they were last changed (ns)."""
        return {}

    @cached_property
    def _wanted(self) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """The shape and dtype that the manifest says each file holds under each key."""
        found: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {name: {} for name in self.manifest.files}
        for tensor in self.manifest.tensors.values():
            for piece in tensor.pieces:
                found[piece.file][piece.key] = (piece.box.shape, tensor.dtype)
        return found

    def _read(self, name: str, copies: list[_Copy]) -> None:
        with opened(self.path / name) as read:
            for copy in copies:
                copy.target.copy_(read(copy.key)[copy.source])


def _copies(record: TensorRecord, piece: Piece) -> list[tuple[str, _Copy]]:
    """Return (file, copy) for each stored box that fills part of a piece; the boxes of ``record`` tile its tensor."""
    found, held = [], 0
    for stored in record.pieces:
        box = stored.box.intersect(piece.box)
        if box is not None:
            held += box.numel
            found.append(
                (
                    stored.file,
                    _Copy(stored.key, _within(box, stored.box), piece.tensor.detach()[_within(box, piece.box)]),
                )
            )
    if held != math.prod(piece.box.shape):
        raise ShardwiseError(f"the boxes of {piece.name!r} hold {held} of the {piece.box.numel} elements of a piece")
    return found


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of ``box`` in an array that holds ``outer``."""
    ends = zip(box.start, box.stop, outer.start, strict=True)
    return tuple(slice(start - base, stop - base) for start, stop, base in ends)


def _kind(found: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "not there" if found is None else f"{dtype_name(found[1])} of shape {list(found[0])}"
