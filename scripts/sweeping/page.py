"""The page of results, ``docs/models.md``, made from the records of a sweep."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from sweeping.condensed import Record
from sweeping.of_transformers import LEFT_OUT
from sweeping.outcome import OUTCOMES, PASSES

PLANS = ("dp", "zero3", "pp", "tp", "tp-sp", "dp-pp-tp")
TITLES = {
    "dp": "dp 2, 2 microbatches",
    "zero3": "ZeRO-3 on 2",
    "pp": "pp 2 (1f1b), 2 microbatches",
    "tp": "tp 2 (1d)",
    "tp-sp": "tp 2 (1d-sp)",
    "dp-pp-tp": "dp 2 × pp 2 × tp 2, 2 microbatches",
}
TARGETS = {"dp": 99.0, "zero3": 99.0, "pp": 98.0, "tp": 98.0, "tp-sp": 98.0, "dp-pp-tp": 98.0}
"""The percentage of the models which train in plain torch that is to pass."""
SHARDED, SHARDED_MODELS = 0.9, 95.0
"""So large a share of the parameters outside of experts is to be sharded by tp in so many percent of the models."""
LIBRARIES = ("transformers", "torchvision", "timm", "diffusers", "peft", "torch_geometric")
SHOWN = 12  # so many models are named with a reason; of the others only the number
LONGEST = 260  # characters of a sentence

INTRODUCTION = """# Which models train

`scripts/sweep.py` builds every architecture of the common libraries at tiny size, with each
of its heads that trains, and holds it under six plans against one device in fp64
(`shardwise verify`): two steps, on batches of 7 and 5 rows that are padded at the right and
ignore unequal numbers of targets. This page is made from its results.

A model counts if it trains for two steps in plain torch, as the sweep builds and feeds it;
those that do not are named at the end. A plan **passes** if every loss, gradient, parameter
and buffer is that of one device within 1e-10. It is **refused** where shardwise says in one
sentence, before the first step, that it cannot do it. Speech models that have SpecAugment are tried
with it.

| command | what it does |
|---|---|
| `.venv/bin/pip install --no-deps --requirement scripts/sweeping/requirements.txt` | installs the libraries |
| `.venv/bin/python scripts/sweep.py --only transformers/bert` | some models |
| `.venv/bin/python scripts/sweep.py --workers 4` | all that have no result yet |
| `.venv/bin/python scripts/sweep.py --again failed` | those that did not pass, once more |
| `.venv/bin/python scripts/sweep.py --page` | this page |

