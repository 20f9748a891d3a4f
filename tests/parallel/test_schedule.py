"""Every schedule computes everything once, in an order that runs, within the memory that its paper says."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import Task
from shardwise.parallel.schedule import ORDERS, check_schedule, stage_ranks, timetable
from shardwise.parallel.versions import double_buffered_version, stashed_version
from timetables import NAMES, SYNCHRONOUS, alive, numbers, play

UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}


def test_every_schedule_has_an_order() -> None:
    assert [*ORDERS] == [*SCHEDULES]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_everything_is_computed_once_and_in_order(name: str) -> None:
    schedule = SCHEDULES[name]
    for p, m, v in numbers(name):
        table = timetable(name, p, m, v)
        assert len(table) == p
        home: dict[int, int] = {}
        lanes: dict[tuple[str, int], list[int]] = {}
        for rank, tasks in enumerate(table):
            for kind, stage, microbatch in tasks:
                assert home.setdefault(stage, rank) == rank == stage_ranks(name, p, p * v)[stage]
                for lane in {"F": "F", "B": "IW"}.get(kind, kind):
                    lanes.setdefault((lane, stage), []).append(microbatch)
        assert sorted(home) == list(range(p * v)) and set(Counter(home.values()).values()) == {v}
        assert lanes == {(kind, stage): list(range(m)) for kind in "FIW" for stage in range(p * v)}
        kinds = {task.kind for tasks in table for task in tasks}
        assert ("W" in kinds) == schedule.splits or name == "dualpipe-v"
        if schedule.splits and name != "dualpipe-v":
            assert kinds == set("FIW")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_every_timetable_runs(name: str) -> None:
    for p, m, v in numbers(name):
        played = play(timetable(name, p, m, v), UNIT)
        assert sum(map(len, played)) == sum(map(len, timetable(name, p, m, v)))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_activations_are_the_papers(name: str) -> None:
    for p, m, v in numbers(name):
        group = -(-m // max(1, m // p))
        most = {
            "naive": 1, "gpipe": m, "1f1b": p, "interleaved": (v - 1) * group + 2 * p - 1, "zb-h1": p,
            "zb-h2": 2 * p - 1,
            "zbv": 2 * p, "dualpipe-v": 2 * p + 1,
        }[name]  # fmt: skip
        found = [alive(tasks) for tasks in timetable(name, p, m, v)]
        assert max(found) <= min(most, m * v), (p, m, v)
        if name == "1f1b":
            assert found == [min(p - rank, m) for rank in range(p)]
        elif m >= 2 * p + 1:
            assert max(found) == most, (p, m, v)
        if name == "interleaved" and m % p == 0 and m > p:  # Megatron-LM: 1 + (p - 1) / (p v) of 1F1B's p whole stages
            assert max(found) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_one_rank_alternates() -> None:
    both = tuple(Task(kind, 0, m) for m in range(3) for kind in "FB")
    parts = tuple(Task(kind, 0, m) for m in range(3) for kind in "FIW")
    assert timetable("1f1b", 1, 3) == timetable("pipedream", 1, 3) == (both,)
    assert timetable("zb-h1", 1, 3) == timetable("zb-h2", 1, 3) == (parts,)
    assert alive(timetable("interleaved", 1, 5, 3)[0]) == 3
    assert alive(timetable("zbv", 1, 5)[0]) == 2


def test_known_orders() -> None:
    """Drawn in Megatron-LM (figures 3 and 4) and in the zero-bubble paper: 4 ranks, 8 microbatches, the last and the
    first rank.
    """

    def words(name: str, rank: int, v: int | None = None) -> str:
        return " ".join(f"{t.kind}{t.microbatch + 1}{chr(39) * (t.stage // 4)}" for t in timetable(name, 4, 8, v)[rank])

    assert words("1f1b", 0) == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"
    assert words("1f1b", 3) == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"
    assert words("interleaved", 3, 2).startswith("F1 F2 F3 F4 F1' B1' F2' B2' F3' B3' F4' B4' F5 B1 F6 B2")
    assert words("interleaved", 0, 2).startswith(
        "F1 F2 F3 F4 F1' F2' F3' F4' F5 F6 F7 B1' F8 B2' F5' B3' F6' B4' F7' B1"
    )
    assert words("zb-h1", 3).startswith("F1 I1 F2 I2 F3 I3 F4 I4 W1 F5 I5 W2")
    assert words("zb-h1", 0).startswith("F1 F2 F3 F4 I1 W1 F5 I2 W2")
    assert words("zb-h2", 0).startswith("F1 F2 F3 F4 F5 F6 F7 I1 W1 F8 I2 W2 I3 W3")


def test_places() -> None:
    assert stage_ranks("interleaved", 3, 6) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("1f2b", 2, 4), r'schedule: \'1f2b\' is not legal; legal: "naive", .*Did you mean "1f1b"'),
        (("1f1b", 0, 4), "pp: 0 is not legal"),
        (("1f1b", 2, 0), "microbatches: 0 is not legal"),
        (("naive", 2, 4), 'microbatches: 4 is not legal with schedule "naive" on 2 ranks; legal: 1'),
        (("1f1b", 2, 4, 2), r'stages_per_rank: 2 is not legal with .*legal: 1\. .*"interleaved", "zbv", "dualpipe-v"'),
        (("interleaved", 2, 4, 1), 'stages_per_rank: 1 is not legal with schedule "interleaved"; legal: at least 2'),
        (
            ("zbv", 2, 4, 3),
            r'stages_per_rank: 3 is not legal with schedule "zbv"; legal: 2\. Schedules for 3: "interleaved"',
        ),
        (("zbv", 2, 4, True), "stages_per_rank: True is not legal"),
        (
            ("pipedream-2bw", 4, 3),
            'microbatches: 3 is not legal with schedule "pipedream-2bw" on 4 ranks; legal: at least 4',
        ),
    ],
)
def test_refused(args: tuple[str, int, int], words: str) -> None:
    for function in (timetable, check_schedule):
        with pytest.raises(ConfigError) as found:
            function(*args)
        assert re.search(words, str(found.value)), str(found.value)


@pytest.mark.parametrize("n", range(1, 9))
def test_pipedream_uses_the_weights_that_the_order_leaves(n: int) -> None:
    """Played as a program: a stage updates after each backward, and a forward finds the version that its rank has by
    then.
    """
    for stage, tasks in enumerate(timetable("pipedream", n, 30)):
        version, stashed = 0, {}
        for kind, _, m in tasks:
            if kind == "F":
                stashed[m] = version
            else:
                version += 1
        assert stashed == {m: stashed_version(m, stage, n) for m in range(30)}
        # n - s - 1 updates old once the pipeline is full: microbatch m would be the update m + 1 of one device.
        assert all(m - stashed_version(m, stage, n) == n - stage - 1 for m in range(n, 30))
        assert all(stashed_version(m, stage, n, vertical_sync=True) == stashed_version(m, 0, n) for m in range(30))


@pytest.mark.parametrize("n", range(1, 9))
def test_double_buffered_weights_are_there_when_needed(n: int) -> None:
    """No version is used before its update, and what is in the pipeline and the newest weights are two versions at
    most.
    """
    for size in range(n, n + 6):
        for tasks in timetable("pipedream-2bw", n, 5 * size):
            updates, alive_versions = 0, Counter[int]()
            for kind, _, m in tasks:
                version = double_buffered_version(m, size)
                assert version == max(0, m // size - 1) and version <= updates
                alive_versions[version] += 1 if kind == "F" else -1
                updates += kind == "B" and (m + 1) % size == 0
                assert len({v for v, count in alive_versions.items() if count} | {updates}) <= 2
            assert updates == 5
