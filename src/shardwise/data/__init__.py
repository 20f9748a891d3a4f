"""This package turns text on disk into the samples of each step, which are the same for any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus import Corpus, open_corpus
    from .loader import Batch, Loader, one_pass, rank_rows
    from .mixture import Joined, Mixture
    from .order import sample_order
    from .tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
    from .windows import PackedWindows

_HOMES = {
    "Batch": "loader",
    "BytesTokenizer": "tokenizer",
    "Corpus": "corpus",
    "Joined": "mixture",
    "JsonTokenizer": "tokenizer",
    "Loader": "loader",
    "Mixture": "mixture",
    "PackedWindows": "windows",
    "Tokenizer": "tokenizer",
    "one_pass": "loader",
    "open_corpus": "corpus",
    "open_tokenizer": "tokenizer",
    "rank_rows": "loader",
    "sample_order": "order",
}
__all__ = [
    "Batch",
    "BytesTokenizer",
    "Corpus",
    "Joined",
    "JsonTokenizer",
    "Loader",
    "Mixture",
    "PackedWindows",
    "Tokenizer",
    "one_pass",
    "open_corpus",
    "open_tokenizer",
    "rank_rows",
    "sample_order",
]


def __getattr__(name: str) -> Any:
    """Import on first use, because the processes that tokenise do not need torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
