"""Train with parameter servers and workers that do not wait for each other: start them, watch, and start lost servers
again.

A worker that is lost is not missed: the others go on, and its batch goes to one of them.  A server that is lost starts
again from its last snapshot, at the same port, where workers look for it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwise.config import Config, build_plan
from shardwise.core.errors import ConfigError
from shardwise.core.metrics import LOSS
from shardwise.report.files import CONFIG, EVALUATIONS, METRICS, PLAN, RESULT, WEIGHTS, parsed_line, write_whole
from shardwise.runtime.progress import read_record
from shardwise.runtime.secret import make_secret

from .begin import settle, stage
from .folder import changed_keys, read_lines
from .local import ALLOCATOR, POLL, RunFailed, end_of_log, interruptible
from .monitor import error_of
from .results import write_json
from .served_process import REST
from .server_process import RECORD, RUN_FILE, SECRET_FILE, SERVERS, SNAPSHOT, compiled_of

LEAST_HANG = 60.0  # seconds: a worker may wait that long for a server that starts again
STOP_TIME = 60.0  # seconds that a server may take for its last snapshot


def goes_on(config: Config) -> bool:
    """Return whether the servers of an unfinished run are in the folder, to go on from; raise :class:`ConfigError` if
    they are of another configuration."""
    folder = Path(config.train.run_dir)
    numbers = range(config.parallel.server_ranks)
    if (
        not all(_snapshot(folder, number).exists() for number in numbers)
        or (folder / RESULT).exists()
        or config.train.resume == "never"
    ):
        return False
    if keys := changed_keys((folder / CONFIG).read_text(encoding="utf-8"), config):
        there = f"an unfinished run with other values of {', '.join(keys)} is there"
        raise ConfigError.on(f"train.run_dir = {folder}", there, "the same configuration, or train.resume = never")
    return True


def prepare(config: Config) -> list[str]:
    """Make the folder that of this run; return what there is to tell."""
    folder, told = Path(config.train.run_dir), list[str]()
    if goes_on(config):
        (folder / CONFIG).write_text(config.resolved(), encoding="utf-8")
        _cut_metrics(folder)
        told.append("going on from the servers' snapshots")
    else:
        stage(folder, config.resolved(), anew=True)
        told += settle(folder, 0)
        shutil.rmtree(folder / SERVERS, ignore_errors=True)
        for number in range(config.parallel.server_ranks):
            (folder / SERVERS / str(number)).mkdir(parents=True)
        make_secret(folder / SERVERS / SECRET_FILE)
        (folder / SERVERS / RUN_FILE).write_text(uuid.uuid4().hex, encoding="utf-8")
    write_whole(folder / PLAN, build_plan(config).to_toml())
    for old in folder.glob("monitor/rank_*"):
        old.unlink(missing_ok=True)
    return told


def _cut_metrics(folder: Path) -> None:
    """Leave the lines of the batches that the first server has done by its snapshot; the others are trained again."""
    from .snapshots import snapshot_facts

    facts = snapshot_facts(_snapshot(folder, 0))
    assert facts is not None
    tickets = facts["tickets"]
    done = set(range(tickets["next"])) - {*tickets["free"], *tickets["dropped"]}
    kept = {one["step"]: one for one in read_lines(folder / METRICS) if one["step"] in done}
    write_whole(folder / METRICS, "".join(json.dumps(one) + "\n" for one in kept.values()))


def start(module: str, config: Config, number: int, rank: int, folder: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a worker or a server of the run in ``folder``, which is that of its config unless it has been moved."""
    environment = {
        **ALLOCATOR,
        **os.environ,
        "RANK": str(rank),
        "OMP_NUM_THREADS": str(config.train.threads),
        "PYTHONUNBUFFERED": "1",
    }
    where = Path(folder or config.train.run_dir).absolute()
    command = [sys.executable, "-m", f"shardwise.launch.{module}", str(where), str(number)]
    # A Ctrl-C in a terminal reaches all of its group at once, and servers have to outlive their workers.
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


