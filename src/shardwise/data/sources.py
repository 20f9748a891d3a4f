"""This module finds the files of a source of text: a file, a folder, a glob or a folder of a Hugging Face dataset."""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.core.errors import ConfigError, did_you_mean

STDLIB = "stdlib"
STDLIB_LIMIT = 32 << 20  # the most bytes that are read of the standard library
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py"})
ROW_SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}
MAGIC = frozenset("*?[")
NOT_TEXT = {
    b"\x1f\x8b": "is compressed with gzip (gunzip it first)",
    b"\xff\xfe": "is in UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)",
    b"\xfe\xff": "is in UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)",
}
DATASET_FILES = ("state.json", "dataset_info.json")  # files that `save_to_disk` writes beside a dataset's rows
SPLITS_FILE = "dataset_dict.json"
LEGAL = (
    '"stdlib", a file, a folder, a glob of .txt, .md, .py, .jsonl or .parquet files, or a folder of a Hugging '
    "Face "
    "dataset"
)
LEGAL_SFT = "a .jsonl file, a glob or a folder of them"


@dataclass(frozen=True)
class SourceFile:
    """A source file has documents in it.

    ``kind`` is ``"text"`` (the file is one document), ``"jsonl"`` or ``"parquet"`` (each row is one), or ``"dataset"``:
    then ``path`` is a folder of a Hugging Face dataset and ``members`` are its files. ``size`` is in bytes, that of all
    members together, and ``mtime_ns`` is the last change of any of them, in nanoseconds.
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    members: tuple[str, ...] = ()


def find_files(sources: str | Sequence[str]) -> list[SourceFile]:
    """Return the files of one source or several, each once, in an order that depends on their paths alone; empty files
    are left out.

    ConfigError, with the path, for a source that does not exist, cannot be read, or holds no text.
    """
    found: dict[str, SourceFile] = {}  # the keys are real paths
    for source in [sources] if isinstance(sources, str) else sources:
        files = _stdlib() if source == STDLIB else list(_find(source))
        if not any(file.size for file in files):
            raise ConfigError(f"data.source: {_nothing(source)}; legal: {LEGAL}")
        for file in files:
            if file.size:
                found.setdefault(os.path.realpath(file.path), file)
    return list(found.values())


def not_json(error: Exception) -> str:
    """Say why a line is not JSON; its number is said elsewhere, for JSON counts lines from the one that it reads."""
    where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return f"not JSON: {where}"


def is_glob(source: str) -> bool:
    """Return whether ``source`` is a pattern, and not the name of something that exists."""
    return not MAGIC.isdisjoint(source) and not os.path.lexists(source)


def exists(source: str) -> bool:
    """Return whether anything exists under this name or pattern."""
    if source == STDLIB:
        return True
    return next(_expand(source), None) is not None if is_glob(source) else os.path.exists(source)


def _nothing(source: str) -> str:
    if os.path.isdir(source):
        return f"the folder {source} holds no text"
    return f"the file {source} is empty" if os.path.isfile(source) else f"{source} holds no text"


def _find(source: str) -> Iterator[SourceFile]:
    if is_glob(source):
        yield from _matching(source)
    elif os.path.isdir(source):
        yield from _folder(source, set())
    elif os.path.exists(source):
        file = _file(source)
        _check_text(file)
        yield file
    else:
        raise ConfigError(f"data.source: {source} is neither a file nor a folder; legal: {LEGAL}")


def _matching(pattern: str) -> Iterator[SourceFile]:
    """Yield the files that a pattern matches and those of the folders that it matches.

    Matches inside the folder of a dataset are skipped (they would be read as text, all splits included): a dataset
    counts if the pattern matches its folder or one above. ConfigError if nothing else is left.
    """
    matches = sorted(set(_expand(pattern)))
    if not matches:
        raise ConfigError(f"data.source: nothing matches {pattern}; legal: {LEGAL}")
    known: dict[str, str | None] = {}
    around = {match: _dataset_around(os.path.dirname(os.path.abspath(match)), known) for match in matches}
    if all(around.values()):
        dataset = around[matches[0]]
        wrong = f"{pattern} matches only what lies inside of the dataset {dataset}"
        legal = f"{dataset} (of several splits train is read), or the folder of one of its splits"
        raise ConfigError.on("data.source", wrong, legal)
    seen: set[str] = set()
    for match in matches:
        if around[match]:
            continue
        if os.path.isdir(match):
            yield from _folder(match, seen)
        elif os.path.isfile(match) and _is_text(match):  # checked first, because opening a pipe waits for a writer
            yield _file(match)


def _expand(pattern: str) -> Iterator[str]:
    """Yield what matches a pattern, as glob does, but enter no folder twice for "**": links may form a cycle."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    place = parts.index("**")
    above, rest = os.sep.join(parts[:place]), os.sep.join(parts[place + 1 :])
    seen: set[str] = set()
    for base in glob.iglob(above) if above else [os.sep if place else os.curdir]:
        for folder in _folders(base, seen):
            if rest:
                yield from _expand(os.path.join(glob.escape(folder), rest))
            else:
                yield folder
                yield from glob.iglob(os.path.join(glob.escape(folder), "*"))


