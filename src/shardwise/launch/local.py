"""Start the ranks of this machine with torchelastic, and end them when one of them cannot go on."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.report.files import LOGS, logs
from shardwise.runtime.progress import ask_to_stop, read_record

from . import flight
from .begin import begun
from .monitor import MONITOR, RANKS_LOCK, Kind, first_cause, log_path, read_errors
from .watch import Hang, Watcher

# By default glibc returns freed activations to the system and faults them in again, 100 MB per step of a small GPT.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
POLL = 0.1  # seconds between two looks at the ranks
EXIT_TIME = 15.0  # seconds that processes have to end once all have done their work
GRACE = 3.0  # seconds that ranks have to end by themselves once one has failed, or after an interruption
LEAVE_TIME = 60.0  # the same while they finish a checkpoint, of which each has written its part or is about to
ORPHAN_TIME = 15.0  # seconds that ranks of a killed launcher have to end
LOG_LINES = 6  # the number of lines of the culprit's log that a failure shows


class RunFailed(ShardwiseError):
    """This is raised when a run ends because of one of its ranks.

    ``cause`` is the error's kind (such as "config", "shardwise", "non-finite", "communication" or "other") for an
    exception inside a rank, and "hang" or "lost" otherwise; ``rank`` is the culprit, if there is one.  ``details`` are
    further lines for people, such as where the ranks were and the end of the culprit's log.  ``began`` is the time, as
    ``time.monotonic`` gives it, of the first sign of the failure, and ``asked`` says that the ranks had been asked to
    stop.
    """

    def __init__(
        self, message: str, cause: str, rank: int | None, details: Sequence[str] = (), began: float | None = None
    ) -> None:
        super().__init__(message)
        self.cause, self.rank, self.details = cause, rank, tuple(details)
        self.began = time.monotonic() if began is None else began
        self.asked = False


def under_torchrun() -> bool:
    """Return whether this process is one of several ranks that something else, such as torchrun, has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def run_folder(run_dir: Path, key: str = "train.run_dir") -> Iterator[None]:
    """Make a run's folder and lock it for this process; raise :class:`ConfigError`, which names ``key``, if another run
    writes to it."""
    try:
        for name in (LOGS, MONITOR):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{key}: cannot write to {run_dir}: {error.strerror}; legal: a folder to write to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            wrong = f"another run is writing to {run_dir}"
            raise ConfigError.on(key, wrong, "a folder of its own for each") from None
        _wait_for_ranks(run_dir)
        yield


def _wait_for_ranks(run_dir: Path) -> None:
    """Wait for the end of ranks whose launcher was killed: they notice it within a second, and write until then."""
    deadline = time.monotonic() + ORPHAN_TIME
    with (run_dir / RANKS_LOCK).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    wrong = f"ranks of an earlier run still write to {run_dir}"
                    raise ConfigError.on("train.run_dir", wrong, "to end them, or another folder") from None
            time.sleep(POLL)


def clear_logs(run_dir: Path) -> None:
    """Delete the logs that an earlier run left in its folder."""
    for old in run_dir.glob("logs/*.log"):
        old.unlink(missing_ok=True)


