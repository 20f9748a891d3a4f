"""No host read, no blocking copy and no tensor on another device in a step, nor in the gap between two steps: on a fake GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake import environment

from zoo import NAMES

PLANS = ("fp32", "bf16", "fp16", "selective", "full", "dp", "zero3", "tp", "2d", "pp")
GROUPS = 4  # processes: each imports torch and transformers once


def run(cases: Sequence[str], seconds: int = 250) -> dict[str, dict[str, object]]:
    """What :mod:`steps` prints of each case, in a process on the fake device."""
    command = [sys.executable, str(Path(__file__).with_name("steps.py")), *cases]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == list(cases), done.stderr[-3000:]
    return {one["case"]: one for one in found}


def check(cases: Sequence[str]) -> None:
    found = run(cases, 60 * len(cases))
    bad = [f"{case}: {one['error'] or one['waits']}" for case, one in found.items() if one["error"] or one["waits"]]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_waits(group: int) -> None:
    """Each model of the zoo under one plan, all plans in turn."""
    check([f"{name}:{PLANS[at % len(PLANS)]}" for at, name in enumerate(NAMES) if at % GROUPS == group])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_under_any_plan(name: str) -> None:
    check([f"{name}:{plan}" for plan in PLANS])


def test_planted_mistakes_are_found() -> None:
    found = run([f"own mlp:bf16+{what}" for what in ("read", "copy", "unpinned", "early", "devices")])
    errors = {case.partition("+")[2]: str(one["error"]) for case, one in found.items()}
    waits = {case.partition("+")[2]: " ".join(dict(one["waits"])) for case, one in found.items()}  # type: ignore[call-overload]
    assert "DataDependentOutputException" in errors["read"]
    assert "FakeTensorDeviceMismatchError" in errors["devices"]
    assert "blocking copy cpu -> cuda of (3,)" in waits["copy"] and "unpinned copy" in waits["unpinned"]
    assert "wait for the step that has just been issued" in waits["early"]
