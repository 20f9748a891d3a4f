"""Checkpoints are saved while training goes on.

``save`` copies this rank's pieces aside and returns; a thread writes them.  All ranks take the same steps:

1. Rank 0 makes the folder.  A *gather* says whether every rank is ready and whether there is room on the disk.
2. Each rank writes its file, hashes it on the way, and waits until it is on the disk.  A *gather* to rank 0 says what
   each has written.
3. Rank 0 checks that the boxes of all ranks tile every tensor, writes the manifest, and renames the folder.  A *gather*
   says how it ended.

If any rank fails before the renaming, no rank has a checkpoint: the folder is removed, and earlier ones stay.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError, check_count, describe

from . import folder as folders
from .atoms import Gather, Piece, alone
from .commit import End, RankRecord, ReadyCheckpoint, commit, refusal
from .container import Entry, HashedFile, header, lay_out
from .manifest import plain_meta
from .staging import LEAST_BYTES, Staging, Stream, runs_of


@dataclass(frozen=True)
class Saved:
    """The end of a save: ``path`` is the checkpoint, or ``error`` says why there is none.

    ``stall_seconds`` are those for which ``save`` held up training, and ``seconds`` last from its call to the end on
    all ranks; ``nbytes`` is what all ranks wrote.
    """

    step: int
    path: Path | None
    error: str | None
    stall_seconds: float
    seconds: float
    nbytes: int


@dataclass
class _Job:
    """One save, filled by the caller's thread and written by another."""

    step: int
    begin: float
    meta: Mapping[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    stream: Stream = field(default_factory=lambda: Stream((), ()))
    problem: str | None = None
    nbytes: int = 0
    stall: float = 0.0
    filled: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """Writes the checkpoints of one rank of a run.

    Args:
        folder: the folder of the run's checkpoints, the same for all ranks; it is made where it is missing.
        rank, ranks: the rank of this process, and how many there are.
        gather: brings every rank's bytes to all or to rank 0, on a process group of its own: it is called from the
            writer's thread.  It has to raise where a rank is gone.
        staging_bytes: the most bytes of staging memory; None for as much as this rank's pieces have.  A smaller bound
            makes ``save`` wait for the disk.
        keep_last: the number of newest checkpoints that are kept.
        keep_every: checkpoints of steps that are multiples of it are kept as well.
        warn: is told, on rank 0, what went wrong, by the thread that calls ``save``, ``poll``, ``wait`` or ``close``.

    A process that exits without ``close`` abandons a save under way.  A new writer on rank 0 removes what killed runs
    left behind; two runs must not share a folder at the same time.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        gather: Gather = alone,
        *,
        staging_bytes: int | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        warn: Callable[[str], None],
    ) -> None:
        check_count("checkpoint.keep_last", keep_last)
        if keep_every is not None:
            check_count("checkpoint.keep_every", keep_every)
        if staging_bytes is not None:
            check_count("checkpoint.staging_bytes", staging_bytes, LEAST_BYTES)
        self.folder, self.rank, self.ranks = Path(folder), rank, ranks
        self.keep_last, self.keep_every = keep_last, keep_every
        self.chosen: frozenset[int] = frozenset()  # steps whose checkpoints are kept as well
        self._gather, self._warn = gather, warn
        self._staging = Staging(staging_bytes)
        self._thread: threading.Thread | None = None
        self._done: list[Saved] = []
        self._notes: list[str] = []
        self._lock = threading.Lock()
        self._closed = False
        if rank == 0 and self.folder.is_dir():
            try:
                folders.remove_leftovers(self.folder)
            except OSError as error:
                warn(f"{self.folder}: cannot remove what an earlier run left half written: {error}")

    def ceiling(self, pieces: Iterable[Piece]) -> int:
        """Return the most bytes of staging memory that saving ``pieces`` takes on this rank; headers and lists of
        pieces come on top."""
        return self._staging.needed(sum(piece.nbytes for piece in pieces))

    @property
    def staged_bytes(self) -> int:
        """The number of bytes of staging memory that are allocated now."""
        return self._staging.nbytes

    def prepare(self, pieces: Iterable[Piece]) -> int:
        """Allocate the staging memory now, so that the first save need not, and return its bytes."""
        self.wait()
        listed = list(pieces)
        self._staging.prepare(
            sum(piece.nbytes for piece in listed), any(Backend.of(piece.tensor.device).pins for piece in listed)
        )
        return self._staging.nbytes

    def save(self, step: int, pieces: Iterable[Piece], meta: Mapping[str, Any]) -> None:
        """Copy the values of ``pieces`` aside and begin to write them; afterwards the values may change.

        All ranks call it for the same steps; each element of a tensor is in one rank's pieces, and at least one rank
        gives those without elements.  ``meta`` is a JSON object; rank 0's is kept.  A save under way is waited for
        first.  ``poll`` and ``warn`` tell what goes wrong, here or later, so that all ranks agree on how it ended.
        """
        if self._closed:
            raise ShardwiseError("save after close: this checkpoint writer has been closed")
        job = _Job(step, time.perf_counter())
        self.wait()
        try:
            self._plan(job, pieces, meta)
        except Exception as error:
            job.problem = _words(error)
        # The writing thread would take a core and memory bandwidth from the copying one, so it starts first only where
        # it must.
        streaming = job.nbytes > self._staging.nbytes
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{self.rank}", daemon=True)
        if streaming:
            self._thread.start()
        try:
            job.stream.fill()
        except BaseException as error:
            job.problem = _words(error)
            if not isinstance(error, Exception):
                raise
        finally:
            job.stall = time.perf_counter() - job.begin
            job.filled.set()
            if not streaming:
                self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether a save has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> list[Saved]:
        """Return the saves that have ended since the last call."""
        self._tell()
        with self._lock:
            done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Wait until no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._tell()

    def close(self) -> None:
        """Wait for the save under way, free the staging memory, and refuse later saves."""
        self._closed = True
        self.wait()
        self._staging = Staging(self._staging.bound)

    def _tell(self) -> None:
        with self._lock:
            notes, self._notes = self._notes, []
        for note in notes:
            self._warn(note)

    def _plan(self, job: _Job, pieces: Iterable[Piece], meta: Mapping[str, Any]) -> None:
        """Check what is to be saved, and lay out this rank's file."""
        check_count("step", job.step, 0)
        if job.step >= 10**18:
            raise ShardwiseError(f"step: {job.step} is not legal; legal: at most 18 digits")
        job.meta = plain_meta(meta)
        listed = list(pieces)
        for piece in listed:
            piece.check()
        ordered = sorted(listed, key=lambda piece: -piece.tensor.dtype.itemsize)  # so that each is aligned
        filled = [piece for piece in ordered if piece.nbytes]
        entries = lay_out([(_key(number, one), one.box.shape, one.tensor.dtype) for number, one in enumerate(filled)])
        header(entries, {})  # raises for dtypes that the format lacks
        nbytes = entries[-1].stop if entries else 0
        self._staging.prepare(nbytes, any(Backend.of(piece.tensor.device).pins for piece in filled))
        job.stream = Stream(runs_of(filled), self._staging.blocks(nbytes))
        empty = [piece for piece in ordered if not piece.nbytes]
        job.pieces, job.entries, job.nbytes = [*filled, *empty], entries, nbytes

    def _run(self, job: _Job) -> None:
        """Run in the writer's thread, from staged values to a checkpoint or an error."""
        saved = Saved(job.step, None, None, 0.0, 0.0, 0)
        try:
            saved = self._write(job, saved)
        except BaseException as error:
            saved = replace(saved, error=f"rank {self.rank}: {_words(error)}")
            if self.rank == 0:
                shutil.rmtree(folders.part_folder(self.folder, job.step), ignore_errors=True)
        finally:
            job.stream.give_up()
            job.filled.wait()
            saved = replace(saved, stall_seconds=job.stall, seconds=time.perf_counter() - job.begin)
            with self._lock:
                self._done.append(saved)
                if saved.error and self.rank == 0:
                    last = folders.latest(self.folder)
                    kept = f"the last good one is {last}" if last else "there is none yet"
                    self._notes.append(f"the checkpoint of step {job.step} was not saved: {saved.error}; {kept}")

    def _write(self, job: _Job, saved: Saved) -> Saved:
        part = folders.part_folder(self.folder, job.step)
        ready = self._ready(job, part)
        everyone = [ReadyCheckpoint.from_bytes(data) for data in self._gathered(ready.to_bytes())]
        error, path = refusal(everyone), None
        if error is None:
            record = self._write_file(job, part)
            written = self._gathered(record.to_bytes(), everywhere=False)  # large: it lists every piece
            end = End(None, None, 0)
            if self.rank == 0:
                end = self._commit(job, part, [RankRecord.from_bytes(data) for data in written])
            end = End.from_bytes(self._gathered(end.to_bytes())[0])
            error, path = end.error, None if end.path is None else Path(end.path)
            saved = replace(saved, nbytes=end.nbytes)
        if error is not None and self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        return replace(saved, error=error, path=path)

    def _gathered(self, data: bytes, everywhere: bool = True) -> list[bytes]:
        found = self._gather(data, everywhere)
        if len(found) != self.ranks and (everywhere or self.rank == 0):
            raise ShardwiseError(f"the gather of a checkpoint brought {len(found)} answers from {self.ranks} ranks")
        return found

    def _ready(self, job: _Job, part: Path) -> ReadyCheckpoint:
        """Make the folder, on rank 0, and return whether this rank can write."""
        free = 0
        error = job.problem
        try:
            if self.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                folders.remove_tree(part)
                part.mkdir()
            free = shutil.disk_usage(_existing(self.folder)).free
        except OSError as failed:
            error = error or _words(failed)
        return ReadyCheckpoint(job.step, job.nbytes, free, error)

    def _write_file(self, job: _Job, part: Path) -> RankRecord:
        """Write this rank's pieces and return its record, which also tells of a failure."""
        name = folders.rank_file(self.rank)
        if not job.entries:
            return RankRecord.of(job.pieces, [], None, 0, "", job.problem)
        try:
            with HashedFile(part / name) as file:
                head = header(job.entries, {"format": "pt", "step": str(job.step), "rank": str(self.rank)})
                file.write(head)
                while (chunk := job.stream.take()) is not None:
                    file.write(chunk)
                whole = file.nbytes == len(head) + job.nbytes
                file.sync()
            error = job.problem or (None if whole else "the values were not staged to the end")
            return RankRecord.of(job.pieces, job.entries, name, file.nbytes, file.sha256, error)
        except Exception as failed:
            return RankRecord.of([], [], name, 0, "", f"{part / name}: {_words(failed)}")
        finally:
            job.stream.give_up()

    def _commit(self, job: _Job, part: Path, records: list[RankRecord]) -> End:
        """Complete the checkpoint, on rank 0, and then remove those that need not be kept."""
        nbytes = sum(one.nbytes for one in records)
        try:
            path = commit(self.folder, part, job.step, job.meta, records)
        except Exception as error:
            return End(None, str(error) if isinstance(error, ShardwiseError) else f"rank 0: {_words(error)}", nbytes)
        try:
            folders.remove(folders.superseded(self.folder, path, self.keep_last, self.keep_every, self.chosen))
        except OSError as error:
            with self._lock:
                self._notes.append(f"{self.folder}: cannot remove old checkpoints: {error}")
        return End(str(path), None, nbytes)


def _key(number: int, piece: Piece) -> str:
    """Return the key of a piece in its file: the tensor's name after a number that makes it unique."""
    return f"{number:06d}/{piece.name}"


def _existing(path: Path) -> Path:
    """Return the nearest existing folder: ``path`` or one of its parents."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def _words(error: BaseException) -> str:
    """Return an error in words; for an OSError these are its file and reason."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, ShardwiseError) else describe(error)