def launch_local(
    command: Sequence[str],
    ranks: int,
    run_dir: Path,
    *,
    threads: int,
    hang_timeout: float,
    tick: Callable[[], object] | None = None,
    on_stop: Callable[[], object] | None = None,
    on_notice: Callable[[str], object] | None = None,
) -> bool:
    """Run ``python COMMAND`` as ``ranks`` processes on this machine, and wait for their end.

    Args:
        command: the interpreter's arguments; the process must use :func:`shardwise.launch.rank.rank_process`.
        run_dir: the run's folder (see :func:`run_folder`): ``logs/rank_N.log`` gets what rank N prints.
        threads: the number of OpenMP threads of each rank.
        hang_timeout: seconds without progress after which a rank that others wait for counts as hanging.
        tick: called ten times a second until the ranks end.
        on_stop: given if ranks stop when their record asks them to, as those of `shardwise train` do.  The first
            Ctrl-C, SIGTERM or SIGHUP then calls it and asks the ranks to stop; only a second one ends them.
        on_notice: gets what ranks have to tell the user.

    Return whether the ranks were asked to stop.  Raise :class:`RunFailed`, after all ranks have ended, as soon as a
    rank has failed, hangs, or has been killed or stopped.  An interruption by Ctrl-C, SIGTERM or SIGHUP that does not
    ask ranks to stop ends them, and raises KeyboardInterrupt; with ``on_stop`` that is one before the first step, or
    the second one.
    """
    from shardwise.backend import Backend  # imported late because it imports torch

    for old in [*run_dir.glob("monitor/rank_*"), *run_dir.glob(f"monitor/{flight.STEM}*")]:
        old.unlink(missing_ok=True)
    run_id = uuid.uuid4().hex
    watcher = Watcher(
        run_dir, ranks, run_id, hang_timeout, asynchronous=Backend.here().asynchronous, on_notice=on_notice
    )
    watcher.pipes = Path(tempfile.mkdtemp(prefix="shardwise-"))  # not every file system has pipes
    recorder = Backend.built().flight_recorder(
        *(str(at.absolute() / flight.STEM) for at in (run_dir / MONITOR, watcher.pipes))
    )
    agent = _Agent(command, ranks, run_id, threads, recorder)
    asked = False
    with interruptible():
        try:
            agent.start()
            try:
                _watch(agent, watcher, tick)
            except KeyboardInterrupt:
                # Steps so short that no look has seen one count, too.
                if on_stop is None or not (watcher.began or begun(run_dir)):
                    raise
                asked = True
                on_stop()
                _watch(agent, watcher, partial(_ask_all_to_stop, watcher, tick))
        except BaseException as stop:
            if isinstance(stop, KeyboardInterrupt):
                watcher.signal(signal.SIGINT)
                agent.join(GRACE)
            raise
        finally:
            while agent.is_alive():  # repeated because a rank may just be starting
                watcher.kill()
                agent.join(POLL)
            shutil.rmtree(watcher.pipes, ignore_errors=True)
    if agent.error is not None:
        raise agent.error
    if agent.exit_codes and not watcher.finished:
        failure = _failure(watcher, None, agent.exit_codes)
        failure.asked = asked
        raise failure
    return asked


def _ask_all_to_stop(watcher: Watcher, tick: Callable[[], object] | None) -> None:
    """Ask all ranks to stop; this is repeated because ranks that are still starting do not listen yet."""
    for rank in range(watcher.ranks):
        ask_to_stop(watcher.run_dir, rank)
    if tick is not None:
        tick()


def _watch(agent: _Agent, watcher: Watcher, tick: Callable[[], object] | None) -> None:
    """Return when the agent has ended; raise :class:`RunFailed` when a rank hangs."""
    finished_at = None
    while agent.is_alive():
        agent.join(POLL)
        if tick is not None:
            tick()
        hang = watcher.look()
        errors = read_errors(watcher.run_dir)
        if watcher.failed_at is None and (errors or watcher.lost):
            watcher.failed_at = time.monotonic()
        if finished_at is None and watcher.finished:
            finished_at = time.monotonic()
        grace = LEAVE_TIME if watcher.leaving else GRACE
        if watcher.failed_at is not None and time.monotonic() > watcher.failed_at + grace:
            watcher.kill()  # ranks that are stuck in a call do not handle the agent's SIGTERM
        elif finished_at is not None and time.monotonic() > finished_at + EXIT_TIME:
            watcher.kill()  # threads of a library may keep a process alive
        elif watcher.failed_at is None and hang is not None:
            watcher.failed_at = time.monotonic()
            failure = _failure(watcher, hang, {})
            watcher.kill()
            raise failure
    if tick is not None:
        tick()


