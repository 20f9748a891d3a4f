"""Training stays on the device: no step of a run, and nothing between two steps, makes the host wait.

The engine, the loader and the metrics run as they do on a GPU, on a device without hardware (``card.py``), in a process
of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from resident import FAULTS, MODELS, PLANS, WAITED

TESTS = Path(__file__).parents[1]
EXPERTS = [name for name in MODELS if name.startswith("mixtral")]
LOOPED = {(name, plan): "transformers::grouped_mm_fallback" for name in EXPERTS for plan in ("fp32", "fp16")}
LOOPED |= {(name, plan): "shardwise::grouped_mm" for name in EXPERTS for plan in ("tp", "2d")}
"""Experts are multiplied one by one, after a look at their sizes, where torch has no kernel for all of them: in other
dtypes than bf16, and where ranks have parts of an expert that are not whole 16 bytes, as of models as small as these.
"""
UNCUT = {"own tagger", "own mlp"}  # of one unit, so of one stage
EACH = 4  # the models that share a process


def legal(name: str) -> list[str]:
    """The plans of a model."""
    return [plan for plan in PLANS if not (plan == "pp" and name in UNCUT)]


def once() -> list[list[str]]:
    """Each model under one plan, the plans in turn, in groups that share a process; other pairs are for test-all."""
    cases = []
    for i, name in enumerate(MODELS):
        plans = [plan for plan in legal(name) if (name, plan) not in LOOPED]
        cases.append(f"{name}:{plans[i % len(plans)]}")
    return [cases[start : start + EACH] for start in range(0, len(cases), EACH)]


def waits(*cases: str) -> dict[str, dict[str, int]]:
    """What made the host wait, by case; that the trace says so of an op is checked."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(shardwise.__file__).parents[1]), str(TESTS)))}
    done = subprocess.run(
        [sys.executable, TESTS / "resident.py", *cases], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line.removeprefix(WAITED)) for line in done.stdout.splitlines() if line.startswith(WAITED)]
    for one in lines:
        name, plan, *_ = one["case"].split(":")
        assert one["reads"] == ([LOOPED[name, plan]] if (name, plan) in LOOPED else [])
    return {one["case"]: one["waits"] for one in lines}


@pytest.mark.slow
def test_what_makes_the_host_wait_is_found() -> None:
    """Each planted fault is, and nothing else; without one there is none."""
    found = waits("own mlp:fp32", *(f"own mlp:fp32:{fault}" for fault in FAULTS))
    assert [bool(one) for one in found.values()] == [False] + [True] * len(FAULTS)
    expected = {
        "read": "the host reads",
        "copy": "a blocking copy",
        "pageable": "pageable memory",
        "early": "this very step",
    }
    for fault, text in expected.items():
        assert len(found[f"own mlp:fp32:{fault}"]) == 1 and text in next(iter(found[f"own mlp:fp32:{fault}"]))


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("cases", once(), ids=", ".join)
def test_the_host_does_not_wait(cases: list[str]) -> None:
    assert waits(*cases) == {case: {} for case in cases}


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_host_waits_under_no_plan(name: str) -> None:
    found = waits(*(f"{name}:{plan}" for plan in legal(name)))
    for plan in legal(name):
        case = found[f"{name}:{plan}"]
        if (name, plan) in LOOPED:
            own = ("grouped_mm_fallback", "weight_gradients.py", "nn/grouped.py")
            assert case and all(any(place in what for place in own) for what in case)
        else:
            assert case == {}
