"""Read prompts with their answers from files of JSON lines."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.core.errors import ConfigError

from .chat import ASSISTANT, Message
from .sources import LEGAL_SFT, is_glob, not_json

KEY = "data.sft"
ANSWERS = ("response", "completion")
LEGAL_ROW = '{"prompt": text, "response": text}, or {"messages": [{"role": text, "content": text}, …]} with an answer'


class Example(NamedTuple):
    """A conversation with an answer, the place of its line as ``file:line``, and the bytes of that line."""

    messages: list[Message]
    place: str
    nbytes: int


def example_files(sources: str | Sequence[str]) -> list[Path]:
    """Return the .jsonl files of one source or several, each once; :class:`ConfigError` for a source without any."""
    found: dict[str, Path] = {}
    for source in [sources] if isinstance(sources, str) else sources:
        if is_glob(source):
            files = [Path(one) for one in sorted(glob.glob(source, recursive=True))]
        elif os.path.isdir(source):
            files = sorted(Path(source).rglob("*.jsonl"))
        else:
            files = [Path(source)]
        files = [file for file in files if file.is_file() and file.suffix == ".jsonl"]
        if not files:
            wrong = f"{source} is no .jsonl file" if os.path.isfile(source) else f"{source} holds no .jsonl file"
            raise ConfigError.on(KEY, wrong, LEGAL_SFT)
        found.update({os.path.realpath(file): file for file in files})
    return list(found.values())


def read_examples(file: Path) -> Iterator[Example]:
    """Yield the examples of a file; :class:`ConfigError` names the line that is none."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{file}:{number}"
                    yield Example(_messages(_row(line, place), place), place, len(line))
    except OSError as error:
        raise ConfigError(f"{KEY}: cannot read {file}: {error.strerror}") from error


def _row(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        raise ConfigError.on(f"{KEY}: {place}", not_json(error), "one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError.on(f"{KEY}: {place}", type(row).__name__, "one JSON object a line")
    return row


def _messages(row: Mapping[str, Any], place: str) -> list[Message]:
    if "messages" in row:
        return _checked(row["messages"], place)
    answer = next((name for name in ANSWERS if name in row), None)
    if "prompt" not in row or answer is None:
        raise ConfigError.on(f"{KEY}: {place}", f"it has {', '.join(row) or 'nothing'}", LEGAL_ROW)
    pair = [{"role": "user", "content": row["prompt"]}, {"role": ASSISTANT, "content": row[answer]}]
    return _checked(pair, place)


def _checked(messages: Any, place: str) -> list[Message]:
    where = f"{KEY}: {place}"
    if not isinstance(messages, list):
        raise ConfigError.on(where, f"messages is of type {type(messages).__name__}", LEGAL_ROW)
    for number, one in enumerate(messages, 1):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise ConfigError.on(where, f"message {number} has no role", LEGAL_ROW)
        if not isinstance(one.get("content"), str):
            kind = type(one.get("content")).__name__
            raise ConfigError.on(where, f"the content of message {number} is of type {kind}", LEGAL_ROW)
    if not any(one["role"] == ASSISTANT and one["content"] for one in messages):
        raise ConfigError.on(where, "no message of the assistant, so there is nothing to learn", LEGAL_ROW)
    return messages
