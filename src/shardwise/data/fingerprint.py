"""This module computes the SHA-256 of files, again only for those that look changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

from .sources import SourceFile

OnBytes = Callable[[int], None]
"""This callback is called with the number of bytes that have been read since the last call."""

SETTLED = 2.0  # in seconds: a file that changed more recently may change again and keep its time of change
BLOCK = 1 << 20


def fingerprints(files: Sequence[SourceFile], memory: Path, on_bytes: OnBytes | None = None) -> list[str]:
    """Return the SHA-256 of each file, as hex.

    The JSON file ``memory`` keeps them with the files' sizes and times of change; a file whose size and time are still
    the same is not read. ConfigError for a file that cannot be read.
    """
    known = _remembered(memory)
    stale = [file for file in files if known.get(file.path, [None])[:2] != [file.size, file.mtime_ns]]
    if not stale:
        return [str(known[file.path][2]) for file in files]
    started = time.time()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:  # hashing and reading let other threads run
        found = dict(
            zip((file.path for file in stale), pool.map(lambda file: _hash(file, on_bytes), stale), strict=True)
        )
    result = [found.get(file.path) or known[file.path][2] for file in files]
    settled = {
        file.path: [file.size, file.mtime_ns, digest]
        for file, digest in zip(files, result, strict=True)
        if file.path not in found or file.mtime_ns < (started - SETTLED) * 1e9
    }
    _remember(memory, settled)
    return result


def _hash(file: SourceFile, on_bytes: OnBytes | None) -> str:
    """Return the hash of a file's content, or of the names and contents of a folder's files."""
    if not file.members:
        return _hash_file(file.path, on_bytes).hexdigest()
    whole = hashlib.sha256()
    for member in file.members:
        whole.update(
            os.path.basename(member).encode(errors="surrogateescape") + b"\0" + _hash_file(member, on_bytes).digest()
        )
    return whole.hexdigest()


def _hash_file(path: str, on_bytes: OnBytes | None) -> hashlib._Hash:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if on_bytes is not None:
                    on_bytes(len(block))
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {path}: {error.strerror}") from error
    return digest


def _remembered(memory: Path) -> dict[str, Any]:
    try:
        found = json.loads(memory.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError):  # A missing or damaged file only costs time.
        return {}
    good = isinstance(found, dict) and all(isinstance(value, list) and len(value) == 3 for value in found.values())
    return found if good else {}


def _remember(memory: Path, known: dict[str, Any]) -> None:
    part = memory.with_suffix(f".{os.getpid()}.part")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known), encoding="utf-8", errors="surrogateescape")
        part.replace(memory)
    except OSError:  # In a cache that may only be read, files are hashed again next time.
        with suppress(OSError):
            part.unlink()
