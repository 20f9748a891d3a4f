"""Text as a dataset: bytes are tokens, a sample is a window of them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError

BYTES = 256  # tokens of a byte-level text
STDLIB_LIMIT = 32 << 20  # bytes of the standard library that are read at most
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class TextWindows:
    """Windows of ``length`` tokens, one after the other, over a text of N bytes: (N - 1) // length samples.

    A sample is ``{"input_ids": (length,), "labels": (length,)}``, int64. The label of a token is the next
    one; with ``shifted=False`` the token itself, as transformers' models want it (they shift labels
    themselves). ``name`` is what errors call the text.
    """

    def __init__(self, text: NDArray[np.uint8], length: int, *, name: str = "text", shifted: bool = True) -> None:
        if len(text) <= length:
            raise ConfigError(
                f"data.source: {name} has {len(text)} bytes, too few for one sample of "
                f"data.sequence_length = {length} (it takes {length + 1})"
            )
        self.text, self.length, self.shifted = text, length, shifted

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.length
        window = torch.from_numpy(self.text[start : start + self.length + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:] if self.shifted else window[:-1].clone()}


def open_corpus(source: str, length: int, *, shifted: bool = True) -> TextWindows:
    """The dataset of a source: ``"stdlib"``, a text file, or a folder of text files.

    ConfigError, with the path, if there is nothing to read or it cannot be read.
    """
    if source == "stdlib":
        return TextWindows(_join(_stdlib_files(), STDLIB_LIMIT), length, name=source, shifted=shifted)
    path = Path(source)
    if path.is_dir():
        text = _join(_text_files(path))
        if not text.size:
            raise ConfigError(f"data.source: the folder {path} holds no text")
    elif path.is_file():
        text = _map(path)
    else:
        raise ConfigError(f'data.source: {path} is neither a file nor a folder; legal: "stdlib", a text file or a folder')
    return TextWindows(text, length, name=str(path), shifted=shifted)


def decode(ids: Iterable[int]) -> str:
    """The text of byte tokens, whatever is not UTF-8 (or no byte at all) replaced by U+FFFD."""
    return bytes(i if 0 <= i < BYTES else 0xFF for i in map(int, ids)).decode("utf-8", errors="replace")


def _stdlib_files() -> Iterator[Path]:
    """The standard library's own modules, sorted: no installed packages, no tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in folder.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(folder).parts))
    if not files:
        raise ConfigError(f'data.source = "stdlib": this Python keeps no source files in {folder}; name a text file')
    yield from files


def _text_files(folder: Path) -> Iterator[Path]:
    """The files below a folder, sorted, without hidden ones and those with a zero byte near their start."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.is_file() and b"\0" not in _read(path, 4096):
            yield path


def _join(paths: Iterable[Path], limit: int | None = None) -> NDArray[np.uint8]:
    """The files one after the other, an empty line between them; reading stops at ``limit`` bytes."""
    text = bytearray()
    for path in paths:
        text += b"\n\n" if text else b""
        text += _read(path)
        if limit is not None and len(text) >= limit:
            del text[limit:]
            break
    return np.frombuffer(bytes(text), dtype=np.uint8)


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {path}: {error.strerror}") from error


def _map(path: Path) -> NDArray[np.uint8]:
    """One file, left on disk: ranks of one host share its pages."""
    if not _read(path, 1):
        raise ConfigError(f"data.source: the file {path} is empty")
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.source: cannot read {path}: {error}") from error
