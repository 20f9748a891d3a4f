"""This module tokenises a corpus, with a process for each core, into a file of tokens for each side of the split."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.core.errors import ConfigError, ShardwiseError

from .documents import Span
from .tokenizer import BYTES, open_tokenizer
from .worker import SIDES, Done, Job, tokenise

OnProgress = Callable[[int, int], None]
"""This callback is called with (bytes of text done, bytes of all the text)."""

IN_FLIGHT = 2  # the number of pieces for each worker that are begun or wait for their turn
# For less text, in bytes, starting processes takes longer than the work; True: bytes are tokens, False: tokenizer.json.
SMALL = {True: 256 << 20, False: 4 << 20}


@dataclass(frozen=True)
class SplitSide:
    """This says of one file of tokens how many documents and tokens it has, and its SHA-256."""

    documents: int
    tokens: int
    sha256: str


def default_workers(size: int, tokenizer: str) -> int:
    """Return how many processes tokenise ``size`` bytes of text: 1, which is this process itself, for little text."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return 1 if size < SMALL[tokenizer == BYTES] else cores


def tokenise_all(
    pieces: Iterable[list[Span]],
    template: Job,
    folder: Path,
    workers: int,
    on_piece: Callable[[list[Span]], None] | None = None,
) -> tuple[SplitSide, SplitSide]:
    """Write ``train.bin`` and ``validation.bin`` into ``folder``, the same for any number of workers.

    ``template`` is a job whose spans and place are ignored. Files of pieces that wait for their turn are in ``folder``
    too, a few for each worker. ConfigError for text that cannot be read; OSError for a folder that cannot be written;
    ShardwiseError if a worker dies.
    """
    with _Joined(folder) as joined, _workers(workers) as submit:
        waiting: deque[tuple[list[Span], Path, Future[Done]]] = deque()

        def take() -> None:
            spans, part, future = waiting.popleft()
            joined.append(part, future.result())
            if on_piece is not None:
                on_piece(spans)

        for number, spans in enumerate(pieces):
            part = folder / f"part-{number}"
            waiting.append((spans, part, submit(replace(template, spans=tuple(spans), out=str(part)))))
            if len(waiting) >= IN_FLIGHT * workers:
                take()
        while waiting:
            take()
        return joined.finish()


class _Joined:
    """This appends the tokens of pieces, one after the other, to two files."""

    def __init__(self, folder: Path) -> None:
        self.files = [(folder / f"{name}.bin").open("wb") for name in SIDES]
        self.digests = [hashlib.sha256() for _ in SIDES]
        self.documents, self.tokens = [0, 0], [0, 0]

    def append(self, part: Path, done: Done) -> None:
        for index, name in enumerate(SIDES):
            path = part.with_name(f"{part.name}.{name}")
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    self.digests[index].update(block)
                    self.files[index].write(block)
            path.unlink()
            self.documents[index] += done.documents[index]
            self.tokens[index] += done.tokens[index]

    def finish(self) -> tuple[SplitSide, SplitSide]:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        train, validation = (
            SplitSide(self.documents[i], self.tokens[i], self.digests[i].hexdigest()) for i in range(2)
        )
        return train, validation

    def __enter__(self) -> _Joined:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()


@contextmanager
def _workers(count: int) -> Iterator[Callable[[Job], Future[Done]]]:
    """Give a function that does jobs: in this process, at once, for one worker, else in ``count`` other processes."""
    if count > 1:
        with _Processes(count) as processes:
            yield processes.submit
        return
    opened = functools.cache(open_tokenizer)

    def submit(job: Job) -> Future[Done]:
        done: Future[Done] = Future()
        done.set_result(tokenise(job, opened(job.tokenizer, job.end_token)))
        return done

    yield submit


class _Processes:
    """Workers are other processes, with a thread for each in this one.

    They are started afresh, neither forked (this process may have threads) nor through `multiprocessing` (whose
    children run the user's script again).
    """

    def __init__(self, count: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "shardwise.data.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=environment, encoding="utf-8",
            )
            for _ in range(count)
        ]  # fmt: skip
        self._free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="shardwise-tokenise")
        self._ended = threading.Event()

    def submit(self, job: Job) -> Future[Done]:
        return self._pool.submit(self._do, job)

    def _do(self, job: Job) -> Done:
        process = self._free.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            self._free.put(process)
        if not answer:
            code = "stopped" if self._ended.is_set() else f"ended with exit code {process.wait()}"
            raise ShardwiseError(
                f"a process that tokenises {job.spans[0].path} {code} (-9: killed, by the system if memory ran out)"
            )
        found = json.loads(answer)
        if "config" in found:
            raise ConfigError(found["config"])
        if "os" in found:
            raise OSError(*found["os"])
        return Done(tuple(found["documents"]), tuple(found["tokens"]))

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if kind is not None:
            for process in self._processes:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            process.stdout.close()
