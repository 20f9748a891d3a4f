"""How a conversation becomes tokens: by the chat template of a tokenizer, or by a plain one where it has none.

The plain template writes each message with its role, and puts blank lines between messages. The tokenizer's end token
ends every answer::

    System: Be brief.

    User: What is the capital of France?

    Assistant: Paris.<|endoftext|>

What the model learns is the answer of each assistant message, with the token that ends it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardwise.core.errors import ConfigError

from .tokenizer import JsonTokenizer, Tokenizer, tokenizer_settings

TEMPLATE_FILE = "chat_template.jinja"
ASSISTANT = "assistant"
ROLES = {"system": "System", "user": "User", ASSISTANT: "Assistant"}

Message = Mapping[str, Any]


class Tokenised(NamedTuple):
    """The tokens of an example, and for each whether it is part of an answer; both have a length of (tokens,)."""

    ids: list[int]
    answers: list[bool]


class ChatTemplate(Protocol):
    """``digest`` is the same only for templates that give the same tokens."""

    digest: str

    def examples(self, messages: Sequence[Message]) -> list[Tokenised]:
        """Return the tokens of a conversation: one example with all its answers, or one for each answer where the
        template writes earlier answers otherwise than the last. ValueError for messages that it does not take."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens after which an answer to these messages begins; ValueError as for :meth:`examples`."""


def open_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template beside the tokenizer.json ``name``, or the plain one if there is none.

    :class:`ConfigError` if there is one, and transformers, which reads it, is missing or refuses it.
    """
    if not isinstance(tokenizer, JsonTokenizer) or not has_template(name):
        return PlainTemplate(tokenizer)
    return JinjaTemplate(name, tokenizer)


def has_template(name: str) -> bool:
    """Return whether there is a chat template beside a tokenizer.json."""
    return bool(tokenizer_settings(name).get("chat_template")) or Path(name).with_name(TEMPLATE_FILE).is_file()


class PlainTemplate:
    """The template that the module describes. Its parts become tokens one by one, and text that looks like a special
    token stays text."""

    digest = "plain 1"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def examples(self, messages: Sequence[Message]) -> list[Tokenised]:
        parts = [*self._begin(), *(part for place in range(len(messages)) for part in self._parts(messages, place))]
        ids = [token for part, _ in parts for token in part]
        return [Tokenised(ids, [answer for part, answer in parts for _ in part])]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        asked = [*messages, {"role": ASSISTANT, "content": ""}]
        parts = [*self._begin(), *(part for place in range(len(messages)) for part in self._parts(asked, place))]
        return [token for part, _ in [*parts, self._parts(asked, len(messages))[0]] for token in part]

    def _begin(self) -> list[tuple[list[int], bool]]:
        return [(list(self._tokenizer.begin), False)]

    def _parts(self, messages: Sequence[Message], place: int) -> list[tuple[list[int], bool]]:
        """Return the parts of one message, each with whether it is an answer."""
        role, content = messages[place]["role"], messages[place]["content"]
        if role not in ROLES:
            raise ValueError(f'role "{role}"; legal without a chat template: {", ".join(ROLES)}')
        gap = "\n\n" if place else ""
        if role != ASSISTANT:
            return [(self._encode(f"{gap}{ROLES[role]}: {content}"), False)]
        answer = [*self._encode(f" {content}"), self._tokenizer.end]
        return [(self._encode(f"{gap}{ROLES[role]}:"), False), (answer, True)]

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode([text.encode(errors="replace")])[0]]


class JinjaTemplate:
    """The chat template of a Hugging Face tokenizer, which transformers renders. Special tokens in the text are those
    of the tokenizer, as in ``apply_chat_template``."""

    def __init__(self, name: str, tokenizer: JsonTokenizer) -> None:
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            wrong = f"the chat template beside {name} takes transformers, which cannot be imported ({error})"
            raise ConfigError.on("data.tokenizer", wrong, "pip install 'shardwise[transformers]'") from error
        folder = Path(name).parent
        try:
            self._rendering: Any = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            template = self._rendering.get_chat_template()
        except Exception as error:  # whatever the library says of a damaged file
            wrong = f"the chat template in {folder} cannot be read: {type(error).__name__}: {error}"
            raise ConfigError.on("data.tokenizer", wrong, "a tokenizer that save_pretrained wrote") from error
        self._tokenizer, self._end = tokenizer, str(tokenizer.end_token)
        special = json.dumps(self._rendering.special_tokens_map, sort_keys=True, default=str)
        self.digest = hashlib.sha256(f"{template}\0{special}".encode()).hexdigest()

    def examples(self, messages: Sequence[Message]) -> list[Tokenised]:
        places = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [(self._render(messages[:at], True), self._render(messages[: at + 1])) for at in places]
        for before, upto in turns:
            if not upto.startswith(before):
                raise ValueError("its chat template writes an answer otherwise than after what asks for it")
        whole = self._render(messages)
        if all(whole.startswith(upto) for _, upto in turns):
            return [self._tokenised(whole, [(len(before), upto) for before, upto in turns])]
        return [self._tokenised(upto, [(len(before), upto)]) for before, upto in turns]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode_marked(self._render(messages, True))[0]

    def _render(self, messages: Sequence[Message], asks: bool = False) -> str:
        try:
            text = self._rendering.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"its chat template refuses it: {error}") from error
        return str(text)

    def _tokenised(self, text: str, turns: list[tuple[int, str]]) -> Tokenised:
        """Return the tokens of a text; each of ``turns`` has the character at which an answer begins, and the text up
        to its end, where what follows the end token is no part of the answer."""
        ids, offsets = self._tokenizer.encode_marked(text)
        spans = []
        for start, upto in turns:
            end = upto.rfind(self._end, start)
            spans.append((start, end + len(self._end) if end >= 0 else len(upto)))
        return Tokenised(ids, [any(a < stop and b > start for start, stop in spans) for a, b in offsets])
