"""``shardwise launch`` runs a user's script on all local devices."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardwise.config import MORE_RANKS, Hardware
from shardwise.core.errors import ConfigError
from shardwise.launch.devices import check_kernels, check_torch
from shardwise.launch.local import clear_logs, launch_local, run_folder, under_torchrun
from shardwise.launch.monitor import log_path
from shardwise.launch.rank import run_script
from shardwise.launch.slurm import adopt
from shardwise.report.tables import print_json


def run(
    script: Path,
    arguments: Sequence[str],
    ranks: int | None,
    threads: int | None,
    run_dir: Path,
    json: bool,
    hang_timeout: float,
) -> None:
    """Run the script; every rank prints to its log, and the log of rank 0 also goes to the terminal."""
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such file; legal: a Python script")
    if adopt(os.environ):
        if ranks not in (None, int(os.environ["WORLD_SIZE"])):
            raise ConfigError(f"--ranks {ranks}: legal: {os.environ['WORLD_SIZE']}, the tasks that srun has started")
        run_script(str(script), arguments)
        return
    if under_torchrun():
        raise ConfigError(f"torchrun has started this process already; legal: torchrun {script} itself")
    for warning in check_torch():
        print(f"note: {warning}", file=sys.stderr)
    hardware = Hardware.here()
    ranks = ranks or hardware.devices
    if 0 < hardware.gpus < ranks:
        raise ConfigError(f"--ranks {ranks}: legal: at most {hardware.gpus}, the GPUs of this machine. {MORE_RANKS}")
    check_kernels(ranks)
    own = [
        a for a in arguments if a.partition("=")[0] in ("--ranks", "--threads", "--run-dir", "--hang-timeout", "--json")
    ]
    if own:
        print(f"note: {' '.join(own)} goes to {script.name}; options of launch come before the script", file=sys.stderr)
    start = time.monotonic()
    run_dir = run_dir.absolute()  # the script may change the working directory
    with run_folder(run_dir):
        clear_logs(run_dir)
        echo = _Echo(log_path(run_dir, 0))
        command = ["-m", "shardwise.launch.rank", str(run_dir), str(script), *arguments]
        launch_local(
            command,
            ranks,
            run_dir,
            threads=threads or max(1, hardware.cores // ranks),
            tick=None if json else echo.update,
            hang_timeout=hang_timeout,
        )
    if json:
        print_json({"ranks": ranks, "seconds": time.monotonic() - start, "run_dir": str(run_dir)})


class _Echo:
    """This copies a growing log to the terminal."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def update(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        if new:
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()
