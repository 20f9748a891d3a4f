"""What a model's own code, or torch, warns of while the model is captured: a step runs the graph, and warns no more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.capture.running import users_line

LENGTH = 200  # characters of a warning that a note shows


@contextmanager
def passed_on() -> Iterator[dict[str, None]]:
    """Collect the warnings of a capture, each once, as notes with the user's line.

    What export says of attributes that forward assigns is left out: ``capture/state.py`` finds out whether it matters.
    """
    found: dict[str, None] = {}

    def show(message: Any, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        text = " ".join(str(message).split())
        if issubclass(category, UserWarning | RuntimeWarning) and not text.startswith("The tensor attribute"):
            short = text if len(text) <= LENGTH else text[:LENGTH] + "…"
            found[f"warned while it was captured: {short} ({users_line() or f'{filename}:{lineno}'})"] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield found
