"""The rows of a file of texts, read by their numbers: lines of .txt, objects of .jsonl, rows of .parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError

SUFFIXES = (".txt", ".jsonl", ".parquet")
PIECE = 16 << 20  # bytes read at a time


class Texts:
    """The texts of a file, of which each row has one: ``len`` is their number.

    Lines of .jsonl that are blank are no rows; every line of .txt is one.  Raises :class:`ConfigError` for a file that
    cannot be read, or has no row.
    """

    def __init__(self, path: Path, field: str = "text") -> None:
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: legal: a file of {', '.join(SUFFIXES)}")
        self.path, self.field = path, field
        try:
            self._starts, self._number = self._rows()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; legal: a file of texts") from None
        if not self._number:
            raise ConfigError(f"{path}: has no row; legal: one text or more")

    def __len__(self) -> int:
        return self._number

    @property
    def digest(self) -> str:
        """A hash of the file and of the column that is read, in hex."""
        whole = hashlib.sha256(self.field.encode() if self.path.suffix != ".txt" else b"")
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                whole.update(piece)
        return whole.hexdigest()

    def _rows(self) -> tuple[NDArray[np.int64], int]:
        """Return the place in the file of each row and of its end, and the number of rows; of .parquet the rows before
        each row group."""
        if self.path.suffix == ".parquet":
            file = self._parquet()
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64), sum(sizes)
        ends, at = [np.zeros(1, np.int64)], 0
        with self.path.open("rb") as lines:
            while piece := lines.read(PIECE):
                found = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + at + 1
                ends.append(found.astype(np.int64))
                at += len(piece)
        starts = np.concatenate(ends)
        if starts[-1] != at:  # the last line does not end
            starts = np.append(starts, at)
        if self.path.suffix == ".jsonl":
            return self._without_blanks(starts)
        return starts, len(starts) - 1

    def _without_blanks(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Return starts of the lines that hold something; a row's end is looked for, as a blank line may follow it."""
        blank, first = [], np.memmap(self.path, np.uint8, "r")[starts[:-1]] if len(starts) > 1 else starts[:0]
        with self.path.open("rb") as file:
            for i in np.flatnonzero(first <= ord(" ")):
                file.seek(starts[i])
                if not file.read(int(starts[i + 1] - starts[i])).strip():
                    blank.append(i)
        places = np.delete(starts[:-1], blank)
        return np.append(places, starts[-1]), len(places)

    def read(self, start: int, stop: int) -> list[str]:
        """Return the texts of rows ``start`` to ``stop``."""
        if self.path.suffix == ".parquet":
            return self._of_groups(start, stop)
        with self.path.open("rb") as file:
            file.seek(int(self._starts[start]))
            data = file.read(int(self._starts[stop] - self._starts[start]))
        base = int(self._starts[start])
        cuts = [int(place) - base for place in self._starts[start : stop + 1]]
        lines = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        if self.path.suffix == ".txt":
            return [line.rstrip(b"\r\n").decode(errors="replace") for line in lines]
        return [self._object(line, start + i) for i, line in enumerate(lines)]

    def _object(self, line: bytes, row: int) -> str:
        try:
            found = json.loads(line.split(b"\n", 1)[0])
        except ValueError:
            raise ConfigError(f"{self.path}: row {row} is no JSON object; legal: an object in every line") from None
        return self._checked(found.get(self.field) if isinstance(found, dict) else None, row, found)

    def _checked(self, text: Any, row: int, columns: Sequence[str] | Any) -> str:
        if not isinstance(text, str):
            names = ", ".join(map(str, columns)) if isinstance(columns, dict | list | tuple) else "none"
            what = "no text" if text is None else f"an object of type {type(text).__name__}"
            raise ConfigError(f'{self.path}: row {row} has {what} in "{self.field}"; it has the columns {names}')
        # JSON may have half of a surrogate pair, which is no character and which no tokenizer takes.
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _of_groups(self, start: int, stop: int) -> list[str]:
        file, found = self._parquet(), list[str]()
        for group in range(file.num_row_groups):
            first, last = int(self._starts[group]), int(self._starts[group + 1])
            if first < stop and last > start:
                column = file.read_row_group(group, columns=[self.field]).column(0).to_pylist()
                names = file.schema_arrow.names
                found += [
                    self._checked(column[row - first], row, names) for row in range(max(first, start), min(last, stop))
                ]
        return found

    def _parquet(self) -> Any:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ConfigError(f"{self.path}: {error}; legal: pip install shardwise[data]") from None
        try:
            file = parquet.ParquetFile(self.path)
        except OSError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.path}: is no .parquet file: {error}") from None
        if self.field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ConfigError(f'{self.path}: has no column "{self.field}"; legal: --field with one of {names}')
        return file
