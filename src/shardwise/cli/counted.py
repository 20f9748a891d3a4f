"""Ranks that do a number of things are started under a bar that counts what is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from shardwise.launch.local import launch_local


def launch_counted(
    command: Sequence[str], ranks: int, folder: Path, *, threads: int, hang_timeout: float, console: Console | None,
    doing: str, total: int, done: Callable[[], int],
) -> None:  # fmt: skip
    """Launch ranks as :func:`launch_local` does; the ``console``, if it is a terminal, shows how many of ``total`` are
    ``done``."""
    bar = Progress(console=console, transient=True) if console is not None and console.is_terminal else None
    with bar or nullcontext():
        task = None if bar is None else bar.add_task(doing, total=total)

        def tick() -> None:
            if bar is not None and task is not None:
                bar.update(task, completed=done())

        launch_local(command, ranks, folder, threads=threads, hang_timeout=hang_timeout, tick=tick)
