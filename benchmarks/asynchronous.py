"""Train real text for some seconds in each way of data parallelism while a worker or the network is slow: what is
reached?

    python benchmarks/asynchronous.py [--seconds 60] [--workers 2] [--slow 4] [--only async diloco] [--json FILE]
                                      [--picture FILE.png]
    python benchmarks/asynchronous.py --megabits 200 --slow 1

Each way runs by itself, as ``shardwise train`` of the same small GPT on Python's standard library, the same batches in
the same order.  Once it trains, its worker 0 gets one part of --slow of the time: it is stopped and continued by
signals, from outside, whatever it does.  After --seconds of training the run is interrupted.  The table has updates and
tokens a second of all workers together, and the mean loss of the last tenth of the tokens; the picture has the loss
over seconds.  With --slow 1 nobody is slow.

With --megabits two workers are in two network namespaces, as on two hosts with a link of that speed: under torchrun,
or, where they do not wait for each other, the servers are beside worker 0, and the other is a ``shardwise join``.  This
needs root.
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

from link import Link, slow_link

PERIOD = 0.04  # seconds in which a slow worker runs and stands once
START = 180.0  # seconds that a run may take to its first step
JOINS = 20.0  # seconds in which a worker that joins has begun
LINES = 12  # the least steps of a run whose loss is told

WAYS: dict[str, tuple[str, ...]] = {
    "all-reduce": (),
    "server, sync": ("parallel.server=sync",),
    "stale 2": ("parallel.server=stale", "parallel.staleness=2"),
    "async": ("parallel.server=async",),
    "async, push of 8": ("parallel.server=async", "parallel.push_every=8"),
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
    slow = f"{options.megabits} Mbit/s between them, " if options.megabits else ""
    print(f"{slow}worker 0 {options.slow:g} x slower, {options.seconds:g} s")
    found = []
    print(f"{'':18} {'updates/s':>10} {'tokens/s':>10} {'loss':>8}")
    with slow_link(options.megabits) if options.megabits else contextlib.nullcontext() as link:
        for way in options.only or WAYS:
            found.append(measured(way, options, link))
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
    parser.add_argument("--megabits", type=int, default=0, help="of a link between two workers; 0: they share a host")
    parser.add_argument("--only", nargs="+", choices=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.megabits and (options.workers != 2 or options.slow != 1):
        parser.error("--megabits goes with --workers 2 and --slow 1")
    return options


def measured(way: str, options: argparse.Namespace, link: Link | None) -> Found:
    """Train in one way, and return what it has reached."""
    apart = "parallel.server=async" in WAYS[way] or "parallel.server=stale" in WAYS[way]
    rows = options.rows * (1 if apart else options.workers)
    with tempfile.TemporaryDirectory(prefix="shardwise-asynchronous-") as place:
        folder = Path(place) / "run"
        arguments = [
            f"train.run_dir={folder}", "train.steps=1000000", "train.threads=1", f"data.batch_size={rows}",
            "data.sequence_length=128", "model.layers=4", f"model.width={options.width}", "model.heads=4",
            "validation.every=0", "checkpoint.every=1000000", "optimizer.schedule=constant", "optimizer.lr=1e-3",
            "train.trace_steps=[3]",
            *(one.format(workers=options.workers) for one in WAYS[way]),
        ]  # fmt: skip
        processes = _started(arguments, options.workers, apart, link)
        try:
            _until_first_step(folder, processes[0])
            if link is not None and apart:
                processes.append(_process(["shardwise", "join", str(folder)], link, 1))
                time.sleep(JOINS)
            begun = time.time()
            with slowed(_worker(folder, apart), options.slow) if options.slow > 1 else contextlib.nullcontext():
                time.sleep(options.seconds)
            lines = [one for one in _lines(folder) if one.get("time", begun) >= begun]
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=30)
                process.kill()
    batches = max([1, *(int(one.partition("=")[2]) for one in WAYS[way] if one.startswith("parallel.push_every"))])
    return _reached(way, lines, rows * 128 * batches, begun, options.seconds)


def _started(arguments: Sequence[str], workers: int, apart: bool, link: Link | None) -> list[subprocess.Popen[str]]:
    """Start a run: on this host, or on the two that a link joins; of workers that do not wait, the first alone."""
    if link is None:
        devices = [f"train.devices={workers}", f"parallel.dp={workers}"]
        return [_process(["shardwise", "train", *arguments, *devices], None, 0)]
    if apart:
        here = ["train.devices=1", "parallel.dp=1", f"parallel.server_host={link.address}"]
        return [_process(["shardwise", "train", *arguments, *here], link, 0)]
    torchrun = f"torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr {link.address} --master-port 29500"
    script = ["-m", "shardwise", "train", *arguments, f"parallel.dp={workers}"]
    return [_process([*torchrun.split(), "--node-rank", str(k), *script], link, k) for k in range(2)]


def _process(words: Sequence[str], link: Link | None, end: int) -> subprocess.Popen[str]:
    inside = [] if link is None else ["ip", "netns", "exec", link.namespaces[end]]
    variables = os.environ | ({} if link is None else {"GLOO_SOCKET_IFNAME": link.environment["GLOO_SOCKET_IFNAME"]})
    return subprocess.Popen(
        [*inside, sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=variables,
    )  # fmt: skip


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
