"""An encoding on the disk: what is to be done, which chunks of rows are done, and their vectors.

Rows are divided into chunks, whose size does not depend on the number of ranks, and each chunk is computed by itself.
So what a chunk's vectors are does not depend on who computes it, nor on what was done before the process was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.report.files import write_whole

OUTPUTS = (".npy", ".parquet")
BATCHES = 16  # in a chunk: enough for texts of like lengths to find each other
JOB, DONE, BEGUN, VECTORS = "job.json", "done", "begun", "vectors.npy"
GROUP = 1 << 14  # rows of a row group of .parquet


@dataclass(frozen=True)
class Job:
    """What is encoded, by what, and how.  Everything here but ``threads`` decides what comes out."""

    source: str
    field: str
    model: str  # a folder, or a function as "path/to/file.py:function"
    rows: int
    digest: str  # of the source and of the model's files
    pooling: str
    normalize: bool
    length: int
    batch_size: int
    precision: str
    threads: int = 1

    @property
    def chunk(self) -> int:
        """The number of rows of a chunk."""
        return BATCHES * self.batch_size

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.rows // self.chunk)

    def rows_of(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk, and the one after its last."""
        return chunk * self.chunk, min(self.rows, (chunk + 1) * self.chunk)

    def same(self, other: Job) -> list[str]:
        """Return the names of what is different in ``other`` and decides what comes out."""
        mine, theirs = asdict(self), asdict(other)
        return [name for name in mine if name != "threads" and mine[name] != theirs[name]]


class Work:
    """The folder of an encoding that is under way; its files tell how far it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.job = Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: cannot be read: {error}; legal: to delete it, and begin anew") from None

    @staticmethod
    def begin(out: Path, job: Job) -> Work:
        """Return the work towards ``out``: a new one, or the one that an earlier process has left behind.

        Raises :class:`ConfigError` where that was another one."""
        folder = part_of(out)
        if (folder / JOB).exists():
            work = Work(folder)
            different = work.job.same(job)
            if different and work.done().any():
                mine, theirs = asdict(job), asdict(work.job)
                words = "; ".join(f"{name}: {theirs[name]} then, {mine[name]} now" for name in different)
                wrong = f"an unfinished encoding of something else ({words})"
                raise ConfigError.on(str(folder), wrong, "to delete it, or another --out")
            if different:  # nothing is lost, for it failed or was stopped before its first chunk
                for name in (JOB, VECTORS):
                    (folder / name).unlink(missing_ok=True)
        if not (folder / JOB).exists() or not (folder / VECTORS).exists():
            (folder / DONE).write_bytes(bytes(job.chunks))
        write_whole(folder / JOB, json.dumps(asdict(job), indent=2) + "\n")
        work = Work(folder)
        work.done().tofile(folder / BEGUN)
        return work

    def done(self) -> NDArray[np.uint8]:
        """Return 1 for each chunk that is done, else 0."""
        return np.fromfile(self.folder / DONE, np.uint8)

    def pending(self, rank: int, ranks: int) -> Iterator[int]:
        """Yield the chunks that a rank has to do, of those that were not done before any rank started: what is done by
        the time this rank starts would share them out otherwise."""
        begun = np.fromfile(self.folder / BEGUN, np.uint8)
        yield from np.flatnonzero(begun == 0)[rank::ranks].tolist()

    def write(self, chunk: int, vectors: NDArray[np.float32]) -> None:
        """Keep the vectors of a chunk, (rows, width), and then note that it is done."""
        start, stop = self.job.rows_of(chunk)
        if vectors.ndim != 2 or len(vectors) != stop - start or not vectors.shape[1]:
            wrong = f"gave {vectors.shape} for {stop - start} texts"
            raise ConfigError.on(self.job.model, wrong, "one vector for each text, all as long: (texts, width)")
        file = self._open(vectors.shape[1])
        if file.shape[1] != vectors.shape[1]:
            wrong = f"gave vectors of {vectors.shape[1]} numbers, after {file.shape[1]}"
            raise ConfigError.on(self.job.model, wrong, "vectors of one length")
        file[start:stop] = vectors
        file.flush()
        with (self.folder / DONE).open("r+b") as marks:
            marks.seek(chunk)
            marks.write(b"\1")
            marks.flush()
            os.fsync(marks.fileno())

    def _open(self, width: int) -> Any:
        """Return the file of vectors as an array; the first rank that needs it makes it."""
        path = self.folder / VECTORS
        if not path.exists():
            own = self.folder / f".{os.getpid()}.npy"
            np.lib.format.open_memmap(own, "w+", np.float32, (self.job.rows, width)).flush()
            try:
                os.link(own, path)  # fails where another rank was faster
            except FileExistsError:
                pass
            finally:
                own.unlink()
        return np.lib.format.open_memmap(path, "r+")

    def finish(self, out: Path) -> tuple[int, int]:
        """Move the vectors to ``out``, and return their shape; every chunk is done."""
        if left := int((self.done() == 0).sum()):
            raise ShardwiseError(
                f"{self.folder}: {left} of {self.job.chunks} chunks are not done; the same command goes on"
            )
        vectors = np.load(self.folder / VECTORS, mmap_mode="r")
        shape = (int(vectors.shape[0]), int(vectors.shape[1]))
        if out.suffix == ".parquet":
            made = self.folder / "vectors.parquet"
            _write_parquet(vectors, made)
            del vectors
            os.replace(made, out)
        else:
            del vectors
            os.replace(self.folder / VECTORS, out)
        shutil.rmtree(self.folder)
        return shape


def part_of(out: Path) -> Path:
    """Return the folder of the work towards ``out``."""
    return out.with_name(f".{out.name}.part")


def _write_parquet(vectors: NDArray[np.float32], path: Path) -> None:
    """Write the columns ``row`` (int64) and ``embedding`` (fixed-size lists of float32)."""
    import pyarrow
    import pyarrow.parquet as parquet

    width = vectors.shape[1]
    schema = pyarrow.schema([("row", pyarrow.int64()), ("embedding", pyarrow.list_(pyarrow.float32(), width))])
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, len(vectors), GROUP):
            part = np.ascontiguousarray(vectors[start : start + GROUP])
            flat = pyarrow.array(part.reshape(-1), pyarrow.float32())
            columns = [
                pyarrow.array(np.arange(start, start + len(part))),
                pyarrow.FixedSizeListArray.from_arrays(flat, width),
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
