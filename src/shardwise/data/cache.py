"""This module keeps tokens on disk: they are made once for some content and tokenizer and then mapped into memory.

A cache is the folder ``<cache_dir>/<key>`` with ``train.bin``, ``validation.bin`` (tokens, nothing else) and
``index.json``. The key is a hash of all that the tokens depend on: the files' contents, not their names or times. The
cache is made in another folder, flushed to disk and renamed, so it is complete or absent; a lock, which the system
releases when its process ends, lets only one process make it at a time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.core.errors import ConfigError

from .documents import byte_counter, pieces
from .fingerprint import fingerprints
from .sources import SourceFile
from .tokenise import OnProgress, SplitSide, default_workers, tokenise_all
from .tokenizer import Tokenizer, Tokens, token_dtype
from .worker import SIDES, Job

FORMAT = 2  # the version of the folder's format and of the way from text to tokens


@dataclass(frozen=True)
class Wanted:
    """This says what a cache is made of: the text of ``files``, in the column ``field``, tokenised with the tokenizer
    called ``name`` (`data.tokenizer`), with a fraction ``validation`` of the documents set apart."""

    files: Sequence[SourceFile]
    name: str
    tokenizer: Tokenizer
    field: str
    validation: float

    def key(self, digests: Sequence[str]) -> str:
        """Return the hash of all that the tokens depend on; ``digests`` are the hashes of the files."""
        parts: list[Any] = [FORMAT, self.tokenizer.digest, self.tokenizer.end, self.validation]
        rows = any(file.kind != "text" for file in self.files)
        parts += [
            self.field if rows else None,
            [(f.kind, digest) for f, digest in zip(self.files, digests, strict=True)],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TokenCache:
    """An open cache has a folder, a summary of its two files, and notices for the user about it.

    ``swapped`` says that the names of the two sides are exchanged, compared with those on disk.
    """

    folder: Path
    dtype: np.dtype[Any]
    train: SplitSide
    validation: SplitSide
    notices: tuple[str, ...] = ()
    swapped: bool = False

    @property
    def documents(self) -> int:
        """Return the number of documents on both sides."""
        return self.train.documents + self.validation.documents

    def swap(self) -> TokenCache:
        """Return the same tokens with train and validation exchanged."""
        return replace(self, train=self.validation, validation=self.train, swapped=not self.swapped)

    def tokens(self, side: str) -> tuple[Tokens, mmap.mmap | None]:
        """Return the tokens (tokens,) of ``"train"`` or ``"validation"`` and the mapping of their file (None if there
        are no tokens)."""
        path = self.folder / f"{SIDES[SIDES.index(side) ^ self.swapped]}.bin"
        if not getattr(self, side).tokens:
            return np.empty(0, self.dtype), None
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=self.dtype), mapped


def default_cache_dir() -> str:
    """Return ``~/.cache/shardwise/tokens``, or the folder in XDG_CACHE_HOME if that is set."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.abspath(base), "shardwise", "tokens")


def open_cache(
    wanted: Wanted, cache_dir: str, progress: OnProgress | None = None, workers: int | None = None
) -> TokenCache:
    """Return the cache of ``wanted``; it is made if there is none, or if it is damaged (then with a notice).

    A cache is damaged if its index is not what was written (it has a checksum) or its files do not have the sizes in
    the index; the tokens themselves are not read again. ``progress`` is called with the bytes of text done, where
    hashing counts for one half and tokenising for the other; it is not called if nothing has changed. ``workers`` is
    the number of processes that tokenise (default: one per core, or one if there is little to do). ConfigError for text
    that cannot be read, and for a ``cache_dir`` that cannot be written.
    """
    root = Path(cache_dir)
    size = sum(file.size for file in wanted.files)
    report = _Report(2 * size, progress)
    names = hashlib.sha256("\0".join(file.path for file in wanted.files).encode(errors="surrogateescape")).hexdigest()[
        :32
    ]
    digests = fingerprints(wanted.files, root / "files" / f"{names}.json", report.more)
    key = wanted.key(digests)
    found = _open(root / key, key)
    if found is None:
        try:
            with locked(root, key):
                found = _open(root / key, key)  # another process may have made it meanwhile
                if found is None:
                    damaged = (root / key).exists()
                    notice = (f"the tokens in {root / key} were damaged; they have been made again",) if damaged else ()
                    report.restart(size)
                    _make(wanted, digests, root, key, report, workers or default_workers(size, wanted.name))
                    found = _open(root / key, key, notice)
        except OSError as error:
            full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
            wrong = f"cannot keep tokens there: {error.strerror}{full}: {error.filename}"
            raise ConfigError.on(f"data.cache_dir = {cache_dir}", wrong, "a folder that can be written") from error
    report.finish()
    assert found is not None, "a cache that has just been made can be opened"
    return found


