"""This module makes a dataset of tokens: a sample is a window of them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError

from .tokenizer import Tokens

IGNORED = -100  # the label of a position that has no target
RELEASE_ROWS = 1024  # After this many rows, which may map 16 pages each, pages are unmapped (see _release).

DocumentFields = Literal["none", "documents", "mask"]
"""This says which fields tell a model where documents end: none; ``documents`` for models of shardwise and the user; or
``attention_mask`` and ``position_ids``."""


def document_fields(documents: NDArray[np.int64], fields: DocumentFields) -> dict[str, NDArray[Any]]:
    """Return what tells a model where documents end, from the number of each token's document (rows, length): the
    fields that :class:`PackedWindows` describes."""
    if fields == "documents":
        return {"documents": documents}
    places = np.arange(documents.shape[1])
    begins = np.zeros_like(documents)
    begins[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    positions = places - np.maximum.accumulate(begins, axis=1)
    mask = (documents[:, :, None] == documents[:, None, :]) & (places[:, None] >= places)
    return {"attention_mask": mask[:, None], "position_ids": positions}


class PackedWindows:
    """This dataset has consecutive windows of ``length`` tokens over N tokens, that is (N - 1) // length samples.

    A sample is ``{"input_ids": (length,), "labels": (length,)}``, int64. The label of a token is the next token; with
    ``shifted=False`` it is the token itself, because models of transformers shift labels themselves.

    With ``fields`` other than ``"none"`` attention stays inside documents, each of which ends with the token ``end``.
    Then a label in another document than its token is -100, and a sample also has

    - for ``"documents"``: ``documents`` (length,) int64, the number in the window, from 0, of each token's document;
    - for ``"mask"``: ``attention_mask`` (1, length, length) bool, true where a query (row) may look at a key, and
      ``position_ids`` (length,) int64, which start from 0 in each document.

    ``mapped`` is the mapping that the tokens are read from, if there is one. Errors call the text ``name``, and
    ``digest`` identifies the tokens. ConfigError for too few tokens.
    """

    def __init__(
        self, tokens: Tokens, length: int, *, name: str = "text", shifted: bool = True, end: int = 0,
        fields: DocumentFields = "none", mapped: mmap.mmap | None = None, digest: str = "",
    ) -> None:  # fmt: skip
        if len(tokens) <= length:
            raise ConfigError(
                f"data.source: {name} has {len(tokens)} tokens, too few for one sample of "
                f"data.sequence_length = {length} (it takes {length + 1})"
            )
        self.tokens, self.length, self.shifted, self.end, self.fields = tokens, length, shifted, end, fields
        self.digest = f"{digest}/{length}/{fields}/{int(shifted)}"
        self._mapped, self._read = mapped, 0

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: value[0] for name, value in self.read_rows([index]).items()}

    def read_rows(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the samples at ``indices`` as fields of shape (rows, *shape)."""
        windows = np.empty((len(indices), self.length + 1), self.tokens.dtype)
        for row, index in enumerate(indices):
            start = int(index) * self.length
            windows[row] = self.tokens[start : start + self.length + 1]
        self._release(len(indices))
        ids = windows[:, :-1].astype(np.int64)
        labels = (windows[:, 1:] if self.shifted else windows[:, :-1]).astype(np.int64)
        fields = {"input_ids": ids, "labels": labels}
        if self.fields != "none":
            fields |= self._documents(ids, labels)
        return {name: torch.from_numpy(value) for name, value in fields.items()}

    def _documents(self, ids: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the fields about documents; labels in another document than their token are set to -100 in place."""
        ends = ids == self.end
        if self.shifted:
            labels[ends] = IGNORED  # the next token begins another document
        else:
            labels[:, 1:][ends[:, :-1]] = IGNORED
        documents = np.zeros_like(ids)
        np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
        return document_fields(documents, self.fields)

    def _release(self, rows: int) -> None:
        """Now and then unmap the pages read so far: they stay in the system's cache, but no longer count as memory of
        this process."""
        self._read += rows
        if self._mapped is not None and self._read >= RELEASE_ROWS and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)
            self._read = 0
