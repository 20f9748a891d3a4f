"""What happened to a run: the launcher's log tells when ranks were started, which was lost, and where they went on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .display import printable

LAUNCHER_LOG = Path("logs") / "launcher.log"
STARTS, ENDS, STOPPED, AGAIN = "starting the ranks", "the ranks ended after", "as they were asked to", "starting again"

Kind = Literal["start", "end", "stop", "fault", "restart", "other"]


@dataclass
class Event:
    """At ``time``, a text of the clock, something of this kind happened; ``details`` are further lines about it."""

    time: str
    kind: Kind
    text: str
    details: list[str] = field(default_factory=list)


def events(folder: Path) -> list[Event]:
    """Return the events of a run in their order; none if it has no log of its launcher, as under torchrun."""
    try:
        lines = (folder / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Event] = []
    for line in map(printable, lines):
        time, _, text = line.partition(" ")
        if not re.fullmatch(r"\d\d:\d\d:\d\d", time):
            time, text = "", line
        kind = _kind(text) if time else "other"
        if kind == "other" and found and found[-1].kind == "start" and time:
            found.append(Event(time, "fault", text))
        elif kind == "other" and found:
            found[-1].details.append(text)
        else:
            found.append(Event(time, kind, text))
    return found


def _kind(text: str) -> Kind:
    if text.startswith(STARTS):
        return "start"
    if text.startswith(ENDS):
        return "stop" if STOPPED in text else "end"
    return "restart" if text.startswith(AGAIN) else "other"


def restarts(found: list[Event]) -> int:
    """Return how often the launcher has started ranks again after a fault."""
    return sum(event.kind == "restart" for event in found)


def went_on_from(found: list[Event]) -> list[int]:
    """Return the steps from which the ranks have gone on after a fault, in order."""
    steps = (re.search(r"step_(\d+)", event.text) for event in found if event.kind == "restart")
    return sorted({int(step[1]) if step else 0 for step in steps})


def log_tails(folder: Path, lines: int) -> list[tuple[str, str]]:
    """Return the name of each rank's log and its last ``lines`` lines."""
    paths = sorted((folder / "logs").glob("rank_*.log"), key=lambda path: (len(path.name), path.name))
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found.append((path.name, "\n".join(map(printable, text.splitlines()[-lines:]))))
    return found
