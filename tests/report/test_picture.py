"""The picture of a step: every rank, each as early as its lanes, its waits and the other ranks allow; and a legend."""

from __future__ import annotations

from collections import defaultdict
from xml.etree import ElementTree as ET

import pytest
import torch

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.lower.step import lower
from shardwise.models.gpt import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.report.picture import picture, place, rows
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def gpt() -> Trace:
    batch = {key: torch.zeros(8, 6, dtype=torch.long) for key in ("input_ids", "labels")}
    return trace(GPT(vocabulary=11, width=8, layers=4, heads=2, context=8), batch)


def planned(schedule: str, pp: int, dp: int, zero: int = 0, microbatches: int = 4) -> Plan:
    plan = data_parallel(Plan.of(microbatches=microbatches), dp, zero)
    return pipeline(plan, pp, schedule) if pp > 1 else plan


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "zero", "batches"),
    [
        ("1f1b", 1, 2, 0, 1),
        ("1f1b", 2, 1, 0, 1),
        ("zb-h1", 3, 1, 0, 1),
        ("interleaved", 2, 2, 3, 1),
        ("zbv", 3, 2, 0, 1),
        ("pipedream-2bw", 3, 1, 0, 3),
        ("post-validate", 3, 1, 1, 3),
    ],
)
def test_instructions_lie_as_early_as_everything_allows(
    gpt: Trace, schedule: str, pp: int, dp: int, zero: int, batches: int
) -> None:
    later = schedule == "post-validate"
    plan = planned("zb-h1" if later else schedule, pp, dp, zero, microbatches=6)
    plan = plan.replace(norm="post-validate") if later else plan
    found = rows(lower(gpt, plan, batches=batches), plan.mesh)
    assert len(found) == (plan.mesh.size if plan.mesh.size <= 4 else pp)
    spans = place(found, plan.mesh)
    sent: dict[object, list[float]] = defaultdict(list)
    arrived: dict[object, list[float]] = defaultdict(list)
    together: dict[object, list[list[float]]] = defaultdict(list)
    home = {rank: row.program for row in found for rank in plan.mesh.members(row.program.coordinates)}
    shown = {id(row.program): [other.rank for other in found if other.program is row.program] for row in found}
    for row, own in zip(found, spans, strict=True):
        last: dict[object, float] = {}
        meetings: dict[object, list[float]] = defaultdict(list)
        for at, (one, (start, stop)) in enumerate(zip(row.program.instructions, own, strict=True)):
            assert start >= last.get(one.queue, 0.0) and stop > start  # a queue does one thing at a time
            assert all(start >= own[wait][1] for wait in one.waits)
            last[one.queue] = stop
            if one.peer is not None:
                other = plan.mesh.offset(row.rank, *one.peer, wrap=True)
                other = other if other in shown[id(home[other])] else shown[id(home[other])][0]
                ends = (row.rank, other) if one.op is Op.SEND else (other, row.rank)
                (sent if one.op is Op.SEND else arrived)[*ends, one.channel].append(
                    stop if one.op is Op.SEND else start
                )
            elif one.axes and at >= 0:
                meetings[plan.mesh.group(row.rank, one.axes), one.axes, one.lane].append(start)
        for key, times in meetings.items():
            together[key].append(times)
    assert sent.keys() == arrived.keys() and bool(sent) == (pp > 1)
    for key, times in sent.items():
        assert all(start >= stop for start, stop in zip(arrived[key], times, strict=True))
    for every in together.values():
        assert all(times == every[0] for times in every)  # ranks begin a collective together
    assert all(own[0][0] == 0 for own in spans[:1])


def test_many_ranks_are_told_by_their_classes(gpt: Trace) -> None:
    plan = planned("1f1b", 2, 4)
    found = rows(lower(gpt, plan), plan.mesh)
    assert [row.words for row in found] == [
        "rank 0, and 3 ranks that do the same",
        "rank 4, and 3 ranks that do the same",
    ]
    assert [row.words for row in rows(lower(gpt, planned("1f1b", 1, 2)), Mesh.of(dp=2))] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("schedule", "pp", "dp", "zero"), [("1f1b", 1, 2, 0), ("1f1b", 2, 2, 3), ("zb-h1", 3, 1, 0)])
def test_every_lane_of_every_rank_and_a_legend_of_all_letters(
    gpt: Trace, schedule: str, pp: int, dp: int, zero: int
) -> None:
    plan = planned(schedule, pp, dp, zero)
    programs = lower(gpt, plan)
    sheet = picture(programs, plan.mesh, "A step", ["head", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "tail"])
    root = ET.fromstring(sheet.svg())
    boxes = [one for one in root.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    found = rows(programs, plan.mesh)
    assert len(boxes) == sum(len(row.program.instructions) for row in found)
    texts = [one.text or "" for one in root.iter(f"{SVG}text")]
    for row in found:
        assert row.words in texts
    for lane in {lane for row in found for lane in row.lanes}:
        assert texts.count(str(lane)) >= sum(lane in row.lanes for row in found)
    legend = " ".join(texts)
    ops = {one.op for row in found for one in row.program.instructions}
    assert ops <= set(texts)
    for letter, words in (("u", "u: a unit"), ("m", "m: a microbatch"), ("b", "b: a bucket")):
        drawn = any(text[0] == letter and text[1:].isdigit() for text in texts if len(text) > 1)
        assert drawn and words in legend
    assert "u0 head, u1 blocks.0" in legend and "u5 tail" in legend
    assert ("a brown one from a SEND" in legend) == (pp > 1) == (Op.SEND in ops)
    lines = list(root.iter(f"{SVG}line"))
    assert len([one for one in lines if one.get("stroke") == "#b9771d"]) == sum(
        one.op is Op.SEND for row in found for one in row.program.instructions
    )
    taken = [[float(one.get(key, "")) for key in ("x", "y", "width", "height")] for one in boxes]
    for at, (x, y, width, height) in enumerate(taken):
        for x2, y2, width2, height2 in taken[at + 1 :]:
            assert x >= x2 + width2 or x2 >= x + width or y >= y2 + height2 or y2 >= y + height  # none hides another
    for one in (*boxes, *root.iter(f"{SVG}text")):
        assert 0 <= float(one.get("x", "")) <= sheet.width and 0 <= float(one.get("y", "")) <= sheet.height


def test_programs_that_wait_in_a_circle_are_refused() -> None:
    def program(stage: int, *ops: tuple[Op, int]) -> Program:
        found = tuple(
            Instruction(op, unit=0, microbatch=0, peer=("pp", k), lane=Lane.SEND if op is Op.SEND else Lane.RECEIVE,
                        waits=(at - 1,) if at else ())
            for at, (op, k) in enumerate(ops)
        )  # fmt: skip
        return Program(f"stage {stage}", (("pp", stage),), found)

    programs = [program(0, (Op.RECEIVE, 1), (Op.SEND, 1)), program(1, (Op.RECEIVE, -1), (Op.SEND, -1))]
    mesh = Mesh.of(pp=2)
    with pytest.raises(ShardwiseError, match="wait for each other in a circle"):
        place(rows(programs, mesh), mesh)


def test_a_model_of_many_units_names_some(gpt: Trace) -> None:
    plan = planned("1f1b", 1, 1)
    svg = picture(lower(gpt, plan), plan.mesh, "A step", [f"blocks.{n}" for n in range(40)]).svg()
    assert "u5 blocks.5, ..., u39 blocks.39" in svg.replace("\n", " ") and "blocks.20" not in svg
