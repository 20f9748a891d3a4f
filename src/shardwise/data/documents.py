"""This module reads documents from files: it cuts the work into pieces, which depend on the files alone, and reads a
piece document by document."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from shardwise.core.errors import ConfigError, did_you_mean

from .sources import SourceFile, not_json

# The tokens of a long text depend on where it is cut: a change here, or of LONG in tokenizer.py, needs a new FORMAT in
# cache.py.
PIECE = 8 << 20  # the approximate number of bytes in a piece of work
SEARCH = 1 << 16  # the number of bytes in which a line's end is looked for, to cut a long text there
ROWS = 1024  # the number of rows of a parquet file or a dataset that are read at a time
CUT_BY_ROWS = ("parquet", "dataset")


@dataclass(frozen=True)
class Span:
    """A span is part of a file: ``start`` … ``stop`` - 1 count bytes of a text or of lines, row groups of a parquet
    file, or rows of a dataset.
    """

    path: str
    kind: str
    start: int
    stop: int
    digest: str = ""  # the SHA-256 of the whole file, if the file is one document


class Fragment(NamedTuple):
    """A fragment is the text of one document, or a part of it.

    ``digest`` is the SHA-256 of the whole document, or None if it has to be computed from ``text``, which is then the
    whole document; ``last`` says whether the document ends here; ``path`` is its file.
    """

    text: bytes
    digest: bytes | None = None
    last: bool = True
    path: str = ""


def pieces(files: Iterable[SourceFile], digests: Iterable[str]) -> Iterator[list[Span]]:
    """Yield pieces of work of about :data:`PIECE` bytes, in order: short files together, long ones in parts."""
    group: list[Span] = []
    held = 0
    for file, digest in zip(files, digests, strict=True):
        if file.kind == "text" and file.size <= PIECE:
            if held + file.size > PIECE and group:
                yield group
                group, held = [], 0
            group.append(Span(file.path, "text", 0, file.size, digest))
            held += file.size
            continue
        if group:
            yield group
            group, held = [], 0
        yield from ([span] for span in _spans(file, digest))
    if group:
        yield group


def byte_counter(files: Iterable[SourceFile]) -> Callable[[Sequence[Span]], int]:
    """Return a function that gives the number of bytes of a piece and is to be called once for each piece: a file that
    is cut by rows counts with its first piece."""
    whole = {file.path: file.size for file in files if file.kind in CUT_BY_ROWS}

    def size_of(spans: Sequence[Span]) -> int:
        return sum(whole.pop(span.path, 0) if span.kind in CUT_BY_ROWS else span.stop - span.start for span in spans)

    return size_of


def read(spans: Sequence[Span], field: str) -> Iterator[Fragment]:
    """Yield the documents of a piece; ``field`` is the column of text in rows.  Empty rows are left out.

    ConfigError, with the file and the line or row, for anything that is not a document.
    """
    readers = {"jsonl": _lines, "parquet": _parquet_rows, "dataset": _dataset_rows}
    for span in spans:
        try:
            if span.kind == "text":
                yield _text(span)
            else:
                yield from (Fragment(text, path=span.path) for text in readers[span.kind](span, field) if text)
        except OSError as error:
            raise ConfigError(f"data.source: cannot read {span.path}: {error.strerror or error}") from error


def _spans(file: SourceFile, digest: str) -> Iterator[Span]:
    if file.kind in ("text", "jsonl"):
        units, step = file.size, PIECE
    elif file.kind == "parquet":
        units, step = _parquet(file.path).num_row_groups, 1
    else:
        units = len(_dataset(file.path))
        step = max(ROWS, units * PIECE // max(1, file.size))
    for start in range(0, units, step):
        yield Span(file.path, file.kind, start, min(units, start + step), digest)


# --- text ---


def _text(span: Span) -> Fragment:
    size = os.path.getsize(span.path)
    with open(span.path, "rb") as file:
        start, stop = (_cut(file, place, size) for place in (span.start, span.stop))
        file.seek(start)
        return Fragment(file.read(stop - start), bytes.fromhex(span.digest), span.stop == size, span.path)


def _cut(file: BinaryIO, place: int, size: int) -> int:
    """Return where to cut a text near byte ``place``: after the next line's end, or between two characters of UTF-8."""
    if place in (0, size):
        return place
    file.seek(place)
    ahead = file.read(SEARCH)
    found = ahead.find(b"\n")
    if found >= 0:
        return min(size, place + found + 1)
    continued = next((index for index, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
    return min(size, place + continued)


# --- rows ---


def _lines(span: Span, field: str) -> Iterator[bytes]:
    """Yield the texts of the lines that begin inside the span."""
    with open(span.path, "rb") as file:
        if span.start:
            file.seek(span.start - 1)
            file.readline()  # a line that begins before the span belongs to the span before
        while (place := file.tell()) < span.stop:
            line = file.readline()
            if line.strip():
                yield _line(line, span.path, place, field)


def _line(line: bytes, path: str, place: int, field: str) -> bytes:
    try:
        row = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        raise ConfigError.on(f"data.source: {_at(path, place)}", not_json(error), "one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"data.source: {_at(path, place)}: {type(row).__name__}; legal: one JSON object a line")
    if field not in row:
        raise ConfigError(f"data.text_field: {_at(path, place)}: {_no_column(field, row)}")
    if not isinstance(row[field], str | None):
        raise ConfigError(
            f'data.source: {_at(path, place)}: "{field}" is of type {type(row[field]).__name__}; legal: text'
        )
    return (row[field] or "").encode(errors="replace")


def _at(path: str, place: int) -> str:
    """Return ``file:line`` of a byte."""
    with open(path, "rb") as file:
        ahead, line = place, 1
        while ahead:
            block = file.read(min(ahead, 1 << 20))
            ahead -= len(block)
            line += block.count(b"\n")
    return f"{path}:{line}"


def _no_column(field: str, columns: Iterable[Any]) -> str:
    names = [str(column) for column in columns]
    return f'no "{field}"; legal: one of {", ".join(names)}.{did_you_mean(field, names)}'


def _parquet(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _missing(path, "pyarrow", error) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"data.source: {path}: not a Parquet file: {error}") from error


def _parquet_rows(span: Span, field: str) -> Iterator[bytes]:
    import pyarrow

    table = _parquet(span.path)
    names = table.schema_arrow.names
    if field not in names:
        raise ConfigError(f"data.text_field: {span.path}: {_no_column(field, names)}")
    if names.count(field) > 1:
        wrong = f'{span.path}: {names.count(field)} columns are called "{field}"'
        raise ConfigError.on("data.text_field", wrong, "a name of one column")
    kind = table.schema_arrow.field(field).type
    if not any(test(kind) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string)):
        raise ConfigError(f'data.text_field: {span.path}: "{field}" is of type {kind}; legal: a column of text')
    try:
        # Arrow takes "a.b" for the field b of a column a too and then reads both, so the exact name selects the column.
        for batch in table.iter_batches(ROWS, row_groups=list(range(span.start, span.stop)), columns=[field]):
            yield from ((text or "").encode() for text in batch.column(field).to_pylist())
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise ConfigError(f"data.source: cannot read {span.path}: {error}") from error


def _dataset(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise _missing(path, "datasets", error) from error
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise ConfigError(f"data.source: {path}: not a folder of a Hugging Face dataset: {error}") from error


def _dataset_rows(span: Span, field: str) -> Iterator[bytes]:
    rows = _dataset(span.path)
    if field not in rows.column_names:
        raise ConfigError(f"data.text_field: {span.path}: {_no_column(field, rows.column_names)}")
    # The dataset's saved format may leave the column out, or decode others, which needs libraries and sound files.
    rows = rows.with_format(None).select_columns([field])
    for start in range(span.start, span.stop, ROWS):
        try:
            texts = rows[start : min(span.stop, start + ROWS)][field]
        except Exception as error:  # the library raises many kinds, because it decodes images, audio and others here
            wrong = f'{span.path}: cannot read "{field}", rows {start} and on: {type(error).__name__}: {error}'
            raise ConfigError.on("data.text_field", wrong, "a column of text") from error
        for row, text in enumerate(texts, start):
            if not isinstance(text, str | None):
                raise ConfigError(
                    f'data.source: {span.path}, row {row}: "{field}" is of type {type(text).__name__}; legal: text'
                )
            yield (text or "").encode(errors="replace")


def _missing(path: str, library: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"data.source: {path} takes the library {library}, which cannot be imported ({error}); legal: pip install "
        "shardwise[data]"
    )
