"""Which files a source of text consists of: files, folders, globs, folders of Hugging Face datasets."""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import ConfigError, did_you_mean

STDLIB = "stdlib"
STDLIB_LIMIT = 32 << 20  # bytes of the standard library that are read at most
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py"})
ROW_SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}
MAGIC = frozenset("*?[")
DATASET_FILES = ("state.json", "dataset_info.json")  # what `save_to_disk` writes beside a dataset's rows
SPLITS_FILE = "dataset_dict.json"
LEGAL = '"stdlib", a file, a folder, a glob of .txt, .md, .py, .jsonl or .parquet files, or a folder of a Hugging Face dataset'


@dataclass(frozen=True)
class SourceFile:
    """A file with documents in it.

    ``kind`` is ``"text"`` (the file is one document), ``"jsonl"``, ``"parquet"`` (its rows are), or ``"dataset"``: ``path`` is a
    folder of a Hugging Face dataset and ``members`` are its files. ``size`` is in bytes, ``mtime_ns`` the last change, of all
    members together.
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    members: tuple[str, ...] = ()


def find_files(sources: str | Sequence[str]) -> list[SourceFile]:
    """The files of a source or of several, in an order that depends on their paths alone; empty files are left out.

    ConfigError, with the path, for what is not there, cannot be read, or holds no text.
    """
    found: list[SourceFile] = []
    for source in [sources] if isinstance(sources, str) else sources:
        files = _stdlib() if source == STDLIB else list(_find(source))
        if not any(file.size for file in files):
            raise ConfigError(f"data.source: {_nothing(source)}; legal: {LEGAL}")
        found += [file for file in files if file.size]
    return found


def is_glob(source: str) -> bool:
    """Is it a pattern, not the name of something that exists?"""
    return not MAGIC.isdisjoint(source) and not os.path.lexists(source)


def exists(source: str) -> bool:
    """Is there anything under this name or pattern?"""
    if source == STDLIB:
        return True
    return next(glob.iglob(source, recursive=True), None) is not None if is_glob(source) else os.path.exists(source)


def _nothing(source: str) -> str:
    if os.path.isdir(source):
        return f"the folder {source} holds no text"
    return f"the file {source} is empty" if os.path.isfile(source) else f"{source} holds no text"


def _find(source: str) -> Iterator[SourceFile]:
    if is_glob(source):
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise ConfigError(f"data.source: nothing matches {source}; legal: {LEGAL}")
        found: dict[str, SourceFile] = {}  # "**" matches a folder and what is in it
        for match in matches:
            files = _folder(match, match) if os.path.isdir(match) else [_file(match)] if _is_text(match) else []
            found.update((file.path, file) for file in files)
        yield from found.values()
    elif os.path.isdir(source):
        yield from _folder(source, source)
    elif os.path.exists(source):
        yield _file(source)
    else:
        raise ConfigError(f"data.source: {source} is neither a file nor a folder; legal: {LEGAL}")


def _folder(folder: str, source: str) -> Iterator[SourceFile]:
    """The files below a folder, without hidden ones and those with a zero byte near their start."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(folder, error) from error
    names = {entry.name for entry in entries}
    if names.issuperset(DATASET_FILES):
        yield _dataset(folder)
        return
    if SPLITS_FILE in names and folder == source:
        yield _dataset(_train_split(folder))
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not (entry.is_symlink() and _contains(entry.path, folder)):  # a loop
                yield from _folder(entry.path, source)
        elif entry.is_file() and _is_text(entry.path):
            yield _file(entry.path)


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
    size, changed = sum(state.st_size for state in states), max(state.st_mtime_ns for state in states)
    return SourceFile(os.path.abspath(folder), "dataset", size, changed, tuple(map(os.path.abspath, members)))


def _train_split(folder: str) -> str:
    path = os.path.join(folder, SPLITS_FILE)
    try:
        splits = [str(split) for split in json.loads(Path(path).read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"data.source: cannot read the splits of the dataset {folder}: {path}: {error}") from error
    if "train" not in splits:
        raise ConfigError(
            f'data.source: the dataset {folder} has no split "train"; legal: the folder of one of its splits '
            f"({', '.join(os.path.join(folder, split) for split in splits)}).{did_you_mean('train', splits)}"
        )
    return os.path.join(folder, "train")


def _stdlib() -> list[SourceFile]:
    """The standard library's own modules, no installed packages, no tests; the first so many MiB of them."""
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
