"""This module shows the progress of reading and tokenising: with a bar on a terminal, else with a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .tokenise import OnProgress

LINE_INTERVAL = 5.0  # the seconds between two lines if there is no terminal


@contextmanager
def shown(what: str, console: Console) -> Iterator[OnProgress]:
    """Give a callback (bytes done, bytes in total) that shows the progress of ``what`` from its first call on."""
    if not console.is_terminal:
        yield _Lines(what, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class _Lines:
    """This prints plain lines: the first at once, the next ones after a while, and the last at the end."""

    def __init__(self, what: str, console: Console) -> None:
        self.what, self.console = what, console
        self.next = 0.0
        self.ended = False

    def __call__(self, done: int, total: int) -> None:
        now, ended = time.monotonic(), done >= total
        quiet, self.ended = self.ended if ended else now < self.next, ended
        if quiet:
            return
        self.next = now + LINE_INTERVAL
        self.console.print(f"{self.what}: {decimal(done)} of {decimal(total)}", markup=False, highlight=False)
