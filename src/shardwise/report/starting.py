"""What a run does before its first step is shown, phase by phase, with seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SHORTEST = 0.05  # seconds; shorter phases are not worth a word


class Phases:
    """The phases of a start in this process; on a terminal, the one under way is shown with its seconds.

    ``done`` are those that have ended, with their seconds.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console if console is not None and console.is_terminal else None
        self.done: list[tuple[str, float]] = []
        self._began = time.monotonic()

    @contextmanager
    def phase(self, text: str, *, quiet: bool = False) -> Iterator[None]:
        """Note how long the block takes; with ``quiet`` it shows itself."""
        start = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with (
            nullcontext()
            if self._console is None or quiet
            else Progress(*columns, console=self._console, transient=True) as bar
        ):
            if bar is not None:
                bar.add_task(text, total=None)
            yield
        self.done.append((text, time.monotonic() - start))

    @property
    def seconds(self) -> float:
        """Return the seconds since the start began."""
        return time.monotonic() - self._began


def in_words(seconds: float, phases: Sequence[tuple[str, float]]) -> str:
    """Return ``the first step ended after 8.3 s: reading the text 0.1 s, …``, with phases that took a while."""
    named = ", ".join(f"{text} {taken:.1f} s" for text, taken in phases if taken >= SHORTEST)
    return f"the first step ended after {seconds:.1f} s" + (f": {named}" if named else "")