def _folders(folder: str, seen: set[str]) -> Iterator[str]:
    """Yield a folder and those below it, without hidden ones and those in ``seen``, to which real paths are added."""
    real = os.path.realpath(folder)
    if real in seen or not os.path.isdir(folder):
        return
    seen.add(real)
    yield folder
    with suppress(PermissionError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if _kind(entry, folder) == "folder":
                yield from _folders(entry.path, seen)


def _dataset_around(folder: str, known: dict[str, str | None]) -> str | None:
    """Return the outermost dataset among a folder and those above it; ``known`` keeps the results."""
    if folder not in known:
        parent = os.path.dirname(folder)
        outer = None if parent == folder else _dataset_around(parent, known)
        one = all(os.path.isfile(os.path.join(folder, name)) for name in DATASET_FILES)
        known[folder] = outer or (folder if one or os.path.isfile(os.path.join(folder, SPLITS_FILE)) else None)
    return known[folder]


def _folder(folder: str, seen: set[str]) -> Iterator[SourceFile]:
    """Yield the files below a folder, without hidden ones and those with a zero byte near their start; a dataset counts
    as one file, and of one with splits only "train" is read.

    ``seen`` has the real paths of folders that have been read; they are not read again, because links may form a cycle.
    """
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from error
    names = {entry.name for entry in entries}
    if names.issuperset(DATASET_FILES):
        yield _dataset(folder)
        return
    if SPLITS_FILE in names:
        yield _dataset(_train_split(folder))
        return
    for entry in entries:
        kind = _kind(entry, folder)
        if kind == "folder":
            yield from _folder(entry.path, seen)
        elif kind == "file" and _is_text(entry.path):
            yield _file(entry.path)


def _kind(entry: os.DirEntry[str], folder: str) -> Literal["folder", "file"] | None:
    """Return what an entry of a folder is; None if it is hidden, of another kind, or a link to a folder above."""
    if entry.name.startswith("."):
        return None
    try:
        if entry.is_dir():
            return None if entry.is_symlink() and _contains(entry.path, folder) else "folder"
        return "file" if entry.is_file() else None
    except OSError:  # raised by a link to itself, for example
        return None


def _contains(outer: str, inner: str) -> bool:
    outer = os.path.realpath(outer)
    return os.path.commonpath((outer, os.path.realpath(inner))) == outer


def _is_text(path: str) -> bool:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in TEXT_SUFFIXES or suffix in ROW_SUFFIXES:
        return True
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(4096)
    except OSError as error:
        raise _unreadable(path, error) from error


def _check_text(file: SourceFile) -> None:
    """Raise ConfigError for a file that the user named and that is not text."""
    if file.kind == "parquet":
        return
    try:
        with open(file.path, "rb") as opened:
            start = opened.read(4096)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    what = next((words for magic, words in NOT_TEXT.items() if start.startswith(magic)), None)
    if what is None and b"\0" in start:
        what = "has a zero byte near its start"
    if what is not None:
        raise ConfigError(f"data.source: {file.path} is no text in UTF-8: it {what}; legal: {LEGAL}, of text in UTF-8")


def _file(path: str) -> SourceFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"data.source: {path} is no regular file; legal: {LEGAL}")
    kind = ROW_SUFFIXES.get(os.path.splitext(path)[1].lower(), "text")
    return SourceFile(os.path.abspath(path), kind, found.st_size, found.st_mtime_ns)


def _dataset(folder: str) -> SourceFile:
    try:
        members = sorted(entry.path for entry in os.scandir(folder) if entry.is_file())
        states = [os.stat(member) for member in members]
    except OSError as error:
        raise _unreadable(folder, error) from error
    size, changed = sum(state.st_size for state in states), max((state.st_mtime_ns for state in states), default=0)
    if not _has_rows(folder):
        size = 0
    return SourceFile(os.path.abspath(folder), "dataset", size, changed, tuple(map(os.path.abspath, members)))


def _has_rows(folder: str) -> bool:
    """Return whether a dataset has files of rows; without any the library cannot open it."""
    try:
        return bool(json.loads(Path(folder, DATASET_FILES[0]).read_text(encoding="utf-8"))["_data_files"] != [])
    except (OSError, ValueError, KeyError, TypeError):  # If it is damaged, reading it raises the error.
        return True


def _train_split(folder: str) -> str:
    path = os.path.join(folder, SPLITS_FILE)
    try:
        splits = [str(split) for split in json.loads(Path(path).read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data.source: cannot read the splits of the dataset {folder}: {path}: {error}") from error
    if "train" not in splits:
        wrong = f'the dataset {folder} has no split "train"'
        legal = f"the folder of one of its splits ({', '.join(os.path.join(folder, split) for split in splits)})."
        raise ConfigError.on("data.source", wrong, legal, did_you_mean("train", splits))
    return os.path.join(folder, "train")


def _stdlib() -> list[SourceFile]:
    """Return the standard library's own modules, without installed packages and tests, up to :data:`STDLIB_LIMIT`."""
    folder = sysconfig.get_path("stdlib")
    files: list[SourceFile] = []
    total = 0
    for path in sorted(_modules(folder)):
        file = _file(path)
        total += file.size
        if total > STDLIB_LIMIT:
            break
        files.append(file)
    if not files:
        raise ConfigError(f'data.source = "stdlib": this Python keeps no source files in {folder}; name a text file')
    return files


def _modules(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.name in SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _modules(entry.path)
        elif entry.name.endswith(".py"):
            yield entry.path


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"data.source: cannot read {path}: {error.strerror}")