class _Report:
    """This adds up bytes for a callback that takes (done, total) of text: hashing a byte and tokenising it count for
    one half each."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress
        self.lock = threading.Lock()  # files are hashed by several threads

    def more(self, count: int) -> None:
        with self.lock:
            self.done = min(self.total, self.done + count)
            if self.progress is not None:
                self.progress(self.done // 2, self.total // 2)

    def restart(self, half: int) -> None:
        self.done = half

    def finish(self) -> None:
        if self.done:
            self.more(self.total)


def _open(folder: Path, key: str, notices: tuple[str, ...] = ()) -> TokenCache | None:
    """Return the cache in a folder, or None if there is none or its index or sizes are wrong."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        checksum = index.pop("checksum")
        if index["format"] != FORMAT or index["key"] != key or checksum != _checksum(index):
            return None
        dtype = np.dtype(index["dtype"])
        sides = [SplitSide(**index[name]) for name in SIDES]
        for name, one in zip(SIDES, sides, strict=True):
            if (folder / f"{name}.bin").stat().st_size != one.tokens * dtype.itemsize:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return TokenCache(folder, dtype, sides[0], sides[1], notices)


def _make(wanted: Wanted, digests: Sequence[str], root: Path, key: str, report: _Report, workers: int) -> None:
    """Write a cache under another name and rename it."""
    aside, folder = root / f"{key}.part", root / key
    shutil.rmtree(aside, ignore_errors=True)  # a process that died may have left it
    aside.mkdir()
    template = Job((), wanted.field, wanted.name, wanted.tokenizer.end_token, wanted.validation, "")
    size_of = byte_counter(wanted.files)
    try:
        sides = tokenise_all(
            pieces(wanted.files, digests), template, aside, workers, lambda spans: report.more(size_of(spans))
        )
        _check_unchanged(wanted.files)
        _write_index(wanted, digests, key, sides, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        sync_names(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_index(wanted: Wanted, digests: Sequence[str], key: str, sides: Sequence[SplitSide], folder: Path) -> None:
    index: dict[str, Any] = {
        "format": FORMAT,
        "key": key,
        "tokenizer": wanted.tokenizer.digest,
        "end": wanted.tokenizer.end,
        "dtype": token_dtype(wanted.tokenizer.vocabulary).name,
        "fraction": wanted.validation,
        "field": wanted.field,
        **{name: asdict(one) for name, one in zip(SIDES, sides, strict=True)},
        "files": [[f.path, f.size, f.mtime_ns, digest] for f, digest in zip(wanted.files, digests, strict=True)],
    }
    with (folder / "index.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps({**index, "checksum": _checksum(index)}))
        file.flush()
        os.fsync(file.fileno())
    sync_names(folder)


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _check_unchanged(files: Sequence[SourceFile]) -> None:
    """Raise ConfigError if a file has changed since it was hashed: its tokens would be kept under the wrong key."""
    for file in files:
        try:
            states = [os.stat(path) for path in file.members or (file.path,)]
        except OSError:
            states = []
        if not states or (sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)) != (
            file.size,
            file.mtime_ns,
        ):
            raise ConfigError(f"data.source: {file.path} changed while it was read; legal: files that nobody writes to")


@contextmanager
def locked(root: Path, key: str) -> Iterator[None]:
    """Hold the lock of one cache; the system releases it when the process ends."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync_names(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
