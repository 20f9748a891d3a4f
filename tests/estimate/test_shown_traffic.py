"""What ``show`` lists of a step is all that ranks hand to their communicators in it, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from counting import counted
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config import build_optimizer
from shardwise.launch.subject import load_anywhere, subject, with_device_choices
from shardwise.lower.compiled import Compiled

TINY = [
    "model.width=16",
    "model.layers=2",
    "model.heads=4",
    "model.vocabulary=256",
    "data.sequence_length=8",
    "data.batch_size=4",
]


def shown(given: list[str]) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["show", *given, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def check(given: list[str]) -> dict[str, Any]:
    """What is shown is what is counted in a step of ranks that are threads."""
    found, config = shown(given), load_anywhere(None, given)
    model = subject(config, 1)
    compiled = with_device_choices(config, Compiled(model.module, model.plan, model.batches[0], model.loss))
    seen = counted(compiled, model.batches[0], build_optimizer(config))
    ranks = sorted({one["rank"] for one in found["collectives_of_step"]})
    assert len(ranks) == config.parallel.pp
    for rank in ranks:
        own = [one for one in found["collectives_of_step"] if one["rank"] == rank]
        times, nbytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for one in own:
            key = (one["kind"], ",".join(one["axes"]))
            times[key] += one["times"]
            nbytes[key] += one["nbytes"]
        every = [t for _, several in seen[rank] for t in several]
        assert times == Counter((t.kind, ",".join(t.axes)) for t in every)
        assert nbytes.total() == sum(t.nbytes for t in every) > 0
        assert all(n == sum(t.nbytes for t in every if (t.kind, ",".join(t.axes)) == key) for key, n in nbytes.items())
        sent = sum(t.ring(model.plan.mesh.axis_size(t.axes)) for t in every)
        assert sum(one["sent_bytes"] for one in own) == pytest.approx(sent, rel=1e-12)
    return found


FEW = [("1d", "none"), ("1d-sp", "full")]


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "recompute"), [
    pytest.param(tensor, recompute, marks=() if (tensor, recompute) in FEW else pytest.mark.full)
    for tensor in ("1d", "1d-sp") for recompute in ("none", "selective", "full")
])  # fmt: skip
def test_all_that_a_step_communicates_is_shown(tensor: str, recompute: str, tmp_path: Path) -> None:
    given = [*TINY, source(tmp_path), "parallel.tp=2", "parallel.dp=1", "parallel.microbatches=2",
    f"parallel.tensor={tensor}",
             f"parallel.recompute={recompute}"]  # fmt: skip
    found = check(given)
    units, step = found["collectives"], found["collectives_of_step"]
    both = sum(one["sent_bytes"] for one in step if one["of"] in ("forward", "recompute", "backward"))
    assert 2 * sum(one["sent_bytes"] for one in units) == both, "of two microbatches"
    again = [one for one in units if one["again"]]
    assert bool(again) == (recompute != "none") == any(one["of"] == "recompute" for one in step)
    assert all(one["again"] == one["forward"] and one["path"].startswith("blocks.") for one in again)
    assert {one["of"] for one in step} >= {"forward", "backward", "loss", "norm"}


def source(folder: Path) -> str:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return f"data.source={folder / 'text.txt'}"


SEVERAL = [
    ["parallel.dp=2", "parallel.zero=3", "parallel.pp=2", "parallel.tp=2", "parallel.microbatches=2",
    "parallel.recompute=full"],
    ["parallel.dp=4", "parallel.dp_replicate=2", "parallel.zero=2", "parallel.microbatches=1", "model.name=llama",
    "model.tied=true"],
    ["parallel.dp=1", "parallel.pp=2", "parallel.microbatches=2", "parallel.schedule=zb-h1"],
    ["parallel.tp=4", "parallel.dp=1", "parallel.tensor=2d", "parallel.recompute=full"],
    ["parallel.tp=2", "parallel.dp=2", "parallel.tensor_plan=auto", "parallel.recompute=selective"],
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("given", SEVERAL, ids=" ".join)
def test_so_is_that_of_messages_and_of_whole_buckets(given: list[str], tmp_path: Path) -> None:
    check([*TINY, source(tmp_path), *given])


def test_one_rank_communicates_nothing(tmp_path: Path) -> None:
    found = shown([*TINY, source(tmp_path), "parallel.dp=1"])
    assert found["collectives"] == found["collectives_of_step"] == []
