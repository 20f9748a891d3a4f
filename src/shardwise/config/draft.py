"""A config that is being read: the values that passed their rules, and the problems that were found so far."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.data.sources import STDLIB
from shardwise.data.tokenizer import BYTES

from .rules import Illegal
from .sections import MOVED, SECTIONS, rules
from .toml import parse, shown

REFERENCES = ("model.factory", "model.loss", "data.factory", "validation.factory")
SEVERAL = ("train.callbacks", "validation.metrics")
"""Lists of references."""
RENAMED = {"train.tensorboard": 'train.loggers = ["tensorboard"]'}
"""Keys of earlier versions, and what to write instead."""
PATHS = ("data.tokenizer", "data.cache_dir", "model.weights", "model.pretrained", "parallel.links")
SOURCES = ("data.source", "data.sft", "validation.source")


class ConfigDraft:
    """The values of a config under dotted keys (``"optimizer.lr"``).

    ``problems`` are collected, so that a user sees them all at once: each is a key ("" if none is known) and a line.
    A check on several keys is made only if none of them is wrong by itself.
    """

    def __init__(self) -> None:
        self.problems: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._bad: set[str] = set()
        self._raw: dict[str, Any] = {}

    # reading

    def add_tables(self, tables: Mapping[str, Any], origin: str, folder: Path) -> None:
        """Read the sections of a TOML file; relative paths in it are relative to its ``folder``."""
        for section, keys in tables.items():
            if section not in SECTIONS:
                self._unknown(section, origin, "section", SECTIONS)
            elif not isinstance(keys, dict):
                self.problems.append(("", f"{section} = {shown(keys)} ({origin}): legal: a section, [{section}]"))
                self._bad.update(f"{section}.{name}" for name in rules(section))
            else:
                for name, value in keys.items():
                    self._add(section, name, value, origin, folder)

    def add_override(self, override: str, origin: str, folder: Path) -> None:
        """Read one ``section.key=value``, or for a free table ``model.config.hidden_size=64``, at any depth."""
        dotted, equals, value = override.partition("=")
        section, *path = (part.strip() for part in dotted.split("."))
        if not equals or not path or not all(path):
            self.problems.append(
                ("", f"{shown(override)} ({origin}): legal: section.key=value, such as train.steps=100")
            )
        elif section not in SECTIONS:
            self._unknown(section, origin, "section", SECTIONS)
        else:
            self._add(section, path[0], self._nested(section, path, parse(value.strip())), origin, folder)

    def _nested(self, section: str, path: list[str], value: Any) -> Any:
        """Return the value of the first key of ``path`` with the last key set to ``value``; other keys stay."""
        first, *rest = path
        for name in reversed(rest):
            value = {name: value}
        before = self._raw.get(f"{section}.{first}")
        return _merged(before, value) if rest and isinstance(before, dict) else value

    def _add(self, section: str, name: str, value: Any, origin: str, folder: Path) -> None:
        section, _, name = MOVED.get(f"{section}.{name}", f"{section}.{name}").partition(".")
        legal = rules(section)
        if f"{section}.{name}" in RENAMED:
            line = f"{section}.{name} = {shown(value)} ({origin}): legal: {RENAMED[f'{section}.{name}']}"
            self.problems.append(("", line))
            return
        if name not in legal:
            self._unknown(name, origin, "key", legal, f"{section}.")
            return
        key = f"{section}.{name}"
        self._raw[key], self._origins[key] = value, origin
        self._forget(key)
        try:
            read = legal[name].read(value)
        except (Illegal, RecursionError) as error:
            self.refuse(key, legal[name].legal, str(error))
            return
        if key in REFERENCES:
            read = _absolute_reference(read, folder)
        elif key in SEVERAL:
            read = tuple(_absolute_reference(one, folder) for one in read)
        elif key in SOURCES:
            read = _absolute_source(read, folder)
        elif key == "data.mix":
            read = tuple({**part, "source": _absolute_source(part["source"], folder)} for part in read)
        elif key in PATHS and (key, read) != ("data.tokenizer", BYTES):
            read = _absolute(read, folder)
        self._values[key] = read

    def _forget(self, key: str) -> None:
        """Forget the earlier value of a key, and its problem."""
        self._values.pop(key, None)
        self._bad.discard(key)
        self.problems = [(about, line) for about, line in self.problems if about != key]

    def _unknown(self, word: str, origin: str, what: str, legal: Iterable[str], prefix: str = "") -> None:
        words = tuple(legal)
        name = word if word.isidentifier() else shown(word)
        hint = did_you_mean(word, words)
        self.problems.append(("", f"{prefix}{name} ({origin}): unknown {what}; legal: {', '.join(words)}.{hint}"))

    # checking

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, or its static default, or None."""
        if key in self._values:
            return self._values[key]
        section, _, name = key.partition(".")
        default = next(field.default for field in fields(SECTIONS[section]) if field.name == name)
        return None if default is MISSING else default

    def given(self, key: str) -> bool:
        """Whether the user set the key, rightly or wrongly."""
        return key in self._origins

    def sound(self, *keys: str) -> bool:
        """Whether there is no problem with any of these keys."""
        return self._bad.isdisjoint(keys)

    def default(self, key: str, value: Any) -> None:
        """Set a key that the user did not set."""
        if not self.given(key) and self.sound(key):
            self._values[key] = value

    def put_for(self, given: str, key: str, value: Any) -> None:
        """Set ``key`` to what the user has asked for by the key ``given``, which is left out from now on."""
        self._values[key] = self._raw[key] = value
        self._values[given] = None
        self._origins[key] = self._origins.pop(given)

    def refuse(self, key: str, legal: str, hint: str = "") -> None:
        """Note that the value of ``key`` is wrong, and what is legal."""
        self._bad.add(key)
        value = self._raw[key] if key in self._origins else self[key]
        self.problems.append((key, problem(key, value, self._origins.get(key), legal, hint)))

    def refuse_field(self, error: ConfigError, hint: str = "") -> None:
        """Note an error on a field of the plan as a problem of the key that the field comes from; ``hint``, if given,
        replaces what the error says is wrong.
        """
        legal, wrong = reworded(error)
        self.refuse(f"parallel.{error.field}", legal, hint or wrong)

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each key that the user set comes from."""
        return dict(self._origins)

    def section(self, name: str) -> Any:
        """Return a section as its dataclass."""
        return SECTIONS[name](**{key: self[f"{name}.{key}"] for key in rules(name)})


def problem(key: str, value: Any, origin: str | None, legal: str, hint: str = "") -> str:
    """Return a line on a wrong value; ``origin`` says where the value comes from, None that it is a default."""
    return f"{key} = {shown(value)} ({origin or 'default'}): legal: {legal}" + (f". {hint}" if hint else "")


def reworded(error: ConfigError) -> tuple[str, str]:
    """Return what is legal for the field of an error, and the sentence that follows: what is wrong."""
    wrong = f"{error.part}: {error.wrong}" if error.part else error.wrong
    wrong = wrong[:1].upper() + wrong[1:].rstrip(".")
    return error.legal.rstrip("."), f"{wrong}.{error.hint}" if error.hint else wrong


def _merged(before: Any, value: Any) -> Any:
    """Return table ``before`` with the keys of ``value`` set, at all depths."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    return {**before, **{name: _merged(before.get(name), item) for name, item in value.items()}}


def _absolute_reference(reference: str, folder: Path) -> str:
    """Return a reference to a function with an absolute path, if it has a path."""
    place, _, function = reference.rpartition(":")
    return f"{_absolute(place, folder)}:{function}" if place.endswith(".py") else reference


def _absolute_source(source: str | tuple[str, ...], folder: Path) -> str | tuple[str, ...]:
    if isinstance(source, tuple):
        return tuple(str(_absolute_source(one, folder)) for one in source)
    return source if source == STDLIB else _absolute(source, folder)


def _absolute(path: str, folder: Path) -> str:
    """Return an absolute path, for the config in the run folder must name the same file."""
    return os.path.abspath(folder / os.path.expanduser(path))
