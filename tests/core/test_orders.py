"""Timetables in a plan: read back unchanged, and refused by name where ranks could not compute by them."""

from __future__ import annotations

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.timetable import Timetable, first, rank_of_stage, read, to_texts
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.schedule import stage_ranks, timetable
from timetables import SYNCHRONOUS, numbers

TWO = ("F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 B1.0 F1.1 I1.1 W1.1")


def plan(*texts: str, ranks: int = 2, stages_per_rank: int = 1, microbatches: int = 2) -> Plan:
    return Plan.of(
        Mesh.of(pp=ranks), microbatches=microbatches, schedule="auto", stages_per_rank=stages_per_rank,
        timetable=tuple(texts),
    )  # fmt: skip


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_can_be_written_down(name: str) -> None:
    """And is what it was for fewer microbatches, too."""
    for ranks, m, v in numbers(name, 4, 9):
        table = timetable(name, ranks, m, v)
        assert read(to_texts(table), ranks, v, m) == table
        assert rank_of_stage(table) == stage_ranks(name, ranks, ranks * v)
        for fewer in range(1, m):
            left = first(table, fewer)
            assert read(to_texts(left), ranks, v, fewer) == left


def test_a_plan_keeps_it() -> None:
    made = pipeline(Plan.of(microbatches=2), 2, "auto", timetable=TWO)
    assert (made.pipeline.stages_per_rank, made.pipeline.timetable) == (1, TWO)
    assert Plan.from_toml(made.to_toml()) == made
    assert made.replace(microbatches=1).pipeline.timetable == TWO  # a batch of one row
    looped = to_texts(timetable("interleaved", 2, 2, 2))
    four = pipeline(Plan.of(microbatches=2), 2, "auto", timetable=looped, stages=[1, 2, 1, 1])
    assert four.pipeline.stages_per_rank == 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ((), 'schedule: "auto" needs a timetable; legal: one text for each rank .*`shardwise train`, which measures'),
        (TWO[:1], "timetable: .* is not legal; legal: 2 texts, one for each rank"),
        ((TWO[0], "F1.0 X1.0"), 'timetable, rank 1: "X1.0" is not legal; legal: F .forward., B'),
        ((TWO[0], "F1 B1"), 'timetable, rank 1: "F1" is not legal'),
        ((TWO[0], TWO[0]), "timetable: stage 0 is on ranks 0 and 1; legal: each stage on one rank"),
        ((TWO[0], ""), r"timetable, rank 1: its stages are none; legal: 1 \(stages_per_rank\) on every rank"),
        ((TWO[0], TWO[1] + " F2.0 B2.0"), "timetable, rank 1: its stages are 1, 2; legal: 1 "),
        ((TWO[0], TWO[1].replace("1.", "3.")), "timetable: no rank has stage 1; legal: stages 0 to 1"),
        (("F0.0 B0.0", "F1.0 B1.0"), "timetable: it has 1 microbatches; legal: at least microbatches = 2"),
        ((TWO[0] + " W0.1", TWO[1]), "timetable, rank 0: W0.1 is there 2 times; legal: once"),
        ((TWO[0], "F1.0 F1.1 B1.0"),
        "rank 1: of stage 1 and microbatch 1 there is F1.1; legal: F1.1 and B1.1, or F1.1, I1.1 and W1.1"),
        ((TWO[0], TWO[1] + " W1.0"), "rank 1: of stage 1 and microbatch 0 there is F1.0, B1.0, W1.0; legal"),
        (("F0.0 F0.1 W0.0 I0.0 B0.1", TWO[1]), "rank 0 has W0.0 next, which waits for B0.0 on rank 0; legal: orders"),
        (("F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0"),
        "rank 0 has B0.0 next, which waits for B1.0 on rank 1; rank 1 has F1.1 next"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(texts: Timetable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(*texts)  # type: ignore[arg-type]


def test_other_schedules_have_their_own() -> None:
    with pytest.raises(ConfigError, match='timetable: "1f1b" has its own; legal: schedule = "auto"'):
        Plan.of(Mesh.of(pp=2), microbatches=2, timetable=TWO)
    with pytest.raises(ConfigError, match='"auto" needs a timetable'):
        pipeline(Plan.of(microbatches=2), 2, "auto")
    with pytest.raises(ConfigError, match=r"its stages are 0; legal: 2 \(stages_per_rank\)"):
        pipeline(Plan.of(microbatches=2), 2, "auto", 2, timetable=TWO)
