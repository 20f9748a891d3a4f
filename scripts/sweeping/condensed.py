"""The results of a sweep as one record for each model, in a file that is kept with the code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sweeping.outcome import PASSES, PLAIN, UNTRAINED, Outcome


@dataclass
class Record:
    """All that is known of a model.

    ``reason`` says why it does not train in plain torch, and is empty if it does.  ``plans`` gives the outcome of each
    plan, ``errors`` the largest difference of those that were compared, ``texts`` the sentence of each that does not
    pass.  ``sharded`` is the share of the parameters outside of experts that tensor parallelism shards, ``whole`` the
    ops that each of its ranks computes whole, with their number, ``capture`` the seconds that the capture took.
    """

    model: str
    reason: str = ""
    parameters: int | None = None
    capture: float | None = None
    sharded: float | None = None
    plans: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """The library."""
        return self.model.split("/")[0]

    @property
    def family(self) -> str:
        """The family, by the library's name."""
        return self.model.split("/")[1]

    @property
    def head(self) -> str:
        """The head."""
        return self.model.split("/")[2]

    @property
    def trains(self) -> bool:
        """Whether it trains in plain torch."""
        return not self.reason

    def add(self, one: Outcome) -> None:
        """Take what came of one plan."""
        if one.plan == PLAIN:
            self.reason = one.text if one.outcome == UNTRAINED else ""
            self.parameters = one.parameters
            return
        self.plans[one.plan] = one.outcome
        self.texts.pop(one.plan, None)
        self.errors.pop(one.plan, None)
        if one.outcome != PASSES:
            self.texts[one.plan] = one.text
        if one.error is not None:
            self.errors[one.plan] = float(f"{one.error:.1e}")
        if one.capture is not None:
            self.capture = round(one.capture, 1)
        if one.plan == "tp":
            self.sharded, self.whole = one.sharded, one.whole


def read(path: Path) -> dict[str, Record]:
    """Return the records of a file, by model; none where there is no file."""
    return {one["model"]: Record(**one) for one in json.loads(path.read_text())} if path.exists() else {}


def merged(records: Mapping[str, Record], outcomes: Iterable[Outcome]) -> list[Record]:
    """Return records with newer outcomes, sorted by model."""
    found = dict(records)
    for one in outcomes:
        found.setdefault(one.model, Record(one.model)).add(one)
    return [found[name] for name in sorted(found)]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, a line for each."""
    path.write_text("[\n" + ",\n".join(json.dumps(_short(one), ensure_ascii=False) for one in records) + "\n]\n")


def _short(one: Record) -> dict[str, Any]:
    """Return a record without what it has not."""
    return {name: value for name, value in asdict(one).items() if value not in (None, "", {})}
