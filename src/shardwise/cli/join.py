"""``shardwise join`` is one more worker of a run with parameter servers apart."""

from __future__ import annotations

from pathlib import Path

from shardwise.config import load_config
from shardwise.core.errors import ConfigError
from shardwise.core.server_options import APART
from shardwise.launch.apart import start
from shardwise.launch.local import RunFailed, end_of_log, interruptible
from shardwise.launch.monitor import error_of, log_path
from shardwise.launch.server_process import ADDRESS, SERVERS
from shardwise.report.files import CONFIG, RESULT, current
from shardwise.report.tables import make_console


def run(folder: Path) -> None:
    """Work until the run in ``folder`` has no batches left; raise :class:`ConfigError` where there is none to join."""
    legal = "the folder of a run that is training with parallel.server = async or stale"
    if not current(folder, CONFIG).exists():
        raise ConfigError.on(f"{folder}", "there is no run", legal)
    config = load_config(current(folder, CONFIG))
    if config.parallel.server not in APART:
        raise ConfigError.on(f"{folder}", f'it has parallel.server = "{config.parallel.server}"', legal)
    if (folder / RESULT).exists() or not list((folder / SERVERS).glob(f"*/{ADDRESS}")):
        raise ConfigError.on(f"{folder}", "it has no servers now", legal)
    number = _number(folder, config.parallel.dp + config.parallel.server_ranks)
    console = make_console()
    console.print(f"worker {number} joins; its log is {log_path(folder, number)}", markup=False, soft_wrap=True)
    process = start("served_process", config, number, number, folder)
    with interruptible():
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it ends its batch
            process.wait()
            raise
    if code:
        error = error_of(folder, number)
        message = f"worker {number} was lost with exit code {code}" if error is None else error.message
        raise RunFailed(message, "lost" if error is None else error.kind, number, end_of_log(folder, number))
    console.print("no batches are left")


def _number(folder: Path, first: int) -> int:
    """Return a number that no other worker of the run has had."""
    number = first
    while True:
        try:
            (folder / SERVERS / f"worker_{number}").touch(exist_ok=False)
            return number
        except FileExistsError:
            number += 1
