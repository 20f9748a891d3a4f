"""Answers to the keys of another library's config, and the rules that give them: pure data and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.core.errors import ConfigError, did_you_mean

Kind = Literal["key", "always", "elsewhere", "none", "unknown"]
KINDS: Mapping[Kind, str] = {
    "key": "becomes keys of a shardwise config",
    "always": "happens by itself, nothing is set",
    "elsewhere": "has its counterpart outside of the config",
    "none": "has no counterpart",
    "unknown": "is not known here",
}


@dataclass(frozen=True)
class Answer:
    """What a key becomes: ``settings`` of shardwise's config, and words on it."""

    kind: Kind
    why: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A key of the other config, its value, and the answer."""

    key: str
    value: Any
    answer: Answer


@dataclass
class Context:
    """What answers need beside a key's value: the whole config by dotted names, and the ranks, if they are known."""

    values: Mapping[str, Any]
    ranks: int | None = None
    hosts: int | None = None

    def number(self, key: str) -> int | None:
        """Return a whole number of the config, or None where it is "auto" or not there."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


Rule = Callable[[str, Any, Context], Answer]


def always(why: str) -> Rule:
    """A rule for what shardwise does anyway."""
    return lambda key, value, context: Answer("always", why)


def elsewhere(why: str) -> Rule:
    """A rule for what is set somewhere else than in a config."""
    return lambda key, value, context: Answer("elsewhere", why)


def none(why: str) -> Rule:
    """A rule for what shardwise does not have."""
    return lambda key, value, context: Answer("none", why)


def number(name: str, why: str = "", *, least: float = 0, whole: bool = False) -> Rule:
    """A rule for a number that is the value of a key of shardwise's."""

    def rule(key: str, value: Any, context: Context) -> Answer:
        return Answer("key", why, {name: checked(key, value, least=least, whole=whole)})

    return rule


def checked(key: str, value: Any, *, least: float = 0, whole: bool = False) -> float:
    """Return a number; raise :class:`ConfigError` where it is none or not legal."""
    if isinstance(value, str):  # YAML reads 1e-5 as a text
        with suppress(ValueError):
            value = float(value)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= least
    if not fits or (whole and value != int(value)):
        raise ConfigError.on(key, f"{value!r} is not legal", f"a {'whole ' * whole}number of at least {least:g}")
    return int(value) if whole else value


def by_value(answers: Mapping[Any, Answer]) -> Rule:
    """A rule for a key with a few legal values, compared as text without regard to case."""

    def rule(key: str, value: Any, context: Context) -> Answer:
        found = {_word(one): answer for one, answer in answers.items()}.get(_word(value))
        if found is None:
            legal = ", ".join(str(one) for one in answers)
            raise ConfigError.on(key, f"{value!r} is not legal", legal, did_you_mean(value, answers))
        return found

    return rule


def switch(on: Answer, off: Answer | None = None) -> Rule:
    """A rule for a key that is true or false."""
    return by_value({True: on, False: off or Answer("always", "off, as by default")})


def _word(value: Any) -> str:
    text = "none" if value is None else str(value).strip().lower()
    return {"yes": "true", "no": "false", "on": "true", "off": "false"}.get(text, text) if value != "no" else "no"


def key(why: str = "", **settings: Any) -> Answer:
    """An answer with keys of shardwise's, written ``parallel_zero=3`` for ``parallel.zero = 3``."""
    return Answer("key", why, {name.replace("_", ".", 1): value for name, value in settings.items()})


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables by dotted names, in their order."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            yield f"{prefix}{name}", value


def answered(values: Mapping[str, Any], rules: Mapping[str, Rule], context: Context) -> list[Line]:
    """Return a line for each key. A rule's name may end with ``*``; the longest that fits answers."""
    lines = []
    for name, value in values.items():
        rule = rules.get(name)
        if rule is None:
            starts = [one for one in rules if one.endswith("*") and name.startswith(one[:-1])]
            rule = rules[max(starts, key=len)] if starts else None
        if value == "auto":
            answer = Answer("elsewhere", "transformers fills it in; here it has shardwise's default unless it is set")
        elif rule is None:
            answer = Answer("unknown", did_you_mean(name, rules).strip())
        else:
            answer = rule(name, value, context)
        lines.append(Line(name, value, answer))
    return lines


def settings_of(lines: list[Line]) -> dict[str, dict[str, Any]]:
    """Return the sections of a config; raise :class:`ConfigError` where two lines ask for different values."""
    found: dict[str, tuple[Any, str]] = {}
    for line in lines:
        for name, value in line.answer.settings.items():
            if name in found and found[name][0] != value:
                other = found[name]
                wrong = f"it asks for {name} = {value!r}, but {other[1]} asks for {other[0]!r}"
                raise ConfigError.on(line.key, wrong, "one value in both")
            found.setdefault(name, (value, line.key))
    sections: dict[str, dict[str, Any]] = {}
    for name, (value, _) in found.items():
        section, _, own = name.partition(".")
        sections.setdefault(section, {})[own] = value
    return sections
