"""Supervised fine-tuning: datasets of prompts with answers, packed into rows, of which only the answers are learnt.

The tokens of all examples are kept in a folder of ``data.cache_dir``, whose name is a hash of all that they depend on,
as those of text are (`cache.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError

from .cache import default_cache_dir, locked, sync_names
from .chat import ChatTemplate, Tokenised, open_template
from .examples import KEY, example_files, read_examples
from .packing import pack
from .tokenise import OnProgress
from .tokenizer import Tokenizer, open_tokenizer
from .windows import IGNORED, DocumentFields, document_fields
from .worker import SIDES, side

FORMAT = 1  # the version of the folder's format and of the way from conversations to tokens


@dataclass(frozen=True)
class ExampleTokens:
    """The tokens of examples one after the other: ``ids`` and ``answers`` (tokens,), and where each begins, ``starts``
    (examples + 1,)."""

    ids: NDArray[np.uint32]
    answers: NDArray[np.bool_]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Conversations:
    """The examples of ``data.sft``: those to train on, and those set apart for validation, which a hash of their
    content chooses. ``digest`` identifies them, and ``prompt`` is what asks for the first answer."""

    name: str
    tokenizer: Tokenizer
    fraction: float
    digest: str
    sides: tuple[ExampleTokens, ExampleTokens]

    def train(self, length: int, *, shifted: bool, fields: DocumentFields) -> PackedExamples:
        """Return the rows to train on; :class:`ConfigError` if there are none."""
        train, apart = self.sides
        if not len(train) and not len(apart):
            raise ConfigError.on(KEY, f"{self.name} is empty", "one example or more")
        if not len(train):
            wrong = f"all {len(apart)} examples of {self.name} are set apart"
            raise ConfigError.on(f"validation.share = {self.fraction:g}", wrong, "a smaller fraction, such as 0")
        return self._packed(0, length, shifted, fields)

    def validation(self, length: int, *, shifted: bool, fields: DocumentFields) -> PackedExamples | None:
        """Return the rows to validate on, or None if no example is set apart."""
        return self._packed(1, length, shifted, fields) if len(self.sides[1]) else None

    def _packed(self, at: int, length: int, shifted: bool, fields: DocumentFields) -> PackedExamples:
        return PackedExamples(
            self.sides[at], length, name=self.name, shifted=shifted, fields=fields, end=self.tokenizer.end,
            digest=f"{self.digest}/{SIDES[at]}",
        )  # fmt: skip

    @property
    def prompt(self) -> list[int]:
        """The tokens of an example up to its first answer."""
        examples = self.sides[0] if len(self.sides[0]) else self.sides[1]
        first = int(np.argmax(examples.answers[: examples.starts[1]]))
        return [int(token) for token in examples.ids[:first]]


class PackedExamples:
    """This dataset has rows of ``length`` tokens, in each of which lie several whole examples.

    A sample has ``input_ids`` and ``labels`` (length,), int64, and the fields of :class:`PackedWindows` about
    documents, which are the examples here. The label of a token that is not followed by a token of an answer is -100
    (with ``shifted=False``: of one that is no part of an answer). What is left of a row is filled with the token
    ``end``, and is a document of its own. An example of more than ``length`` tokens is cut there, and left out if that
    leaves no answer: ``cut`` and ``left_out`` count these. :class:`ConfigError` if no example is left.
    """

    def __init__(
        self, examples: ExampleTokens, length: int, *, name: str, shifted: bool, fields: DocumentFields, end: int,
        digest: str,
    ) -> None:  # fmt: skip
        lengths = np.minimum(np.diff(examples.starts), length)
        learnt = np.concatenate([[0], np.cumsum(examples.answers)])
        first = examples.starts[:-1]
        # The first token of an example follows nothing, so it is no target.
        kept = np.flatnonzero(learnt[first + lengths] > learnt[first + np.minimum(lengths, 1)])
        if not len(kept):
            wrong = f"no answer of {name} begins within the first {length} tokens of its example"
            raise ConfigError.on(f"data.sequence_length = {length}", wrong, "a greater length")
        self.examples, self.length, self.shifted, self.fields, self.end = examples, length, shifted, fields, end
        self.cut, self.left_out = int((np.diff(examples.starts)[kept] > length).sum()), len(examples) - len(kept)
        order, self._rows = pack(lengths[kept], length)
        self._order, self._lengths = kept[order], lengths
        self.digest = f"{digest}/{length}/{fields}/{int(shifted)}"

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: value[0] for name, value in self.read_rows([index]).items()}

    def read_rows(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the samples at ``indices`` as fields of shape (rows, *shape)."""
        shape = (len(indices), self.length)
        ids, targets = np.full(shape, self.end, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            place = 0
            own = self._order[self._rows[index] : self._rows[index + 1]]
            for number, example in enumerate(own.tolist()):
                start, count = int(self.examples.starts[example]), int(self._lengths[example])
                tokens = self.examples.ids[start : start + count].astype(np.int64)
                learnt = self.examples.answers[start : start + count].copy()
                learnt[0] = False
                span = slice(place, place + count)
                ids[row, span], documents[row, span] = tokens, number
                targets[row, span] = np.where(learnt, tokens, IGNORED)
                place += count
            documents[row, place:] = len(own)
        labels = targets
        if self.shifted:
            labels = np.full(shape, IGNORED, np.int64)
            labels[:, :-1] = targets[:, 1:]
        fields: dict[str, NDArray[Any]] = {"input_ids": ids, "labels": labels}
        if self.fields != "none":
            fields |= document_fields(documents, self.fields)
        return {name: torch.from_numpy(value) for name, value in fields.items()}


def open_conversations(
    sources: str | Sequence[str],
    *,
    tokenizer: str,
    end_token: str | None = None,
    validation: float = 0.0,
    cache_dir: str | None = None,
    progress: OnProgress | None = None,
) -> Conversations:
    """Return the tokens of examples, which are made if they are not in the cache; ``progress`` is called with (bytes
    done, bytes in all) while they are.

    :class:`ConfigError`, with the file and the line, for what is no example and what the chat template refuses.
    """
    opened = open_tokenizer(tokenizer, end_token)
    template, files = open_template(tokenizer, opened), example_files(sources)
    parts = [
        FORMAT,
        opened.digest,
        opened.end,
        opened.begin,
        template.digest,
        validation,
        [_hash(file) for file in files],
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    root = Path(cache_dir or default_cache_dir())
    folder = root / f"{key}.sft"
    try:
        with locked(root, key):
            if not folder.is_dir():
                _make(files, template, validation, folder, progress)
        sides = tuple(_load(folder / name) for name in SIDES)
    except OSError as error:
        wrong = f"cannot keep tokens there: {error.strerror}: {error.filename}"
        raise ConfigError.on(f"data.cache_dir = {root}", wrong, "a folder that can be written") from error
    name = sources if isinstance(sources, str) else ", ".join(sources)
    return Conversations(name, opened, validation, key, (sides[0], sides[1]))


def _hash(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{KEY}: cannot read {file}: {error.strerror}") from error


def _make(
    files: Sequence[Path], template: ChatTemplate, validation: float, folder: Path, progress: OnProgress | None
) -> None:
    """Write the tokens of all examples under another name, and rename their folder when it is complete."""
    total, done = sum(file.stat().st_size for file in files), 0
    sides: tuple[list[Tokenised], list[Tokenised]] = ([], [])
    for file in files:
        for example in read_examples(file):
            try:
                found = template.examples(example.messages)
            except ValueError as error:
                raise ConfigError(f"{KEY}: {example.place}: {error}") from error
            content = json.dumps(example.messages, sort_keys=True).encode(errors="replace")
            sides[side(hashlib.sha256(content).digest(), validation)].extend(found)
            done += example.nbytes
            if progress is not None:
                progress(done, total)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # a process that died may have left it
    part.mkdir(parents=True)
    for name, examples in zip(SIDES, sides, strict=True):
        _save(part / name, examples)
    part.rename(folder)
    sync_names(folder.parent)


def _save(stem: Path, examples: Sequence[Tokenised]) -> None:
    starts = np.cumsum([0, *(len(one.ids) for one in examples)], dtype=np.int64)
    ids = np.fromiter((token for one in examples for token in one.ids), np.uint32, int(starts[-1]))
    answers = np.fromiter((flag for one in examples for flag in one.answers), np.bool_, int(starts[-1]))
    for kind, array in (("ids", ids), ("answers", answers), ("starts", starts)):
        np.save(f"{stem}.{kind}.npy", array)


def _load(stem: Path) -> ExampleTokens:
    ids, answers = (np.load(f"{stem}.{kind}.npy", mmap_mode="r") for kind in ("ids", "answers"))
    return ExampleTokens(ids, answers, np.load(f"{stem}.starts.npy"))
