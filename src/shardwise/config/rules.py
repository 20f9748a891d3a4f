"""Rules for the values of a config's keys: each has a reader with its checks, and words for what is legal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import did_you_mean

LARGEST = 2**63 - 1


class Illegal(ValueError):
    """A rule refuses a value; the text of the exception is a hint, or empty."""


@dataclass(frozen=True)
class Rule:
    """``read`` turns a TOML value into the key's value or raises :class:`Illegal`; ``legal`` says what is legal."""

    legal: str
    read: Callable[[Any], Any]


def key(rule: Rule, default: Any = None, *, does: str, otherwise: str = "", legal: str = "") -> Any:
    """Return a dataclass field with a rule; the default None means "not given".

    The rest is for the reference (`reference.py`), in Markdown: ``does`` says what the key does, ``otherwise`` what
    holds where it is not given, and ``legal`` what is legal, where that is more than the rule can say by itself.
    """
    return field(default=default, metadata={"rule": rule, "does": does, "otherwise": otherwise, "legal": legal})


def integer(least: int, most: int = 2**31 - 1) -> Rule:
    """Return the rule for an integer from ``least`` to ``most``, both legal."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Illegal
        if value > most:
            raise Illegal(f"At most {most}")
        return value

    return Rule(f"an integer of at least {least}", read)


def integers(legal: str, least: int) -> Rule:
    """Return the rule for a list of integers of at least ``least``; it becomes a sorted tuple without duplicates."""
    one = integer(least)

    def read(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise Illegal
        found = {one.read(item) for item in value}
        return tuple(sorted(found))

    return Rule(legal, read)


def number(least: float = 0.0, below: float = math.inf, *, open_: bool = False, most: float = math.inf) -> Rule:
    """Return the rule for a finite number of at least ``least`` (or above it, if ``open_``), below ``below`` and at
    most ``most``."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise Illegal
        if not (value > least if open_ else value >= least) or not value < below or value > most:
            raise Illegal
        return float(value)

    words = f"a number {'above' if open_ else 'of at least'} {least:g}"
    words += f" and below {below:g}" if below < math.inf else ""
    return Rule(words + (f" and at most {most:g}" if most < math.inf else ""), read)


def choice(*words: str) -> Rule:
    """Return the rule for one of some words."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Illegal(did_you_mean(value, words).strip())
        return value

    return Rule(", ".join(f'"{word}"' for word in words), read)


def either(*each: Rule) -> Rule:
    """Return the rule for what any of several rules takes; its hint is the first hint of these rules."""

    def read(value: Any) -> Any:
        hints = []
        for rule in each:
            try:
                return rule.read(value)
            except Illegal as error:
                hints.append(str(error))
        raise Illegal(next(filter(None, hints), ""))

    return Rule(" or ".join(rule.legal for rule in each), read)


def switch() -> Rule:
    """Return the rule for true or false."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise Illegal
        return value

    return Rule("true or false", read)


def text(legal: str, test: Callable[[str], bool] = bool) -> Rule:
    """Return the rule for a text that can be written to a file and passes ``test``."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not _writable(value) or not test(value):
            raise Illegal
        return value

    return Rule(legal, read)


def reference(what: str) -> Rule:
    """Return the rule for a reference to a function: a file or a module, and a name."""

    def test(value: str) -> bool:
        place, _, name = value.rpartition(":")
        return bool(place) and name.isidentifier()

    return text(f'{what} as "path/to/file.py:function" or "package.module:function"', test)


def pair(each: Rule) -> Rule:
    """Return the rule for a list of two values under one rule, which becomes a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise Illegal
        return tuple(each.read(item) for item in value)

    return Rule(f"a list of two, each {each.legal}", read)


