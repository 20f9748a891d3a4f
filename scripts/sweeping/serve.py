"""Models shared among worker processes, which are replaced when they crash, hang or have grown."""

from __future__ import annotations

import json
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from sweeping.outcome import CRASH, PLAIN, TIMEOUT, UNTRAINED, Outcome
from sweeping.plans import plans
from sweeping.results import Results

WORKER = Path(__file__).with_name("worker.py")
START = 300  # the seconds that a process may take to start
LARGEST = 4 << 30  # a worker of more bytes is replaced


class Worker:
    """A process that tries models (`worker.py`)."""

    def __init__(self) -> None:
        command = [sys.executable, str(WORKER)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
        )
        self.heard = b""
        self.errors: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()
        if self.answer(START) is None:
            raise RuntimeError(f"a worker did not start: {b''.join(self.errors).decode(errors='replace')}")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-20:], line]

    def ask(self, model: str, wanted: Sequence[str]) -> None:
        """Give the process a model to try under some plans."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"model": model, "plans": list(wanted)}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit: float) -> dict[str, Any] | None:
        """Return its next line; None if the process has died. Raises TimeoutError after ``limit`` seconds."""
        assert self.process.stdout is not None
        until = time.monotonic() + limit
        while b"\n" not in self.heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            got = self.process.stdout.read1()  # type: ignore[attr-defined]
            if not got:
                return None
            self.heard += got
        line, _, self.heard = self.heard.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def has_grown(self) -> bool:
        """Whether it uses much memory."""
        return bool(psutil.Process(self.process.pid).memory_info().rss > LARGEST)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def sweep(
    names: Sequence[str], results: Results, workers: int, limit: float, again: Sequence[str] = (),
    only: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Try models under all plans, or ``only`` some, and add what comes of it to the results."""
    chosen = [plan for plan in plans() if only is None or plan in only]
    waiting: queue.Queue[tuple[str, list[str]]] = queue.Queue()
    for name in names:
        if open_plans := results.open(name, chosen, again):
            waiting.put((name, open_plans))
    print(f"{waiting.qsize()} models to try", flush=True)
    threads = [threading.Thread(target=_work, args=(waiting, results, limit)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(waiting: queue.Queue[tuple[str, list[str]]], results: Results, limit: float) -> None:
    worker: Worker | None = None
    while True:
        try:
            model, wanted = waiting.get_nowait()
        except queue.Empty:
            break
        while wanted:
            if worker is None:
                worker = Worker()
            worker = _try(worker, model, wanted, results, limit)
        if worker is not None and worker.has_grown:
            worker.end()
            worker = None
    if worker is not None:
        worker.end()


def _try(worker: Worker, model: str, wanted: list[str], results: Results, limit: float) -> Worker | None:
    """Try a model, taking plans that are done out of ``wanted``; return the worker unless it is gone."""
    worker.ask(model, wanted)
    begun, tried = time.monotonic(), False  # whether it trains in plain torch
    while True:
        try:
            said = worker.answer(limit)
        except TimeoutError:
            said, outcome, text = None, TIMEOUT, f"no answer within {limit:.0f} s"
        else:
            outcome, text = CRASH, "the process died"
        if said is None:
            worker.end()
            last = b" ".join(worker.errors[-3:]).decode(errors="replace").strip()
            seconds = round(time.monotonic() - begun, 2)
            text = text if outcome == TIMEOUT else f"{text}: {last[-500:]}"
            if tried:
                results.add(Outcome(model, wanted.pop(0), outcome, text, seconds=seconds))
            else:
                results.add(Outcome(model, PLAIN, UNTRAINED, text, seconds=seconds))
                wanted.clear()
            return None
        if said["plan"] is None:
            wanted.clear()
            return worker
        one = Outcome(**said)
        results.add(one)
        tried, begun = True, time.monotonic()
        if one.plan in wanted:
            wanted.remove(one.plan)
        print(f"{one.model} {one.plan}: {one.outcome} {one.text[:200]}", flush=True)
