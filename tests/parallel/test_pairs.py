"""Which tasks of a timetable run as pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.timetable import Task, Timetable, needs, read, to_texts
from shardwise.parallel.overlap import Group, neighbours, overlapped, paired, together
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.schedule import timetable

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1), ("interleaved", 2), ("zbv", 2), ("dualpipe-v", 2)]


def played(groups: Sequence[Sequence[Group]], last: int) -> bool:
    """Whether the ranks can do their groups one after the other, both tasks of a pair at once."""
    place, done = [0] * len(groups), set[tuple[str, int, int]]()
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(groups):
            while place[rank] < len(mine) and all(done.issuperset(needs(t, last)) for t in mine[place[rank]]):
                done |= {("B" if t.kind == "I" else t.kind, t.stage, t.microbatch) for t in mine[place[rank]]}
                place[rank] += 1
                moved = True
    return all(at == len(mine) for at, mine in zip(place, groups, strict=True))


@pytest.mark.parametrize(("name", "each"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), list(itertools.product((2, 3, 4), (2, 4, 8))))
def test_pairs_keep_the_order_and_can_be_played(name: str, each: int, ranks: int, microbatches: int) -> None:
    if microbatches % ranks and name == "interleaved":
        pytest.skip("not legal")
    if name == "dualpipe-v" and microbatches < 2 * ranks:
        pytest.skip("not legal")
    table: Timetable = timetable(name, ranks, microbatches, each)
    groups = paired(table)
    assert tuple(tuple(task for group in mine for task in group) for mine in groups) == table
    assert played(groups, ranks * each - 1)
    pairs = [group for mine in groups for group in mine if len(group) == 2]
    assert all(a.microbatch != b.microbatch and "F" in (a.kind, b.kind) and a.kind != b.kind for a, b in pairs)


def test_dualpipe_has_many_pairs_and_gpipe_hardly_any() -> None:
    found = {name: paired(timetable(name, 4, 16, each)) for name, each in SCHEDULES}
    number = {name: sum(len(group) == 2 for mine in groups for group in mine) for name, groups in found.items()}
    assert number["gpipe"] <= 1  # where the last rank turns round
    assert number["dualpipe-v"] > 40


def test_a_circle_is_refused() -> None:
    with pytest.raises(ConfigError, match="in a circle"):
        paired(((Task("F", 1, 0), Task("F", 0, 0)),))


def test_microbatches_of_one_rank_come_together() -> None:
    (tasks,) = read(("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2",), 1, 1, 3)
    (text,) = to_texts((tuple(together(tasks)),))
    assert text == "F0.0 F0.1 B0.0 B0.1 F0.2 B0.2"
    assert [len(group) for group in neighbours(together(tasks))] == [2, 2, 1, 1]


def test_neighbours_are_of_one_stage_and_kind() -> None:
    (tasks,) = timetable("gpipe", 1, 3, 1)
    assert [tuple(t.microbatch for t in group) for group in neighbours(tasks[:3])] == [(0, 1), (2,)]
    assert list(neighbours([Task("F", 0, 0), Task("F", 1, 0), Task("F", 1, 1)])) == [
        (Task("F", 0, 0),), (Task("F", 1, 0), Task("F", 1, 1)),
    ]  # fmt: skip


@pytest.mark.parametrize(("plan", "wrong"), [
    (Plan.of(microbatches=2), "tp, cp or ep of 2 or more"),
    (Plan.of(Mesh.of(tp=2)), "microbatches of 2 or more"),
    (pipeline(Plan.of(Mesh.of(tp=2), microbatches=2), 2, "pipedream-2bw"), "another schedule"),
])  # fmt: skip
def test_plans_without_pairs_are_refused(plan: Plan, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        overlapped(plan, "pairs")
    assert overlapped(plan, "none") == plan


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match='"none", "pairs"'):
        overlapped(Plan.of(), "all")  # type: ignore[arg-type]
