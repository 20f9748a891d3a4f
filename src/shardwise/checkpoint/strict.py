"""Files that may be damaged or foreign are read here; every fault is a ConfigError that begins with the file's path."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

LARGEST = 2**60  # the largest size or number of elements: torch can still address it


class FileError(ConfigError):
    """A file is not what it has to be; the message begins with its path."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file, else raise ConfigError: opening a pipe, say, would wait forever."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        words = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise FileError(path, words) from error
    if not stat.S_ISREG(found.st_mode):
        raise FileError(path, "not an ordinary file")
    return found.st_size


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raise ConfigError where it cannot be read."""
    regular_size(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(path, f"cannot be read: {error.strerror}") from error


def parse_json(path: Path, text: bytes) -> Any:
    """Return the value of JSON text; only strict UTF-8 without duplicate keys, NaN or infinities is accepted."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"damaged, or not JSON: {' '.join(str(error).split())}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} comes twice")
    return found


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


class Fields:
    """The fields of a JSON object in a file, taken one by one with their types; ``where`` says which object it is."""

    def __init__(self, path: Path, where: str, value: Any) -> None:
        self.path, self.where = path, where
        if not isinstance(value, dict):
            raise FileError(path, f"damaged: {where or 'the file'} is {_kind(value)} instead of an object")
        self._left = dict(value)

    def take(self, key: str, kind: type) -> Any:
        """Return the value of ``key``, which has to be there and of type ``kind``."""
        if key not in self._left:
            raise self.wrong(key, "is missing")
        value = self._left.pop(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(key, f"is {_kind(value)} instead of {_kind(kind())}")
        return value

    def number(self, key: str, least: int = 0) -> int:
        """Return the whole number of ``key``, which has to be ``least`` or more."""
        value = self.take(key, int)
        if value < least:
            raise self.wrong(key, f"is {value}; legal: {least} or more")
        return int(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return the list of whole numbers of ``key``, none of which may be negative."""
        values = self.take(key, list)
        if any(not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST for value in values):
            raise self.wrong(key, "is not a list of whole numbers of 0 or more")
        return tuple(values)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of ``key``."""
        values = self.numbers(key)
        if math.prod(max(value, 1) for value in values) > LARGEST:
            raise self.wrong(key, "is larger than any tensor")
        return values

    def digest(self, key: str) -> str:
        """Return the SHA-256 of ``key``, in hexadecimal."""
        value = self.take(key, str)
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise self.wrong(key, "is no SHA-256")
        return str(value)

    def end(self) -> None:
        """Raise ConfigError if a field has not been taken."""
        for key in self._left:
            raise self.wrong(key, "is not known to this version")

    def wrong(self, key: str, what: str) -> FileError:
        """Return the error that says what is wrong with ``key``."""
        return FileError(self.path, f"damaged: {f'{self.where}.' if self.where else ''}{key} {what}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    words = {bool: "a boolean", int: "a number", float: "a fraction", str: "text", list: "a list", dict: "an object"}
    return words.get(type(value), type(value).__name__)
