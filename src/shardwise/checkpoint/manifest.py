"""A checkpoint's manifest says what it holds, in which files, and the size and SHA-256 that each file must have."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Box

from .atoms import DTYPES, dtype_name
from .cover import cover_fault
from .folder import MANIFEST, rank_file, step_of
from .strict import Fields, FileError, parse_json, read_bytes

FORMAT = "shardwise-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Stored:
    """A box of a tensor, stored as tensor ``key`` of ``file``."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor and the boxes that tile it; a tensor without elements has no boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Stored, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """The size and SHA-256 that a data file must have."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a checkpoint says about itself; ``meta`` is any JSON object that the caller gave."""

    step: int
    ranks: int
    meta: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    def fault(self) -> str | None:
        """Return what is wrong, in words: boxes that do not tile their tensor, a file without a record; or None."""
        used: set[tuple[str, str]] = set()
        for name, tensor in self.tensors.items():
            wrong = cover_fault(tensor.shape, [piece.box for piece in tensor.pieces])
            if wrong:
                return f"tensor {name!r}: {wrong}"
            for piece in tensor.pieces:
                if piece.file not in self.files:
                    return f"tensor {name!r} is in {piece.file!r}, of which it has no record"
                if (piece.file, piece.key) in used:
                    return f"tensor {name!r}: {piece.key!r} of {piece.file!r} is used twice"
                used.add((piece.file, piece.key))
        unused = set(self.files) - {file for file, _ in used}
        return f"file {min(unused)!r} holds no tensor" if unused else None

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, with a digest of its own content."""
        content = self._content()
        return json.dumps({**content, "sha256": _digest(content)}, indent=1, allow_nan=False).encode() + b"\n"

    def _content(self) -> dict[str, Any]:
        tensors = {
            name: {
                "shape": list(tensor.shape),
                "dtype": dtype_name(tensor.dtype),
                "pieces": [
                    {"file": one.file, "key": one.key, "start": list(one.box.start), "stop": list(one.box.stop)}
                    for one in tensor.pieces
                ],
            }
            for name, tensor in self.tensors.items()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "ranks": self.ranks,
            "meta": self.meta,
            "files": {name: {"bytes": file.nbytes, "sha256": file.sha256} for name, file in self.files.items()},
            "tensors": tensors,
        }

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Return the manifest of a checkpoint's folder.

        Raises:
            ConfigError: the manifest, which is named, is missing, damaged, of another program or of a newer shardwise.
        """
        path = folder / MANIFEST
        value = parse_json(path, read_bytes(path))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else None
            raise FileError(path, f'not a checkpoint of shardwise: "format" is {found!r} instead of {FORMAT!r}')
        _check_version(path, value.get("version"))
        digest = value.pop("sha256", None)
        if digest != _digest(value):
            raise FileError(path, f"damaged: its content is not what its sha256, {digest!r}, was made of")
        manifest = _parse(path, value)
        named = step_of(folder)
        if named is not None and named != manifest.step:
            raise FileError(path, f"of step {manifest.step}, but its folder is that of step {named}")
        return manifest


def plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``meta`` as JSON reads it back; :class:`ShardwiseError` for what JSON cannot hold, or keys other than
    text."""
    _check_keys("meta", meta)
    try:
        return dict(json.loads(json.dumps(dict(meta), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ShardwiseError(f"meta cannot be written as JSON: {error}") from error


def _check_keys(where: str, value: Any) -> None:
    """Raise where a key is not text: JSON would silently turn the key 1 into "1"."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ShardwiseError(f"{where}: the key {key!r} is not legal; legal: text")
            _check_keys(f"{where}.{key}", one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, one in enumerate(value):
            _check_keys(f"{where}[{index}]", one)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_version(path: Path, version: Any) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FileError(path, f"damaged: version is {version!r}; legal: a whole number of 1 or more")
    if version > VERSION:
        raise FileError(path, f"written by a newer shardwise (format {version}); this one reads up to {VERSION}")


def _parse(path: Path, value: Any) -> Manifest:
    """Return a manifest from its JSON value, checked field by field and as a whole."""
    fields = Fields(path, "", value)
    fields.take("format", str)
    fields.number("version", 1)
    step, ranks = fields.number("step"), fields.number("ranks", 1)
    meta, files, tensors = (fields.take(key, dict) for key in ("meta", "files", "tensors"))
    fields.end()
    manifest = Manifest(
        step,
        ranks,
        meta,
        {name: _file(path, name, one, ranks) for name, one in files.items()},
        {name: _tensor(path, name, one) for name, one in tensors.items()},
    )
    wrong = manifest.fault()
    if wrong:
        raise FileError(path, f"damaged: {wrong}")
    return manifest


def _file(path: Path, name: str, value: Any, ranks: int) -> FileRecord:
    rank = re.fullmatch(r"rank_(\d{5,9})\.safetensors", name, re.ASCII)
    if rank is None or int(rank[1]) >= ranks or name != rank_file(int(rank[1])):
        raise FileError(
            path, f"damaged: the file name {name!r} is not legal; legal: {rank_file(0)!r} to {rank_file(ranks - 1)!r}"
        )
    fields = Fields(path, f"files.{name}", value)
    record = FileRecord(fields.number("bytes"), fields.digest("sha256"))
    fields.end()
    return record


def _tensor(path: Path, name: str, value: Any) -> TensorRecord:
    where = f"tensors.{name}"
    fields = Fields(path, where, value)
    shape, word, pieces = fields.shape("shape"), fields.take("dtype", str), fields.take("pieces", list)
    fields.end()
    if word not in DTYPES:
        raise fields.wrong("dtype", f"is {word!r}; legal: {', '.join(DTYPES)}")
    stored = tuple(_stored(path, f"{where}.pieces[{index}]", one) for index, one in enumerate(pieces))
    return TensorRecord(shape, DTYPES[word], stored)


def _stored(path: Path, where: str, value: Any) -> Stored:
    fields = Fields(path, where, value)
    file, key = fields.take("file", str), fields.take("key", str)
    start, stop = fields.numbers("start"), fields.numbers("stop")
    fields.end()
    if len(start) != len(stop):
        raise fields.wrong("start", f"has {len(start)} numbers, stop {len(stop)}")
    return Stored(file, key, Box(start, stop))
