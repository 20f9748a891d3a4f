"""Those who look on change nothing, and an error in one of them does not end a run."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.report.observers import HOOKS, Observers


class Everything:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)
        return lambda values: self.seen.append((name, values))


def fails(values: dict[str, Any]) -> None:
    raise ValueError(f"no step {values['step']}")


def test_each_hook_is_called_with_a_copy() -> None:
    one, other = Everything(), SimpleNamespace(on_start=lambda values: values["config"].clear())
    observers = Observers([("other", other), ("one", one)])
    given = {"config": {"train": {"steps": 3}}}
    observers.tell("on_start", given)
    observers.tell("on_step", {"step": 0, "loss": 2.0})  # which the other has not
    assert given == {"config": {"train": {"steps": 3}}}
    assert one.seen == [("on_start", given), ("on_step", {"step": 0, "loss": 2.0})]


def test_one_that_raises_is_told_with_its_line_and_not_called_again() -> None:
    told: list[str] = []
    one = Everything()
    observers = Observers(
        [("train.callbacks = [a.py:fails]", SimpleNamespace(on_step=fails)), ("one", one)], told.append
    )
    logger = logging.getLogger("shardwise")
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger.addHandler(handler)
    try:
        for step in range(3):
            observers.tell("on_step", {"step": step})
    finally:
        logger.removeHandler(handler)
    (line,) = told
    assert line.startswith("train.callbacks = [a.py:fails]: ValueError: no step 0 (") and "test_observers.py:" in line
    assert line.endswith("it is not called again, and the run goes on") and len(one.seen) == 3
    assert "Traceback" in written.getvalue()  # the log has all of it


def test_the_end_comes_once() -> None:
    one = Everything()
    observers = Observers([("one", one)])
    observers.end("finished", {"steps": 3})
    observers.end("stopped")
    assert one.seen == [("on_end", {"status": "finished", "steps": 3})]


def test_an_interruption_passes() -> None:
    def interrupt(values: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([("one", SimpleNamespace(on_step=interrupt))]).tell("on_step", {})
