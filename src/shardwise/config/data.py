"""The checks and defaults of ``[data]`` that depend on several keys."""

from __future__ import annotations

from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.data.cache import default_cache_dir
from shardwise.data.sources import exists
from shardwise.data.tokenizer import BYTES, open_tokenizer

from .draft import SOURCES, ConfigDraft
from .files import file_exists, there
from .pretrained import PretrainedFolder
from .sections import rules

KINDS = ("data.source", "data.mix", "data.sft", "data.factory")
OF_TEXT = ("text_field", "tokenizer", "end_token", "attention", "cache_dir")
OF_FACTORY = ("arguments", "pad", "pad_mask", "pad_to_multiple_of", "varies")
TEXTS = "data.source and data.mix"


def complete_data(draft: ConfigDraft) -> int | None:
    """Fill in the defaults of ``[data]``; return the size of its vocabulary, or None without text or on an error."""
    kinds = [key for key in KINDS if draft.given(key)]
    for key in kinds[1:]:
        draft.refuse(key, f"{' or '.join(KINDS)}, not both" if len(kinds) == 2 else f"one of {', '.join(KINDS)}")
    for name in OF_FACTORY:
        if draft.given(f"data.{name}") and draft.sound(f"data.{name}") and "data.factory" not in kinds:
            draft.refuse(f"data.{name}", "left out, for it belongs to data.factory")
    for name in ("pad_mask", "pad_to_multiple_of"):
        if draft.given(f"data.{name}") and "data.factory" in kinds and not draft.given("data.pad"):
            draft.refuse(f"data.{name}", "left out, for it belongs to data.pad")
    file_exists(draft, "data.factory")
    if "data.factory" in kinds:
        _not_text(draft)
        return None
    if not kinds:
        draft.default("data.source", "stdlib")
    _sources_exist(draft)
    examples = "data.sft" in kinds
    if examples and draft.given("data.text_field"):
        draft.refuse("data.text_field", f"left out, for it belongs to {TEXTS}")
    defaults = {
        "text_field": None if examples else "text",
        "attention": "document" if examples else "full",
        "cache_dir": default_cache_dir(),
    }
    tokenizer = BYTES if draft.given("data.tokenizer") else _pretrained_tokenizer(draft)
    if tokenizer is None:
        return None
    defaults["tokenizer"] = tokenizer
    for name, value in defaults.items():
        draft.default(f"data.{name}", value)
    return _tokenizer(draft)


def _pretrained_tokenizer(draft: ConfigDraft) -> str | None:
    """Return what turns text into tokens by default: bytes, or the tokenizer of ``model.pretrained``; None if that
    folder has none, or is none."""
    if not draft.given("model.pretrained"):
        return BYTES
    try:
        found = PretrainedFolder.open(draft["model.pretrained"] or "").tokenizer
    except (ConfigError, OSError, ValueError):
        return None  # `pretrained_there` says what is wrong
    if found is None:
        legal = "the path of a tokenizer.json, for the folder of model.pretrained has none"
        draft.refuse("data.tokenizer", legal, "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it")
    return found


def _not_text(draft: ConfigDraft) -> None:
    """Refuse the keys of text, for a dataset of a factory would ignore them."""
    for name in OF_TEXT:
        if draft.given(f"data.{name}") and draft.sound(f"data.{name}"):
            draft.refuse(f"data.{name}", f"left out, for it belongs to {TEXTS}")


def _sources_exist(draft: ConfigDraft) -> None:
    named: dict[str, Any] = {key: draft[key] for key in SOURCES}
    if draft.sound("data.mix"):
        named["data.mix"] = [part["source"] for part in draft["data.mix"] or ()]
    refuse_missing(draft, named)


def refuse_missing(draft: ConfigDraft, named: dict[str, Any]) -> None:
    """Refuse each key of ``named`` of whose sources one does not exist."""
    for key, value in named.items():
        for source in _flat(value) if draft.sound(key) else ():
            if draft.sound(key) and not there(source, exists):
                section, _, name = key.partition(".")
                draft.refuse(key, rules(section)[name].legal, f"{source} does not exist")


def _flat(value: Any) -> list[str]:
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    return [source for part in value for source in _flat(part)]


def _tokenizer(draft: ConfigDraft) -> int | None:
    """Fill in the end token of the tokenizer; return the size of its vocabulary, or None if something is wrong."""
    name, end = "data.tokenizer", "data.end_token"
    if not draft.sound(name, end):
        return None
    if draft[name] == BYTES and draft.given(end):
        draft.refuse(end, "left out, for it belongs to a tokenizer.json; byte 0 ends a document of bytes")
        return None
    try:
        opened = open_tokenizer(draft[name], draft[end])
    except ConfigError as error:
        key = name if error.field == name or not draft.given(end) else end
        message = f"{error.wrong}; legal: {error.legal}{error.hint}"
        draft.refuse(key, rules("data")[key.partition(".")[2]].legal, " ".join(message.split()))
        return None
    draft.default(end, opened.end_token)
    return opened.vocabulary
