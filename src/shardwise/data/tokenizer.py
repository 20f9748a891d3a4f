"""This module has the tokenizers: bytes as they are, or a `tokenizer.json` of the tokenizers library."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, did_you_mean

BYTES = "bytes"
SETTINGS = "tokenizer_config.json"
BYTE_VOCABULARY = 256
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")
LONG = 1 << 20  # the number of bytes of text that are encoded in one part
BATCH = 1 << 20  # the number of bytes of documents that are encoded together
Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """A tokenizer has ``vocabulary`` tokens; the token ``end``, called ``end_token``, ends a document. ``digest`` is
    the same only for tokenizers that give the same tokens."""

    vocabulary: int
    end: int
    end_token: str | None
    digest: str

    @property
    def begin(self) -> list[int]:
        """The tokens that begin a text by itself; often there are none."""

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text, shape (tokens,), without an end token."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; numbers outside the vocabulary are replaced or left out."""


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype of the smallest unsigned integers that hold all tokens."""
    return np.dtype(next(kind for kind in (np.uint8, np.uint16, np.uint32) if vocabulary <= np.iinfo(kind).max + 1))


def open_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer ``"bytes"`` or the one in a file; ``end_token`` ends documents there (default: the
    ``eos_token`` of the tokenizer_config.json beside it, else the first of :data:`END_TOKENS` in its vocabulary)."""
    return BytesTokenizer() if name == BYTES else JsonTokenizer(name, end_token)


class BytesTokenizer:
    """The tokens are bytes; byte 0 ends a document, and a zero byte inside a document becomes a space."""

    def __init__(self) -> None:
        self.vocabulary, self.end, self.digest = BYTE_VOCABULARY, 0, BYTES
        self.end_token: str | None = None
        self.begin: list[int] = []

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes of each text as uint8, with 0x20 for zero bytes."""
        return [np.frombuffer(text.replace(b"\0", b" "), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; U+FFFD replaces whatever is not UTF-8 or not a byte."""
        return bytes(i if 0 <= i < BYTE_VOCABULARY else 0xFF for i in map(int, ids)).decode("utf-8", errors="replace")