@dataclass
class Processes:
    """The workers, whose ranks are 0, 1, …, and the servers, whose ranks follow."""

    config: Config
    say: Callable[[str], object]
    workers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # exit codes of workers
    restarts: Counter[int] = field(default_factory=Counter)  # of servers

    @property
    def folder(self) -> Path:
        return Path(self.config.train.run_dir).absolute()

    def start(self) -> None:
        for number in range(self.config.parallel.server_ranks):
            self.servers[number] = self._server(number)
        for number in range(self.config.parallel.dp):
            self.workers[number] = start("served_process", self.config, number, number)

    def _server(self, number: int) -> subprocess.Popen[bytes]:
        return start("server_process", self.config, number, self.config.parallel.dp + number)

    def look(self) -> bool:
        """Start lost servers again; return whether all workers have ended.  Raise :class:`RunFailed` where that, or a
        worker's own error, ends the run."""
        for number, process in list(self.workers.items()):
            if (code := process.poll()) is not None:
                self.ended[number] = code
                del self.workers[number]
                self._tell_ended(number, code)
        for number, process in list(self.servers.items()):
            if (code := process.poll()) is not None:
                self._restart(number, code)
        if not self.workers and all(self.ended.values()):
            rank = next(iter(self.ended))
            raise self._failed(f"all workers were lost, {rank} with exit code {self.ended[rank]}", rank)
        return not self.workers

    def _tell_ended(self, number: int, code: int) -> None:
        if code == 0:
            return
        error = error_of(self.folder, number)
        if error is not None and error.kind != "communication":
            raise self._failed(error.message, number, error.kind)
        left, more = len(self.workers), ", without evaluations" if number == 0 and self.config.validation.every else ""
        self.say(f"worker {number} was lost ({_ended(code)}); {left} go on{more}")

    def signs(self) -> list[int]:
        """Return numbers that change while anybody does anything."""
        records = [read_record(self.folder, rank) for rank in range(self.config.parallel.dp)]
        return [0 if one is None else one.writes for one in records]

    def _restart(self, number: int, code: int) -> None:
        rank = self.config.parallel.dp + number
        error = error_of(self.folder, rank)
        if error is not None or self.restarts[number] >= self.config.train.max_restarts:
            message = (
                error.message if error is not None else f"server {number} was lost ({_ended(code)}) once too often"
            )
            raise self._failed(message, rank, "lost" if error is None else error.kind)
        self.restarts[number] += 1
        self.servers[number] = self._server(number)
        self.say(f"server {number} was lost ({_ended(code)}) and starts again from its last snapshot")

    def _failed(self, message: str, rank: int, cause: str = "lost") -> RunFailed:
        return RunFailed(message, cause, rank, end_of_log(self.folder, rank) if cause != "config" else [])

    def stop(self, which: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
        """Ask these processes to end, and end them if they do not."""
        for process in which:
            with suppress(OSError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for process in which:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def train_apart(config: Config, tick: Callable[[], object], say: Callable[[str], object]) -> bool:
    """Train to the end, or until an interruption; return whether there was one.

    Raises :class:`RunFailed` where no worker or no server can go on, or nothing happens for ``train.hang_timeout``.
    """
    processes = Processes(config, say)
    stopped = False
    with interruptible():
        try:
            processes.start()
            signs, since = processes.signs(), time.monotonic()
            try:
                while not processes.look():
                    time.sleep(POLL)
                    tick()
                    if (now := processes.signs()) != signs or not (processes.folder / METRICS).exists():
                        signs, since = now, time.monotonic()
                    elif time.monotonic() - since > max(config.train.hang_timeout, LEAST_HANG):
                        raise RunFailed(f"no sign of life for {time.monotonic() - since:.0f} s", "hang", None)
            except KeyboardInterrupt:
                stopped = True
                say("stopping after the batches under way, with a snapshot of each server (once more: at once)")
                processes.stop(list(processes.workers.values()), STOP_TIME)
            processes.stop(list(processes.servers.values()), STOP_TIME)
        finally:
            processes.stop([*processes.workers.values(), *processes.servers.values()], 0.1)
    tick()
    if not stopped:
        finish(config)
    return stopped


def finish(config: Config) -> None:
    """Put the weights together from the servers' snapshots, and write the result."""
    from shardwise.report.runs import read_run, summary

    folder = Path(config.train.run_dir)
    _check_done(config)
    _write_weights(config, folder)
    run = read_run(folder)
    lines = sorted(read_lines(folder / METRICS), key=lambda one: one["time"])
    evaluations = read_lines(folder / EVALUATIONS)
    steady = lines[1:] or lines
    losses = [one["loss"] for one in lines]
    result: dict[str, Any] = {
        "steps": config.train.steps,  # all are done; a worker that was lost may have left no line of its last one
        "loss_first": losses[0] if lines else None, "loss_last": losses[-1] if lines else None,
        "tokens_per_second": summary(run)["tokens_per_second"],
        "step_seconds": statistics.median(one["step_seconds"] for one in steady), "training_seconds": run.seconds,
        "peak_memory_bytes": max((one["peak_memory_bytes"] for one in lines if one["worker"] == 0), default=None),
        "ranks": config.parallel.dp, "servers": config.parallel.server_ranks, "device": "cpu",
        "run_dir": str(folder), "weights": str(folder / WEIGHTS),
        "staleness": dict(sorted(Counter(one["staleness"] for one in lines).items())),
        "lost_updates": lost_updates(folder, config.parallel.server_ranks),
    }  # fmt: skip
    if evaluations:
        result |= {LOSS: evaluations[-1][LOSS], "evaluation": evaluations[-1]}
    write_json(folder / RESULT, result)


def _check_done(config: Config) -> None:
    """Raise :class:`RunFailed` unless all batches are done, and the servers have saved all that they have applied."""
    from .snapshots import snapshot_facts

    folder = Path(config.train.run_dir)
    for number in range(config.parallel.server_ranks):
        facts, pushed = snapshot_facts(_snapshot(folder, number)), _versions(folder, number)
        last = pushed[-1] if pushed else 0
        if facts is None or facts["version"] != last:
            found = "none" if facts is None else f"one of version {facts['version']}"
            raise RunFailed(f"server {number} has applied {last} updates, and its snapshot is {found}", "lost", None)
        if number == 0 and (facts["tickets"]["next"] < config.train.steps or facts["tickets"]["free"]):
            raise RunFailed("the workers have ended, and batches are left; the same command goes on", "lost", None)


def _snapshot(folder: Path, number: int) -> Path:
    return folder / SERVERS / str(number) / SNAPSHOT


def _events(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / SERVERS / str(number) / RECORD
    return list(filter(None, map(parsed_line, path.read_bytes().splitlines()))) if path.exists() else []


def _versions(folder: Path, number: int) -> list[int]:
    """Return the versions after each push and at each start, in their order."""
    return [one["version"] for one in _events(folder, number) if one["event"] in ("start", "restart", "push")]


def lost_updates(folder: Path, servers: int) -> int:
    """Return how many updates servers have lost by starting again from a snapshot: of each server all, and of these the
    most."""
    found = [0]
    for number in range(servers):
        versions = _versions(folder, number)
        found.append(sum(max(0, a - b) for a, b in pairwise(versions)))
    return max(found)


def _write_weights(config: Config, folder: Path) -> None:
    """Write the parameters in master precision, from the servers' snapshots, and the buffers that one worker has kept
    (the first by the name of its file)."""
    from safetensors.torch import load_file

    from shardwise.config import build_data, build_optimizer
    from shardwise.runtime.served_store import ServedStore

    from .snapshots import load_snapshot, write_weights

    compiled = compiled_of(config, build_data(config).train)
    plan, choice = build_plan(config), build_optimizer(config, compiled.module)

    def stores() -> Iterator[ServedStore]:
        for number in range(plan.serving.servers):
            store = ServedStore(compiled.buckets, plan, choice, number)
            load_snapshot(store, _snapshot(folder, number))
            yield store

    kept = sorted((folder / SERVERS).glob(REST.format("*")))
    write_weights(folder / WEIGHTS, compiled, stores(), load_file(kept[0]) if kept else {})
