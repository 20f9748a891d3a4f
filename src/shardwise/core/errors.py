"""This module defines errors for people: they say what is wrong, where, which value was found and what is legal."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from typing import Any

_PACKAGES = f"{os.sep}site-packages{os.sep}"
_LIBRARIES = (
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)


class ShardwiseError(Exception):
    """This is the base class of every error that shardwise raises on purpose; programs read its kind from ``cause``."""

    cause = "shardwise"


class ConfigError(ShardwiseError):
    """The user's input is wrong; the message names the key, the value and what is legal.

    An error made by :meth:`on` keeps the parts of its message as attributes; in any other error they are empty.
    """

    cause = "config"
    field = part = wrong = legal = hint = ""

    @staticmethod
    def on(field: str, wrong: str, legal: str, hint: str = "", *, part: str = "") -> ConfigError:
        """Return the error ``field: wrong; legal: legal`` followed by ``hint``; with a ``part`` it begins with ``field,
        part: wrong``."""
        error = ConfigError(f"{field}{part and ', '}{part}: {wrong}; legal: {legal}{hint}")
        vars(error).update(field=field, part=part, wrong=wrong, legal=legal, hint=hint)
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickle without calling ``__init__``, because the message does not hold the arguments of a subclass."""
        return ConfigError.__new__, (type(self), str(self)), vars(self)


def did_you_mean(word: object, legal: Iterable[object]) -> str:
    """Return ``' Did you mean "x"?'`` for the legal word closest to ``word``, or ``""`` if none is close."""
    known = {str(candidate).lower(): str(candidate) for candidate in legal}
    close = difflib.get_close_matches(str(word).lower(), known, n=1, cutoff=0.6)
    return f' Did you mean "{known[close[0]]}"?' if close else ""


def divisors(number: int) -> str:
    """Return the divisors of a number, as messages list them."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_value(field: str, value: object, holds: bool, legal: str) -> None:
    """Raise :class:`ConfigError` about ``value`` unless its condition ``holds``."""
    if not holds:
        raise ConfigError.on(field, f"{value!r} is not legal", f"{legal}.")


def check_choice(field: str, value: object, legal: Iterable[str]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of the ``legal`` words."""
    choices = tuple(legal)
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices)
        raise ConfigError.on(field, f"{value!r} is not legal", f"{listed}.", did_you_mean(value, choices))


def check_count(field: str, value: object, least: int = 1) -> None:
    """Raise :class:`ConfigError` unless ``value`` is an integer (not a bool) of at least ``least``."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    check_value(field, value, is_count, f"an integer of at least {least}")


def check_text(field: str, value: object) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a non-empty string."""
    check_value(field, value, isinstance(value, str) and bool(value), "a non-empty string")


def check_keys(where: str, keys: Iterable[str], legal: Iterable[str]) -> None:
    """Raise :class:`ConfigError` naming the first of ``keys`` that is not ``legal``."""
    known = tuple(legal)
    for key in keys:
        if key not in known:
            raise ConfigError.on(where, f'unknown key "{key}"', f"{', '.join(known)}.", did_you_mean(key, known))


def of_user(filename: str) -> bool:
    """Whether a file of code is the user's: it is neither ours nor of Python's library or installed packages."""
    return not filename.startswith(_LIBRARIES) and _PACKAGES not in filename


def in_users_file(filename: str) -> bool:
    """Whether code has lines that its user can open: code that Python or torch makes has names like ``<string>``."""
    return of_user(filename) and not filename.startswith("<")


def of_library(filename: str) -> bool:
    """Whether a file of code is torch's, Python's own or ours: all others may be a model's."""
    python, own = _LIBRARIES
    if filename.startswith(python):  # where packages may lie too
        return _PACKAGES not in filename or f"{_PACKAGES}torch{os.sep}" in filename
    return filename.startswith((own, "<frozen")) or f"{_PACKAGES}torch{os.sep}" in filename


def describe(error: BaseException) -> str:
    """Return ``KeyError: 'x' (model.py:12, in build)``: the exception and the line of user code that raised it."""
    message = " ".join(str(error).split())
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return (
            words if error.lineno is None else f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
        )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    theirs = [f for f in frames if in_users_file(f.filename)] or frames
    return words + (f" ({theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name})" if theirs else "")


def users_lines(error: BaseException) -> list[str]:
    """Return where in the user's code an exception was raised, the innermost call last, and the exception's notes.

    Each call is ``model.py:12, in forward`` with its line of code below it.  The list is empty if no code of the user
    was running.
    """
    calls = [f for f in traceback.extract_tb(error.__traceback__) if in_users_file(f.filename)]
    if not calls:
        return []
    lines = [line for f in calls for line in (f"  {f.filename}:{f.lineno}, in {f.name}", f"    {f.line}")]
    return [line for line in lines if line.strip()] + [str(note) for note in getattr(error, "__notes__", ())]