class JsonTokenizer:
    """This is a tokenizer of the tokenizers library, read from the file ``path``.

    Text that looks like a special token is text, and the file's truncation, padding and template are ignored:
    documents are encoded whole and end with ``end_token`` alone. ConfigError for a file that cannot be read, does not
    have that token, or makes it from text.
    """

    def __init__(self, path: str, end_token: str | None = None) -> None:
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError.on("data.tokenizer", f"cannot read {path}: {error.strerror}", _LEGAL) from error
        self._path, self._content, self._tokenizer = path, content, _parse(path, content)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError.on("data.tokenizer", f"{path} has no tokens", _LEGAL)
        self.vocabulary = max(vocabulary.values()) + 1
        self.end_token: str | None = _end_token(path, vocabulary, end_token)
        self.end = vocabulary[str(self.end_token)]
        _keep_from_text(path, self._tokenizer, str(self.end_token), self.end)
        self.digest = hashlib.sha256(content).hexdigest()
        self._dtype = token_dtype(self.vocabulary)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text, decoded as UTF-8 with U+FFFD for errors; a long text is encoded in parts.

        ConfigError for text that this tokenizer cannot encode.
        """
        parts = [list(_parts(text)) for text in texts]
        flat = [part.decode("utf-8", errors="replace") for each in parts for part in each]
        try:
            encodings = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        except Exception as error:  # the library raises nothing more specific
            wrong = f"{self._path} cannot encode some of the text: {error}"
            legal = "a tokenizer with a token for what it does not know, or one of bytes"
            raise ConfigError.on("data.tokenizer", wrong, legal) from error
        tokens = [[np.array(next(encodings).ids, dtype=self._dtype) for _ in each] for each in parts]
        return [each[0] if len(each) == 1 else np.concatenate([np.empty(0, self._dtype), *each]) for each in tokens]

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text in which special tokens are written out, as in that of a chat template, and for
        each token the characters that it is made of: the first, and the one after the last."""
        found = self._marked.encode(text, add_special_tokens=False)
        return list(found.ids), list(found.offsets)

    @property
    def begin(self) -> list[int]:
        """The special tokens that the file's template puts before a text, such as ``<s>``."""
        found = self._marked.encode("a", add_special_tokens=True)
        special = [bool(one) for one in found.special_tokens_mask]
        return list(found.ids[: special.index(False)]) if False in special else []

    @functools.cached_property
    def _marked(self) -> Any:
        from tokenizers import AddedToken

        marked = _parse(self._path, self._content)
        marked.encode_special_tokens = False
        marked.add_special_tokens([AddedToken(str(self.end_token), special=True, normalized=False)])
        return marked

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; numbers outside the vocabulary are left out."""
        text: str = self._tokenizer.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocabulary], skip_special_tokens=False
        )
        return text


_LEGAL = '"bytes", or the path of a tokenizer.json (`shardwise tokenizer train` makes one)'


def _parse(path: str, content: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        wrong = f"{path} takes the library tokenizers, which cannot be imported ({error})"
        raise ConfigError.on("data.tokenizer", wrong, "pip install tokenizers") from error
    try:
        tokenizer = Library.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError.on("data.tokenizer", f"{path} is no tokenizer: {error}", _LEGAL) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenizer_settings(path: str) -> dict[str, Any]:
    """Return the content of the ``tokenizer_config.json`` beside a tokenizer.json; nothing if there is none."""
    file = Path(path).with_name(SETTINGS)
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError.on("data.tokenizer", f"cannot read {file}: {error}", "JSON, or no such file") from error
    return found if isinstance(found, dict) else {}


def _end_token(path: str, vocabulary: dict[str, int], wanted: str | None) -> str:
    named = tokenizer_settings(path).get("eos_token") if wanted is None else None
    named = named.get("content") if isinstance(named, dict) else named
    wanted = named if isinstance(named, str) and named in vocabulary else wanted
    if wanted is not None:
        if wanted not in vocabulary:
            near = did_you_mean(wanted, [token for token in vocabulary if token[:1] in "<[" and len(token) > 2])
            raise ConfigError.on(f'data.end_token = "{wanted}"', f"no token of {path}", "one of its tokens.", near)
        return wanted
    found = next((token for token in END_TOKENS if token in vocabulary), None)
    if found is None:
        wrong = f"{path} has none of {', '.join(END_TOKENS)}"
        raise ConfigError.on("data.end_token", wrong, "the token that ends a document")
    return found


def _keep_from_text(path: str, tokenizer: Any, end_token: str, end: int) -> None:
    """Make text that looks like the end token be encoded as text; ConfigError if the tokenizer cannot do this."""
    if not _of_text(tokenizer, end_token, end):
        return
    from tokenizers import AddedToken

    # The token may have been added to the file without being special.
    tokenizer.add_special_tokens([AddedToken(end_token, special=True, normalized=False)])
    if _of_text(tokenizer, end_token, end):
        wrong = f"text that has these characters becomes this token of {path}, and would end documents"
        legal = "a token that text does not become, such as one added to the file with add_special_tokens"
        raise ConfigError.on(f'data.end_token = "{end_token}"', wrong, legal)


def _of_text(tokenizer: Any, end_token: str, end: int) -> bool:
    """Return whether the end token's own text becomes the token, alone or inside other text."""
    for text in (end_token, f"a{end_token}b", f"a {end_token} b"):
        with suppress(Exception):  # a tokenizer may not know "a", and the library raises nothing more specific
            if end in tokenizer.encode(text, add_special_tokens=False).ids:
                return True
    return False


def _parts(text: bytes) -> Iterator[bytes]:
    """Yield a long text in parts, cut after a line's end, before a blank, or at least between characters."""
    start = 0
    while len(text) - start > LONG:
        stop = start + LONG
        cut = text.rfind(b"\n", start, stop) + 1 or text.rfind(b" ", start + 1, stop)
        if cut <= start:
            cut = stop
            while text[cut] & 0xC0 == 0x80 and cut > stop - 4:
                cut -= 1
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
