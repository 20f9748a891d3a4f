"""Train real text for some seconds in each way of data parallelism while one worker is slow: what is reached?

    python benchmarks/asynchronous.py [--seconds 60] [--workers 2] [--slow 4] [--only async diloco] [--json FILE]
                                      [--picture FILE.png]

Each way runs by itself, as ``shardwise train`` of the same small GPT on Python's standard library, the same batches in
the same order.  Once it trains, its worker 0 gets one part of --slow of the time: it is stopped and continued by
signals, from outside, whatever it does.  After --seconds of training the run is interrupted.  The table has updates and
tokens a second of all workers together, and the mean loss of the last tenth of the tokens; the picture has the loss
over seconds.  With --slow 1 nobody is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PERIOD = 0.04  # seconds in which a slow worker runs and stands once
START = 180.0  # seconds that a run may take to its first step
LINES = 12  # the least steps of a run whose loss is told

WAYS: dict[str, tuple[str, ...]] = {
    "all-reduce": (),
    "server, sync": ("parallel.server=sync",),
    "stale 2": ("parallel.server=stale", "parallel.staleness=2"),
    "async": ("parallel.server=async",),
    "async, int8": ("parallel.server=async", "parallel.push=int8"),
    "async, top-k 1 %": ("parallel.server=async", "parallel.push=top-k", "parallel.push_share=0.01"),
    "DiLoCo 10": ("parallel.dp_replicate={workers}", "parallel.local_steps=10"),
    "DiLoCo 50": ("parallel.dp_replicate={workers}", "parallel.local_steps=50"),
}
"""What each way sets; a step of an asynchronous one is the batch of one worker, so its batch is smaller."""


@dataclass
class Found:
    """What a way has reached: (seconds, tokens, loss) after each update, and the losses' mean at the end."""

    way: str
    updates_per_second: float
    tokens_per_second: float
    loss: float
    curve: list[tuple[float, int, float]]


def main() -> None:
    options = _options()
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.workers} workers, ", end=""
    )
    print(f"worker 0 {options.slow:g} x slower, {options.seconds:g} s")
    found = []
    print(f"{'':18} {'updates/s':>10} {'tokens/s':>10} {'loss':>8}")
    for way in options.only or WAYS:
        found.append(measured(way, options))
        one = found[-1]
        print(f"{way:18} {one.updates_per_second:10.1f} {one.tokens_per_second:10,.0f} {one.loss:8.3f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found]))
    if options.picture is not None:
        draw(found, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=8, help="rows of a worker's batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", nargs="+", choices=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser.parse_args()


def measured(way: str, options: argparse.Namespace) -> Found:
    """Train in one way, and return what it has reached."""
    apart = "parallel.server=async" in WAYS[way] or "parallel.server=stale" in WAYS[way]
    rows = options.rows * (1 if apart else options.workers)
    with tempfile.TemporaryDirectory(prefix="shardwise-asynchronous-") as place:
        folder = Path(place) / "run"
        arguments = [
            f"train.run_dir={folder}", "train.steps=1000000", f"train.devices={options.workers}", "train.threads=1",
            f"parallel.dp={options.workers}", f"data.batch_size={rows}", "data.sequence_length=128", "model.layers=4",
            f"model.width={options.width}", "model.heads=4", "validation.every=0", "checkpoint.every=1000000",
            "optimizer.schedule=constant", "optimizer.lr=1e-3", "train.trace_steps=[3]",
            *(one.format(workers=options.workers) for one in WAYS[way]),
        ]  # fmt: skip
        command = [sys.executable, "-m", "shardwise", "train", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            _until_first_step(folder, process)
            begun = time.time()
            with slowed(_worker(folder, apart), options.slow):
                time.sleep(options.seconds)
            lines = _lines(folder)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
    return _reached(way, lines, rows * 128, begun, options.seconds)


def _until_first_step(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START
    while not _lines(folder):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the run did not start: {process.communicate()[0]}")
        time.sleep(0.05)


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _worker(folder: Path, apart: bool) -> int:
    """Return the process of worker or rank 0."""
    module = "shardwise.launch.served_process" if apart else "shardwise.launch.worker"
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeError):
            words = (path / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
            if module not in words or str(folder) not in words:
                continue
            if b"RANK=0" in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
    sys.exit("worker 0 is not there")


@contextlib.contextmanager
def slowed(pid: int, factor: float) -> Iterator[None]:
    """Let a process run in one part of ``factor`` of the time."""
    over = threading.Event()

    def alternate() -> None:
        while factor > 1 and not over.is_set():
            for number, seconds in ((signal.SIGSTOP, PERIOD * (1 - 1 / factor)), (signal.SIGCONT, PERIOD / factor)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                over.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _reached(way: str, lines: Sequence[dict[str, Any]], tokens: int, begun: float, seconds: float) -> Found:
    """Return what the updates after ``begun`` have reached; lines without a time follow each other."""
    curve: list[tuple[float, int, float]] = []
    at, done = 0.0, 0
    for one in sorted(lines, key=lambda line: line.get("time", 0.0)):
        at = one["time"] - begun if "time" in one else at + one["step_seconds"]
        done += tokens
        curve.append((at, done, one["loss"]))
    if len(curve) < LINES:
        sys.exit(f"{way}: {len(curve)} updates in {seconds:g} s are too few")
    last = [loss for _, made, loss in curve if made > 0.9 * done]
    span = curve[-1][0] - curve[0][0]
    return Found(way, (len(curve) - 1) / span, (done - tokens) / span, sum(last) / len(last), curve)


def draw(found: Sequence[Found], options: argparse.Namespace) -> None:
    """Draw the loss over seconds, as means over a twentieth of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for one in found:
        step = max(1, len(one.curve) // 40)
        chunks = [one.curve[i : i + step] for i in range(0, len(one.curve), step)]
        axes.plot(
            [chunk[-1][0] for chunk in chunks], [sum(c[2] for c in chunk) / len(chunk) for chunk in chunks],
            label=one.way,
        )  # fmt: skip
    axes.set(xlabel="seconds", ylabel="loss", title=f"{options.workers} workers, one of them {options.slow:g} x slower")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
