"""Tokens on disk: made once for some content and tokenizer, then mapped into memory by whoever wants them.

A cache is the folder ``<cache_dir>/<key>`` with ``train.bin``, ``validation.bin`` (tokens, nothing else) and
``index.json``. The key is a hash of all that the tokens depend on: the files' contents, not their names or times. It is
made in a folder beside, flushed to disk and renamed, so it is there whole or not at all; a lock that dies with its
process lets one process make it at a time.
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

from .documents import measure, pieces
from .fingerprint import fingerprints
from .sources import SourceFile
from .tokenise import OnProgress, SplitSide, default_workers, tokenise_all
from .tokenizer import Tokenizer, Tokens, token_dtype
from .worker import SIDES, Job

FORMAT = 2  # of the folder, and of the way from text to tokens


@dataclass(frozen=True)
class Wanted:
    """What a cache is made of: ``files`` read with ``name`` (`data.tokenizer`, opened as ``tokenizer``) and ``field``,
    the fraction ``validation`` of the documents set apart."""

    files: Sequence[SourceFile]
    name: str
    tokenizer: Tokenizer
    field: str
    validation: float

    def key(self, digests: Sequence[str]) -> str:
        """The hash of all that the tokens depend on; ``digests`` are those of the files."""
        parts: list[Any] = [FORMAT, self.tokenizer.digest, self.tokenizer.end, self.validation]
        rows = any(file.kind != "text" for file in self.files)
        parts += [
            self.field if rows else None,
            [(f.kind, digest) for f, digest in zip(self.files, digests, strict=True)],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TokenCache:
    """An open cache: its folder, what its two files hold, and what was to be said about it.

    ``swapped`` says that the sides are named the other way round here than on disk.
    """

    folder: Path
    dtype: np.dtype[Any]
    train: SplitSide
    validation: SplitSide
    notices: tuple[str, ...] = ()
    swapped: bool = False

    @property
    def documents(self) -> int:
        """Documents of both sides."""
        return self.train.documents + self.validation.documents

    def swap(self) -> TokenCache:
        """The same tokens with train for validation and validation for train."""
        return replace(self, train=self.validation, validation=self.train, swapped=not self.swapped)

    def tokens(self, side: str) -> tuple[Tokens, mmap.mmap | None]:
        """The tokens of ``"train"`` or ``"validation"``, mapped from disk, and the mapping (none for no tokens)."""
        path = self.folder / f"{SIDES[SIDES.index(side) ^ self.swapped]}.bin"
        if not getattr(self, side).tokens:
            return np.empty(0, self.dtype), None
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=self.dtype), mapped


def default_cache_dir() -> str:
    """``~/.cache/shardwise/tokens``, or where XDG_CACHE_HOME says."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.abspath(base), "shardwise", "tokens")


def open_cache(
    wanted: Wanted, cache_dir: str, progress: OnProgress | None = None, workers: int | None = None
) -> TokenCache:
    """The cache of what is wanted; it is made if there is none, or if it is damaged (then with a notice).

    Damaged is one whose index is not what was written (it has a checksum) or whose files have other sizes than it says;
    the tokens themselves are not read again. ``progress`` hears of the bytes of text done, half of each when it is
    hashed and half when it is tokenised, and of nothing if nothing has changed. ``workers`` are the
    processes that tokenise (default: as many as cores, one if there is little to do). ConfigError for text that cannot
    be read, and for a ``cache_dir`` that cannot be written.
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
            with _locked(root, key):
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
    """Adds bytes up for a callback that wants (done, total) of text: hashing a byte is half of it, tokenising the
    other.
    """

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
    """The cache in a folder, or None if there is none or its index or sizes are wrong."""
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
    """Write a cache aside and rename it."""
    aside, folder = root / f"{key}.part", root / key
    shutil.rmtree(aside, ignore_errors=True)  # of a process that died
    aside.mkdir()
    template = Job((), wanted.field, wanted.name, wanted.tokenizer.end_token, wanted.validation, "")
    size_of = measure(wanted.files)
    try:
        sides = tokenise_all(
            pieces(wanted.files, digests), template, aside, workers, lambda spans: report.more(size_of(spans))
        )
        _check_unchanged(wanted.files)
        _write_index(wanted, digests, key, sides, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _sync(root)
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
    _sync(folder)


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _check_unchanged(files: Sequence[SourceFile]) -> None:
    """ConfigError if a file has changed since it was hashed: its tokens would be kept under the wrong key."""
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
def _locked(root: Path, key: str) -> Iterator[None]:
    """The lock of one cache; the system takes it from a process that dies."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
