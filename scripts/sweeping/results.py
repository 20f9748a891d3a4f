"""The results of a sweep: a file with a line of JSON for each model and plan, of which the last counts."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from sweeping.outcome import PASSES, PLAIN, UNTRAINED, Outcome

FAILED = "failed"
"""What stands for all outcomes but passes."""


class Results:
    """The outcomes in a file, by model and plan."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[tuple[str, str], Outcome]()
        self._lock = threading.Lock()
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):  # the last line was cut off: it counts as not written, and ends here
            with path.open("a") as file:
                file.write("\n")
            text = text[: text.rfind("\n") + 1]
        for line in text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # such a line of before
                one = Outcome(**json.loads(line))
                self.found[one.model, one.plan] = one

    def add(self, outcome: Outcome) -> None:
        """Add a line to the file."""
        with self._lock:
            self.found[outcome.model, outcome.plan] = outcome
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    def open(self, model: str, plans: Iterable[str], again: Sequence[str] = ()) -> list[str]:
        """Return the plans under which a model is still to be tried, or to be tried ``again`` by its outcome."""
        plain = self.found.get((model, PLAIN))
        if plain is not None and plain.outcome == UNTRAINED and UNTRAINED not in again and FAILED not in again:
            return []
        return [plan for plan in plans if self._open(self.found.get((model, plan)), again)]

    @staticmethod
    def _open(one: Outcome | None, again: Sequence[str]) -> bool:
        return one is None or one.outcome in again or (FAILED in again and one.outcome != PASSES)