Results go to `sweep/results.jsonl`, a line for each model and plan; `scripts/sweep.json` keeps them in short.
"""


def page(records: Sequence[Record]) -> str:
    """Return the page."""
    ran = [one for one in records if one.trains and one.plans]
    tried = (
        f"Of the models that the sweep can build, {len(records)} have been tried so far, not all under every plan; "
        "a sweep goes on\nwhere the one before has stopped.\n"
    )
    parts = [INTRODUCTION, tried, totals(ran), tensor(ran), families(ran), failures(ran), untrained(records)]
    return "\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def percent(part: int, whole: int) -> str:
    """Return a percentage, rounded down so that only all is 100."""
    return f"{part * 1000 // whole / 10:g} %" if whole else "-"


def passed(records: Iterable[Record], plan: str) -> tuple[int, int]:
    """Return how many models pass under a plan, of how many that were tried under it."""
    tried = [one.plans[plan] for one in records if plan in one.plans]
    return tried.count(PASSES), len(tried)


def totals(ran: Sequence[Record]) -> str:
    """Return the numbers by library and plan, and what came of the others."""
    rows: list[list[object]] = []
    for name in [*LIBRARIES, "all"]:
        own = [one for one in ran if name in (one.library, "all")]
        if own:
            of_plans = (f"{good} of {n}" if n else "-" for good, n in (passed(own, plan) for plan in PLANS))
            rows.append([name, len({(one.library, one.family) for one in own}), len(own), *of_plans])
    shares = [percent(*passed(ran, plan)) for plan in PLANS]
    wanted = [f"{TARGETS[plan]:g} %" for plan in PLANS]
    rows += [["passes", "", "", *shares], ["to reach", "", "", *wanted]]
    counts = {plan: Counter(one.plans[plan] for one in ran if plan in one.plans) for plan in PLANS}
    outcomes = [[outcome, *(counts[plan][outcome] for plan in PLANS)] for outcome in OUTCOMES]
    plans = "; ".join(f"{name}: {title}" for name, title in TITLES.items())
    return (
        f"## In numbers\n\nThe plans are {plans}.\n\n"
        + table(["library", "families", "models", *PLANS], rows)
        + "\n"
        + table(["outcome", *PLANS], outcomes)
    )


def tensor(ran: Sequence[Record]) -> str:
    """Return what tensor parallelism shards, and what it leaves whole."""
    known = [one for one in ran if one.sharded is not None]
    good = sum(one.sharded >= SHARDED for one in known if one.sharded is not None)
    ops: dict[str, set[str]] = defaultdict(set)
    for one in known:
        for op in one.whole:
            ops[op].add(one.model)
    rows = [
        [f"`{op}`", len(models), _named(sorted(models))] for op, models in sorted(ops.items(), key=lambda i: -len(i[1]))
    ]
    low = sorted((one.sharded, one.model) for one in known if one.sharded is not None and one.sharded < SHARDED)
    few = [[model, f"{share:.0%}"] for share, model in low]
    captures = sorted(one.capture for one in ran if one.capture is not None)
    median = captures[len(captures) // 2] if captures else 0
    return (
        f"## What tp shards\n\nIn {good} of {len(known)} models ({percent(good, len(known))}; to reach: "
        f"{SHARDED_MODELS:g} %) tp 1d shards at least {SHARDED:.0%} of the parameters outside of experts. "
        f"The median capture took {median:.0f} s, on a machine shared with other work.\n\n"
        + ("Models of which it shards less:\n\n" + table(["model", "sharded"], few) if few else "")
        + "\n"
        + ("Ops that every rank computes whole:\n\n" + table(["op", "models", "of these"], rows) if rows else "")
    )


def families(ran: Sequence[Record]) -> str:
    """Return a row for each family: how many of its heads pass under each plan."""
    parts = [
        "## By family\n\nA cell says how many of the family's heads pass; a dash, that none was tried. `error` is the "
        "largest error of a\ntensor, relative to its norm, under all plans that pass. Where it is above 1e-10, the "
        "tensor is rounding (a bias before\na BatchNorm), and one device differs from itself by as much with the rows "
        "in another order. `capture` is the time of\nthe head that took longest, on a machine shared with other work.\n"
    ]
    for library in LIBRARIES:
        own: dict[str, list[Record]] = defaultdict(list)
        for one in ran:
            if one.library == library:
                own[one.family].append(one)
        if not own:
            continue
        rows = []
        for family, several in sorted(own.items()):
            cells = []
            for plan in PLANS:
                good, tried = passed(several, plan)
                cells.append("-" if not tried else f"{good}" if good == tried else f"**{good} of {tried}**")
            shares = [one.sharded for one in several if one.sharded is not None]
            share = f"{min(shares):.0%}" if shares else "-"
            numbers = [share, largest_error(several), longest_capture(several)]
            rows.append([family, ", ".join(one.head for one in several), *cells, *numbers])
        parts.append(f"### {library}\n\n" + table(["family", "heads", *PLANS, "sharded", "error", "capture"], rows))
    return "\n".join(parts)


def largest_error(several: Iterable[Record]) -> str:
    """Return the largest difference of the plans that pass; a dash where none was compared."""
    found = [error for one in several for plan, error in one.errors.items() if one.plans[plan] == PASSES]
    return re.sub(r"e-0", "e-", f"{max(found):.0e}") if any(found) else "0" if found else "-"


def longest_capture(several: Iterable[Record]) -> str:
    """Return the seconds of the capture that took longest; a dash where there was none."""
    found = [one.capture for one in several if one.capture is not None]
    return f"{max(found):.1f} s" if found else "-"


def failures(ran: Sequence[Record]) -> str:
    """Return every sentence of a refusal or failure, with the models and plans that have it."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in ran:
        for plan, text in one.texts.items():
            found[one.plans[plan], sentence(text)][one.model].append(plan)
    rows = []
    for (outcome, text), models in sorted(found.items(), key=lambda item: (OUTCOMES.index(item[0][0]), -len(item[1]))):
        plans = sorted({plan for several in models.values() for plan in several}, key=PLANS.index)
        rows.append([outcome, len(models), text, ", ".join(plans), _named(sorted(models))])
    return "## Refusals and failures\n\n" + table(["outcome", "models", "what it says", "plans", "which"], rows)


def untrained(records: Sequence[Record]) -> str:
    """Return what does not train in plain torch, with the reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in records:
        if not one.trains:
            left_out = LEFT_OUT.get(one.family) if one.library == "transformers" else None
            found[sentence(left_out or one.reason)].append(one.model)
    most = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [[len(models), text, _named(models)] for text, models in most]
    return (
        "## Not models of the sweep\n\nThese do not train in plain torch as the sweep builds and feeds them: "
        "they have no loss, "
        "want inputs or libraries that the sweep does not have, or their small config does not fit.\n\n"
        + table(["models", "why", "which"], rows)
    )


def sentence(text: str) -> str:
    """Return a message as a cell: numbers and names of layers in it do not make it another one."""
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = re.sub(r"/\S*/(site-packages/|(?=scripts/))", "", text)
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _named(models: Sequence[str]) -> str:
    more = f" and {len(models) - SHOWN} more" if len(models) > SHOWN else ""
    return ", ".join(models[:SHOWN]) + more
