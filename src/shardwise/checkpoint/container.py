"""A safetensors file has eight bytes of length, a JSON header, and the values in little-endian order without gaps.

Source: the format's own description, https://github.com/huggingface/safetensors#format.  :class:`HashedFile` writes in
one pass, so that the values are hashed on their way from staging memory to the disk and copied nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardwiseError

from .atoms import DTYPES, dtype_name
from .strict import LARGEST, FileError, parse_json, regular_size

ALIGN = 64
LONGEST_HEADER = 99_000_000  # safetensors reads headers up to 100 MB
CHUNK = 8 << 20  # the bytes of one write and of one update of a hash


@dataclass(frozen=True)
class Entry:
    """A tensor in a file; ``start`` and ``stop`` are its bytes, counted from the first byte of all values."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


def lay_out(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> list[Entry]:
    """Place tensors (key, shape, dtype) one after the other; wide dtypes come first, so that each is aligned."""
    found, end = [], 0
    for key, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        found.append(Entry(key, tuple(shape), dtype, start, end))
    return found


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the JSON header, padded so that the values begin at a multiple of 64 bytes."""
    if sys.byteorder != "little":
        raise ShardwiseError("checkpoints can only be written by a little-endian machine")
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        described[entry.key] = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    if len(text) > LONGEST_HEADER:
        raise ShardwiseError(
            f"{len(entries):,} tensors are too many for one safetensors file: its header has {len(text):,} bytes"
        )
    text += b" " * (-(len(text) + 8) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file, by key, and its metadata.

    Raises:
        ConfigError: the file is not a complete, well-formed safetensors file; the message names it.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise FileError(path, f"not a safetensors file, or cut short: it has {size} bytes")
            text = file.read(length)
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}") from error
    described = parse_json(path, text)
    if not isinstance(described, dict):
        raise FileError(path, "not a safetensors file: its header is no JSON object")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise FileError(path, "not a safetensors file: its metadata are not text")
    entries = {key: _entry(path, key, value) for key, value in described.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise FileError(path, f"the values of {entry.key!r} begin at byte {entry.start} instead of {end}")
        end = entry.stop
    if size != 8 + length + end:
        raise FileError(path, f"has {size} bytes; its header asks for {8 + length + end}")
    return entries, metadata


@contextmanager
def opened(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """Give a function that reads a tensor of a file by its key; raise ConfigError where the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file.get_tensor
    except (SafetensorError, OSError) as error:
        raise FileError(path, f"cannot be read: {error}") from error


def _entry(path: Path, key: str, value: Any) -> Entry:
    """Check and return the entry of one tensor in the header."""
    wrong = FileError(path, f"not a safetensors file: the header's entry {key!r} is not legal")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise wrong
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise wrong
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in [*shape, *offsets]):
        raise wrong
    if math.prod(max(number, 1) for number in shape) > LARGEST:
        raise wrong
    if not isinstance(name, str) or name not in DTYPES:
        raise FileError(path, f"{key!r} has the unknown dtype {name!r}; legal: {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise FileError(path, f"{key!r} has {offsets[1] - offsets[0]} bytes for the shape {shape} of {name}")
    return Entry(key, tuple(shape), dtype, offsets[0], offsets[1])


class HashedFile:
    """A new file that is hashed while it is written; ``sync`` waits until it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OSError where the disk takes no more.  Neither hashing nor writing holds the GIL."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self._hash.update(chunk)
            while chunk:
                chunk = chunk[os.write(self._fd, chunk) :]
        self.nbytes += len(view)

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def sha256(self) -> str:
        """The SHA-256 of what has been written, in hexadecimal."""
        return self._hash.hexdigest()


def write_file(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors (key, shape, dtype) whose values ``read`` returns by key; one at a time is in memory."""
    entries = lay_out(tensors)
    with HashedFile(path) as file:
        file.write(header(entries, metadata))
        for entry in entries:
            file.write(bytes_of(read(entry.key)))
        file.sync()


def write_as_they_come(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    values: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write ``tensors`` (key, shape, dtype) from ``values``, which come one at a time in any order; others are skipped.

    All values are consumed even after something has failed, because producing them may be a collective; the first
    failure is raised at the end: an OSError of a write, or :class:`ShardwiseError` for a dtype that no file holds and
    for a value that is missing or has another shape or dtype.
    """
    entries = {one.key: one for one in lay_out(tensors)}
    failure: OSError | ShardwiseError | None = None
    missing = set(entries)
    with ExitStack() as stack:
        try:
            start = header(list(entries.values()), metadata)
            file = stack.enter_context(path.open("wb"))
            file.write(start)
        except (OSError, ShardwiseError) as error:
            failure = error
        for key, value in values:
            if key not in entries or failure is not None:
                continue
            missing.discard(key)
            if (tuple(value.shape), value.dtype) != (entries[key].shape, entries[key].dtype):
                failure = ShardwiseError(f"{key} is {tuple(value.shape)} {value.dtype}: it was to be {entries[key]}")
                continue
            try:
                file.seek(len(start) + entries[key].start)
                file.write(bytes_of(value))
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        if missing:
            raise ShardwiseError(f"{path}: no values for {', '.join(sorted(missing))}")
        file.flush()
        os.fsync(file.fileno())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor of any shape, in row-major order, on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array has the buffer protocol


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; raise ConfigError where it cannot be read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