def several(each: Rule) -> Rule:
    """Return the rule for a list of one or more values under one rule, which becomes a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise Illegal
        return tuple(each.read(item) for item in value)

    return Rule(f"a list, each {each.legal}", read)


def distinct(each: Rule) -> Rule:
    """Return the rule for a list of texts under one rule, none of them twice, which becomes a tuple."""

    def read(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise Illegal(f"It is no list; [{value!r}] is one" if isinstance(value, str) else "")
        found = tuple(str(each.read(item)) for item in value)
        twice = [item for item in found if found.count(item) > 1]
        if twice:
            raise Illegal(f"{twice[0]} is there twice")
        return found

    return Rule(f"a list, each {each.legal}", read)


def texts(legal: str) -> Rule:
    """Return the rule for a text that can be written to a file, or a list of such texts, which becomes a tuple."""
    one = text(legal)

    def read(value: Any) -> str | tuple[str, ...]:
        if not isinstance(value, list | tuple):
            return str(one.read(value))
        if not value:
            raise Illegal("The list is empty")
        return tuple(str(one.read(item)) for item in value)

    return Rule(f"{legal}, or a list of these", read)


def tables(legal: str, each: dict[str, Rule]) -> Rule:
    """Return the rule for a list of tables, each with exactly the keys of ``each``; it becomes a tuple."""
    return some_keys(legal, each, {})


def any_keys(legal: str, more: dict[str, Rule]) -> Rule:
    """Return the rule for a table with any of the keys ``more``."""
    several = some_keys(legal, {}, more)

    def read(value: Any) -> dict[str, Any]:
        found: dict[str, Any] = several.read([value])[0]
        return found

    return Rule(legal, read)


def some_keys(legal: str, each: dict[str, Rule], more: dict[str, Rule]) -> Rule:
    """Return the rule for a list of tables, each with all keys of ``each`` and any of ``more``; it becomes a tuple."""
    every = {**each, **more}

    def read_one(place: int, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Illegal(f"Part {place} is no table")
        for name in value:
            if name not in every:
                raise Illegal(
                    f"Part {place} has an unknown key {name!r}; its keys: {', '.join(every)}."
                    f"{did_you_mean(name, every)}"
                )
        found = {}
        for name, rule in every.items():
            if name not in value:
                if name in more:
                    continue
                raise Illegal(f"Part {place} has no {name}")
            try:
                found[name] = rule.read(value[name])
            except Illegal as error:
                hint = f". {error}" if str(error) else ""
                raise Illegal(f"Part {place} has a wrong {name}; legal: {rule.legal}{hint}") from None
        return found

    def read(value: Any) -> tuple[dict[str, Any], ...]:
        if not isinstance(value, list | tuple) or not value:
            raise Illegal
        return tuple(read_one(place, item) for place, item in enumerate(value, 1))

    return Rule(legal, read)


def settings(legal: str, each: dict[str, tuple[Rule, Any]]) -> Rule:
    """Return the rule for a table with any of the keys of ``each``; a key that is left out gets its default."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Illegal
        for name in value:
            if name not in each:
                raise Illegal(f"It has an unknown key {name!r}; its keys: {', '.join(each)}.{did_you_mean(name, each)}")
        found = {}
        for name, (rule, default) in each.items():
            try:
                found[name] = rule.read(value[name]) if name in value else default
            except Illegal as error:
                hint = f". {error}" if str(error) else ""
                raise Illegal(f"It has a wrong {name}; legal: {rule.legal}{hint}") from None
        return found

    return Rule(legal, read)


def by_name(legal: str, one: Rule) -> Rule:
    """Return the rule for a table with a value of the rule ``one`` for each name, and at least one."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            raise Illegal
        return {_plain(name): one.read(item) for name, item in value.items()}

    return Rule(legal, read)


def table(legal: str) -> Rule:
    """Return the rule for a table of any texts, numbers, booleans, lists and tables."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Illegal
        return {_plain(name): _plain(item) for name, item in value.items()}

    return Rule(legal, read)


def words(legal: str) -> Rule:
    """Return the rule for a table of texts that is not empty."""

    def read(value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not value:
            raise Illegal
        for name, item in value.items():
            if not name or not isinstance(item, str):
                raise Illegal(f"It holds {name!r} = {item!r}")
        return {str(_plain(name)): str(_plain(item)) for name, item in value.items()}

    return Rule(legal, read)


def _plain(value: Any) -> Any:
    """Return a copy of a value, or raise :class:`Illegal` if TOML cannot hold it and give it back unchanged."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str) and _writable(value):
        return value
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= LARGEST):
        return value
    if isinstance(value, float) and not math.isnan(value):
        return value
    raise Illegal(f"It holds {value!r}, which is neither text, a number, true or false, a list nor a table")


def _writable(value: str) -> bool:
    """Whether a file or a path can hold this text: it has no lone surrogate (undecodable arguments), no zero byte."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