def _failure(watcher: Watcher, hang: Hang | None, exit_codes: Mapping[int, int]) -> RunFailed:
    """Return the failure with its root cause: a rank's own error, else a hang, else a rank that was killed or ended,
    else lost connections."""
    errors = read_errors(watcher.run_dir)
    first = first_cause(errors)
    if first is not None:
        origin = f"{_name(watcher.run_dir, first.rank)} failed at {first.place}: " if first.kind == "other" else ""
        return _failed(watcher, origin + first.message, first.kind, first.rank, [], first.lines)
    if hang is not None:
        rank = hang.culprits[0] if hang.culprits else None
        where = watcher.report()
        stacks = [line for culprit in hang.culprits for line in _stack(watcher, culprit)]
        collectives = flight.report(flight.collect(watcher.run_dir / MONITOR, watcher.pipes))
        return _failed(watcher, hang.message, "hang", rank, [*where, *collectives, *stacks])
    failed = {error.rank for error in errors}
    ours = {rank for rank, one in watcher.watched.items() if one.killed}
    for asked in (False, True):  # the agent ends the remaining ranks by SIGTERM, so these come last
        for rank, code in exit_codes.items():
            if rank not in failed | ours and asked == (code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
                cause = "lost" if code < 0 or asked else "other"
                name, place = _name(watcher.run_dir, rank), _place(watcher.run_dir, rank)
                return _failed(watcher, f"{name} {_ended(code)}{place}", cause, rank, [])
    if errors:
        return _failed(watcher, errors[0].message, errors[0].kind, errors[0].rank, [])
    return _failed(watcher, "the ranks ended", "lost", None, watcher.report())


def _stack(watcher: Watcher, rank: int) -> list[str]:
    frames = watcher.stack(rank)
    return [f"rank {rank} is here (most recent call first):", *frames] if frames else []


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {int(known) for known in signal.Signals} else f"signal {-code}"
    return f"was killed ({name}{', by the system if memory ran out' if code == -signal.SIGKILL else ''})"


def _name(run_dir: Path, rank: int) -> str:
    record = read_record(run_dir, rank)
    return f"rank {rank}" if record is None else record.name


def _place(run_dir: Path, rank: int) -> str:
    record = read_record(run_dir, rank)
    if record is None:
        return " at its start"
    return f" at {record.place}" + (f": {record.notice}" if record.notice else "")


def _failed(
    watcher: Watcher, message: str, cause: Kind | str, rank: int | None, details: list[str], users: Sequence[str] = ()
) -> RunFailed:
    """Return the failure with ``details``, and the lines of the ``users`` code that led to it, if there are any, else
    the end of the culprit's log."""
    where = logs(watcher.run_dir)
    if users:
        details += ["in your code (the innermost call last):", *users]
    elif rank is not None and cause != "config":
        details += end_of_log(watcher.run_dir, rank)
    return RunFailed(message, cause, rank, [*details, f"logs: {where}"], watcher.failed_at)


def end_of_log(run_dir: Path, rank: int) -> list[str]:
    """Return the last lines of a rank's log under its path, or nothing if it has none."""
    path = log_path(run_dir, rank)
    lines = last_lines(path)
    return [f"the end of {path}:", *(f"  {line}" for line in lines)] if lines else []


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a text file that are not blank, or none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
    except OSError:
        return []


@dataclass
class _Agent:
    """This runs torchelastic's agent in a thread, while the main thread watches the ranks.

    ``exit_codes`` are the codes of the ranks that failed, in the order in which the agent saw them end.
    """

    command: Sequence[str]
    ranks: int
    run_id: str
    threads: int
    recorder: Mapping[str, str]  # the ranks' environment variables for torch's flight recorder
    exit_codes: dict[int, int] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        # Thread.join does not serve: an interrupted one counts the thread as ended (CPython 3.11).
        self._ended = threading.Event()
        self.start = threading.Thread(target=self._run, name="shardwise-agent", daemon=True).start

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the end of the ranks."""
        self._ended.wait(seconds)

    def is_alive(self) -> bool:
        """Return whether there are ranks, or may be soon."""
        return not self._ended.is_set()

    def _run(self) -> None:
        try:
            self._launch()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.error = error
        finally:
            self._ended.set()

    def _launch(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from shardwise.backend import Backend

        _silence()
        prepared: dict[str, str] = {}
        Backend.built().prepare(prepared)
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=self.ranks, run_id=self.run_id, role="rank", rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, monitor_interval=POLL,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks redirect their output to their logs themselves
            numa_options=Backend.here().numa_options(self.ranks),
        )  # fmt: skip
        try:
            chosen = {name: os.environ.get(name, value) for name, value in (ALLOCATOR | prepared).items()}
            with _environment(OMP_NUM_THREADS=str(self.threads), PYTHONUNBUFFERED="1", **chosen, **self.recorder):
                elastic_launch(config, sys.executable)(*self.command)
        except ChildFailedError as error:
            self.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}


def _silence() -> None:
    """Silence torchelastic's logs of failures, since :class:`RunFailed` says more."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")) and isinstance(
            logger, logging.Logger
        ):
            logger.setLevel(logging.CRITICAL + 1)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the ranks, which inherit those of the agent."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does; only the main thread can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    # A run under nohup ignores SIGHUP, and must go on doing so.
    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
