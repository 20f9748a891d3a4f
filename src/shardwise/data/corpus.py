"""This module makes datasets of windows from a source of text, by way of the cache of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.core.errors import ConfigError

from .cache import TokenCache, Wanted, default_cache_dir, open_cache
from .sources import find_files
from .tokenise import OnProgress
from .tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from .windows import DocumentFields, PackedWindows


@dataclass(frozen=True)
class Corpus:
    """A corpus has the tokens of a source: those to train on, and those of documents set apart for validation, which a
    hash of their content chooses."""

    name: str
    tokenizer: Tokenizer
    cache: TokenCache
    fraction: float

    def train(self, length: int, *, shifted: bool = True, fields: DocumentFields = "none") -> PackedWindows:
        """Return the samples to train on; ConfigError if the text is too short for one sample."""
        cache = self.cache
        if cache.train.tokens <= length < cache.train.tokens + cache.validation.tokens:
            raise ConfigError(
                f"validation.share = {self.fraction:g}: it leaves {cache.train.tokens} tokens of "
                f"{cache.train.documents} documents to "
                f"train on, too few for one sample of data.sequence_length = {length} (it takes {length + 1}); "
                f"{cache.validation.documents} documents of {self.name} are set apart; legal: a smaller fraction, such "
                "as 0"
            )
        return self._windows("train", length, shifted, fields)

    def validation(self, length: int, *, shifted: bool = True, fields: DocumentFields = "none") -> PackedWindows | None:
        """Return the samples to validate on, or None if the documents set apart do not fill one."""
        if self.cache.validation.tokens <= length:
            return None
        return self._windows("validation", length, shifted, fields)

    def _windows(self, side: str, length: int, shifted: bool, fields: DocumentFields) -> PackedWindows:
        from .windows import PackedWindows  # imported here because it needs torch, which tokenising does not

        tokens, mapped = self.cache.tokens(side)
        digest = getattr(self.cache, side).sha256
        return PackedWindows(
            tokens, length, name=self.name, shifted=shifted, end=self.tokenizer.end, fields=fields, mapped=mapped,
            digest=digest
        )  # fmt: skip


def open_corpus(
    source: str | Sequence[str],
    *,
    tokenizer: str = "bytes",
    end_token: str | None = None,
    field: str = "text",
    validation: float = 0.0,
    cache_dir: str | None = None,
    progress: OnProgress | None = None,
    workers: int | None = None,
    alone: bool = True,
) -> Corpus:
    """Return the tokens of a source (or of several, one after the other), which are made if they are not in the cache.

    Args:
        source: ``"stdlib"``, a file, a folder, a glob, a folder of a Hugging Face dataset, or a list of these.
        tokenizer: ``"bytes"``, or the path of a tokenizer.json, whose ``end_token`` ends documents.
        field: The column of text in rows of .jsonl, .parquet and datasets.
        validation: The fraction of documents set apart, from 0 to 1.
        progress: A function that is called with (bytes done, bytes in all) while there is something to do.
        workers: The number of processes that tokenise; by default one per core, or one for little text.
        alone: Whether there is no other text. Then a single document is trained on, whatever its hash says. In a
            mixture another source may have the same document, which has to be on the same side there.

    ConfigError, with the path, if there is nothing to read or it cannot be read.
    """
    opened = open_tokenizer(tokenizer, end_token)
    wanted = Wanted(find_files(source), tokenizer, opened, field, validation)
    cache = open_cache(wanted, cache_dir or default_cache_dir(), progress, workers)
    if alone and cache.documents == cache.validation.documents == 1:
        cache = cache.swap()
    return Corpus(source if isinstance(source, str) else ", ".join(source), opened, cache, validation)
