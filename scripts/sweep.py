#!/usr/bin/env python3
"""Train every architecture of the common libraries at tiny size under every kind of plan, and hold each against one
device in fp64.

    scripts/sweep.py                          # all models and plans that the results file has not yet
    scripts/sweep.py --only transformers/bert # the models whose name has this pattern in it
    scripts/sweep.py --again wrong crash      # also those with one of these outcomes ("failed": all but passes)
    scripts/sweep.py --page                   # run nothing: write scripts/sweep.json and docs/models.md

Each model first trains for two steps in plain torch; what does not is no model of the sweep.  Results go to
``sweep/results.jsonl`` (--results), a line for each model and plan as soon as it is known, so that an interrupted sweep
goes on where it was; the last line of a model and plan counts.  Models run in worker processes: one that crashes, or
gives no answer in time, is replaced.  Libraries that
are not installed are left out: scripts/sweeping/requirements.txt has those that the tests do not need.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONDENSED = ROOT / "scripts" / "sweep.json"
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "src")]


def main() -> None:
    """Run what the options say."""
    from sweeping import condensed
    from sweeping.case import Entry
    from sweeping.page import page
    from sweeping.results import Results
    from sweeping.serve import sweep
    from sweeping.zoo import LIBRARIES, library, ordered

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "sweep" / "results.jsonl")
    parser.add_argument("--only", metavar="PATTERN", default="", help="models whose name has this regular expression")
    parser.add_argument("--plans", nargs="*", help="these plans only")
    parser.add_argument("--again", nargs="*", default=[], metavar="OUTCOME", help="outcomes that are tried again")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=180.0, help="the seconds that a model may take under one plan")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    results = Results(given.results)
    if given.page:
        records = condensed.merged(condensed.read(CONDENSED), results.found.values())
        condensed.write(CONDENSED, records)
        (ROOT / "docs" / "models.md").write_text(page(records))
        return
    pattern = re.compile(given.only)
    found: list[Entry] = []
    for name in LIBRARIES:
        try:
            found += [entry for model, entry in library(name).items() if pattern.search(model)]
        except ImportError as error:
            print(f"{name}: not tried, {error}", file=sys.stderr)
    names = [entry.name for entry in ordered(found)]
    sweep(names, results, given.workers, given.limit, given.again, given.plans)


if __name__ == "__main__":
    main()
