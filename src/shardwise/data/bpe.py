"""This module trains a tokenizer with the tokenizers library: byte-level BPE (Sennrich et al., 2016; bytes are the
alphabet, as in GPT-2)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import ConfigError

from .documents import byte_counter, pieces, read
from .sources import SourceFile, find_files
from .tokenise import OnProgress
from .tokenizer import END_TOKENS

END = END_TOKENS[0]
LEAST = 257  # one token for each byte and one for the end of a document
PART = 1 << 16  # the number of bytes of text that the library gets at a time


@dataclass(frozen=True)
class Trained:
    """This says where a trained tokenizer is, how many tokens it has, and from how much text it was made."""

    path: str
    vocabulary: int
    bytes: int
    documents: int


def train_tokenizer(
    sources: Sequence[str], out: str | Path, vocabulary: int, *, field: str = "text", progress: OnProgress | None = None
) -> Trained:
    """Make a tokenizer.json of ``vocabulary`` tokens from text, or of fewer if the text has no more pairs that repeat.

    The same text gives the same tokenizer. Its first token, "<|endoftext|>", ends documents. The file is written under
    another name and renamed. ConfigError for text that cannot be read, a vocabulary below 257, and a place that cannot
    be written.
    """
    if vocabulary < LEAST:
        raise ConfigError(f"--vocabulary {vocabulary}: legal: at least {LEAST}, for the {LEAST - 1} bytes and {END}")
    path = Path(out)
    if not path.parent.is_dir() or path.is_dir():  # known now, and not after all the text has been read
        reason = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError.on(f"--out {path}", reason, "a file in a folder that exists")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = find_files(sources)
    text = _Text(files, field, progress)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )  # fmt: skip
    tokenizer.train_from_iterator(text.parts(), trainer=trainer)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot write it: {error.strerror}; legal: a file in a folder that exists"
        ) from error
    return Trained(str(path), tokenizer.get_vocab_size(), text.bytes, text.documents)


class _Text:
    """This reads the text of files in parts and counts its bytes and documents."""

    def __init__(self, files: Sequence[SourceFile], field: str, progress: OnProgress | None) -> None:
        self.files, self.field, self.progress = files, field, progress
        self.bytes = self.documents = 0

    def parts(self) -> Iterator[str]:
        total, done = sum(file.size for file in self.files), 0
        size_of = byte_counter(self.files)
        for spans in pieces(self.files, ["00"] * len(self.files)):
            for fragment in read(spans, self.field):
                self.bytes += len(fragment.text)
                self.documents += fragment.last
                yield from _lines(fragment.text)
            done += size_of(spans)
            if self.progress is not None:
                self.progress(min(done, total), total)


def _lines(text: bytes) -> Iterator[str]:
    """Yield a text in parts of at least :data:`PART` bytes, each up to a line's end, or to the end of the text."""
    start = 0
    while start < len(text):
        stop = text.find(b"\n", start + PART) + 1 or len(text)
        yield text[start:stop].decode("utf-8", errors="replace")
        start = stop
