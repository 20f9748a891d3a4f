"""``shardwise report`` writes one page of HTML about a run."""

from __future__ import annotations

from pathlib import Path

from shardwise.report.html import write_page
from shardwise.report.tables import print_json


def run(folder: Path, out: Path | None, json: bool) -> None:
    """Write the page of the run in ``folder`` into ``out``, by default ``report.html`` in that folder."""
    out = out or folder / "report.html"
    facts = write_page(folder, out)
    if json:
        print_json({"report": str(out), "run_dir": str(folder), "state": facts.state, "state_words": facts.state_words})
    else:
        print(out)
