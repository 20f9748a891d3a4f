"""Recorded steps read back: ranks on one axis of time, instructions as boxes, and what the simulator makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.errors import ConfigError
from shardwise.core.recording import Event, RankStep
from shardwise.core.timetable import to_texts
from shardwise.report.recorded import measured, of_recorded, predicted, read_step
from shardwise.runtime.recorder import TRACE, trace_name

UNITS = 3  # of a stage


def event(
    op: str, start: float, stop: float, microbatch: int = -1, *, stage: int = 0, lane: str = "compute", peer: int = -1
) -> Event:
    return Event(op, lane, stage if microbatch >= 0 else -1, microbatch, peer, start, stop, f"{op} m{microbatch}")


def computed(rank: int, order: Iterable[tuple[str, int]], start: float, length: float) -> list[Event]:
    """Tasks of three instructions each, one after the other; a forward takes ``length``, a backward twice as long."""
    found = []
    for op, m in order:
        whole = length if op == "FORWARD" else 2 * length
        found += [
            event(op, start + whole * u / UNITS, start + whole * (u + 1) / UNITS, m, stage=rank) for u in range(UNITS)
        ]
        start += whole
    return found


def write(folder: Path, *steps: RankStep) -> Path:
    (folder / TRACE).mkdir(parents=True, exist_ok=True)
    for one in steps:
        with (folder / TRACE / trace_name(one.rank)).open("a") as file:
            file.write(json.dumps(one.to_dict()) + "\n")
    return folder


def pipeline(step: int = 3, wall: float = 100.0, length: float = 0.1) -> list[RankStep]:
    """Two stages, two microbatches, messages between them; rank 1 began 50 ms later by the same clock."""
    first = [
        *computed(0, [("FORWARD", 0)], 0.0, length), event("SEND", length, 1.3 * length, 0, lane="send", peer=1),
        *computed(0, [("FORWARD", 1)], length, length), event("SEND", 2 * length, 2.6 * length, 1, lane="send", peer=1),
        *computed(0, [("BACKWARD", 0), ("BACKWARD", 1)], 4 * length, length), event("STEP", 9 * length, 9.5 * length),
    ]  # fmt: skip
    second = [
        event("RECEIVE", 0.0, 0.8 * length, 0, stage=1, lane="receive", peer=0),
        event("RECEIVE", 0.0, 2.2 * length, 1, stage=1, lane="receive", peer=0),
        *computed(1, [("FORWARD", 0), ("BACKWARD", 0), ("FORWARD", 1), ("BACKWARD", 1)], length, length),
    ]
    return [
        RankStep(step, 0, 2, 0, "a", wall, 10 * length, 1000, tuple(first)),
        RankStep(step, 1, 2, 0, "a", wall + length / 2, 8 * length, 3000, tuple(second)),
    ]


def test_instructions_of_a_task_are_one_box_on_the_common_axis(tmp_path: Path) -> None:
    one = of_recorded(write(tmp_path, *pipeline()))
    assert (one.ranks, one.memory, one.memory_unit) == (2, (1000, 3000), "bytes") and "step 3 of 2 ranks" in one.title
    assert one.step == pytest.approx(1.0)
    rows = {
        key: [(b.kind, b.stage, b.microbatch, round(b.start, 6), round(b.stop, 6)) for b in row]
        for key, row in one.rows().items()
    }
    assert rows[0, "compute"] == [
        ("F", 0, 0, 0.0, 0.1), ("F", 0, 1, 0.1, 0.2), ("B", 0, 0, 0.4, 0.6), ("B", 0, 1, 0.6, 0.8),
        ("STEP", -1, -1, 0.9, 0.95),
    ]  # fmt: skip
    assert rows[1, "compute"] == [
        ("F", 1, 0, 0.15, 0.25),
        ("B", 1, 0, 0.25, 0.45),
        ("F", 1, 1, 0.45, 0.55),
        ("B", 1, 1, 0.55, 0.75),
    ]
    assert one.bubble == pytest.approx(1 - (0.65 + 0.6) / 2.0)
    # The second receive was posted with the first, and its lane has one after the other.
    assert [(s, e) for *_, s, e in rows[1, "receive"]] == [(0.05, 0.13), (0.13, 0.27)]
    sent, received = one.rows()[0, "send"], one.rows()[1, "receive"]
    assert [b.flow for b in sent] == [b.flow for b in received] and len({b.flow for b in sent}) == 2


def test_a_gap_that_can_be_seen_parts_a_task(tmp_path: Path) -> None:
    first, second = pipeline()
    waits = tuple(
        replace_times(e, 0.03 if i >= 2 else 0.0) if e.op == "STEP" or i >= 2 else e for i, e in enumerate(first.events)
    )
    one = of_recorded(write(tmp_path, replace(first, events=waits, seconds=1.03), second))
    parts = [b for b in one.rows()[0, "compute"] if (b.kind, b.microbatch) == ("F", 0)]
    assert [round(b.stop - b.start, 6) for b in parts] == [
        pytest.approx(0.2 / 3, abs=1e-5),
        pytest.approx(0.1 / 3, abs=1e-5),
    ]
    detailed = of_recorded(tmp_path, whole=False)
    assert len(detailed.boxes) == len(first.events) + len(second.events)
    assert detailed.bubble == one.bubble and detailed.step == one.step
    assert {b.title for b in detailed.boxes} >= {"FORWARD m0", "BACKWARD m1", "STEP m-1"}


def replace_times(one: Event, later: float) -> Event:
    return one._replace(start=one.start + later, stop=one.stop + later)


def test_ranks_of_other_hosts_begin_together(tmp_path: Path) -> None:
    """Their clocks may differ by any time: the barrier before the step says when they began."""
    first, second = pipeline()
    one = of_recorded(write(tmp_path, first, replace(second, host="b", wall=9e8)))
    assert one.rows()[1, "compute"][0].start == pytest.approx(0.1)  # by its own clock
    assert one.step == pytest.approx(1.0)


def test_the_last_common_step_and_the_later_of_two_records(tmp_path: Path) -> None:
    write(tmp_path, *pipeline(3), *pipeline(7), *pipeline(3, length=0.2), pipeline(9)[0])
    assert [one.step for one in read_step(tmp_path)] == [7, 7]
    assert of_recorded(tmp_path, 3).step == pytest.approx(2.0)
    with pytest.raises(ConfigError, match=r"--step 9: not recorded in .*; legal: 3, 7"):
        read_step(tmp_path, 9)
    with (tmp_path / TRACE / trace_name(0)).open("a") as file:
        file.write('{"step": 11, "ra')  # a full disk, or a run that is writing
    assert [one.step for one in read_step(tmp_path)] == [7, 7]


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rank_0.jsonl: cannot be read: No such file or directory; legal: the folder of a run"
    ):
        of_recorded(tmp_path)
    write(tmp_path, pipeline()[0])
    with pytest.raises(ConfigError, match=r"rank_1.jsonl: cannot be read"):
        of_recorded(tmp_path)
    write(tmp_path, pipeline(5)[1])
    with pytest.raises(ConfigError, match="no step that all 2 ranks have recorded"):
        of_recorded(tmp_path)
    (tmp_path / TRACE / trace_name(0)).write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"rank_0.jsonl: damaged: TypeError|rank_0.jsonl: damaged: KeyError"):
        of_recorded(tmp_path)
    (tmp_path / TRACE / trace_name(0)).write_text("")
    with pytest.raises(ConfigError, match=r"rank_0.jsonl: no step is recorded"):
        of_recorded(tmp_path)


def test_the_prediction_is_the_order_without_communication(tmp_path: Path) -> None:
    """F0 F1 B0 B1 on rank 0 and F0 B0 F1 B1 on rank 1, F = 0.1 and B = 0.2: seven forwards' time, and the optimizer's
    step.
    """
    found = predicted(write(tmp_path, *pipeline()))
    assert found.step == pytest.approx(0.1 + 0.1 + 0.2 + 0.1 + 0.2 + 0.2 + 0.05)
    assert found.bubble == pytest.approx(1 - (0.65 + 0.6) / (2 * found.step))
    tasks = [[(b.kind, b.stage, b.microbatch) for b in found.rows()[rank, "compute"]] for rank in (0, 1)]
    assert tasks[0] == [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1), ("STEP", -1, -1)]
    assert tasks[1] == [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)]


def test_replicas_are_predicted_each_for_itself(tmp_path: Path) -> None:
    """Recomputing belongs to backward; the slower rank is the critical one."""

    def rank(index: int, length: float) -> RankStep:
        order = [("FORWARD", 0), ("RECOMPUTE", 0), ("BACKWARD", 0), ("FORWARD", 1), ("RECOMPUTE", 1), ("BACKWARD", 1)]
        return RankStep(3, index, 2, index, "a", 5.0, 3.0, 1, tuple(computed(0, order, 0.0, length)))

    found = predicted(write(tmp_path, rank(0, 0.1), rank(1, 0.2)))
    assert found.step == pytest.approx(2 * (0.2 + 0.4 + 0.4)) and found.ranks == 2
    assert [(b.rank, b.kind, b.microbatch) for b in sorted(found.boxes, key=lambda b: b.start) if b.critical] == [
        (1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1),
    ]  # fmt: skip
    assert found.bubble == pytest.approx(0.25)


def test_other_schedules_of_the_recorded_stages(tmp_path: Path) -> None:
    """F takes 0.1 s and B 0.2 s on both stages, the step of the first 0.05 s: 1F1B and GPipe of two microbatches take 3
    (F + B) and it.
    """
    order, costs = measured(write(tmp_path, *pipeline()))
    assert [[(task.kind, task.microbatch) for task in tasks] for tasks in order] == [
        [("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    ]  # fmt: skip
    assert costs.forward == pytest.approx((0.1, 0.1)) and costs.backward == pytest.approx((0.2, 0.2))
    shown = CliRunner().invoke(app, ["simulate", str(tmp_path), "--schedule", "gpipe", "--schedule", "1f1b", "--json"])
    assert shown.exit_code == 0, shown.output
    for one in json.loads(shown.stdout)["simulations"]:
        assert one["step_seconds"] == pytest.approx(3 * 0.3 + 0.05)
    for arguments, words in (
        (["--schedule", "zb-h1"], "needs the times of I and W"), (["--ranks", "3"], "the rest is the run's"),
        (["--schedule", "zbv"], "stages_per_rank: 1 is not legal"),
    ):  # fmt: skip
        refused = CliRunner().invoke(app, ["simulate", str(tmp_path), *arguments])
        assert refused.exit_code == 2 and words in " ".join(refused.stderr.split())


def test_a_backward_in_two_parts(tmp_path: Path) -> None:
    """What of its units has no second part belongs to the first; a stage without any has all of it there."""

    def rank(stage: int, *ops: str) -> RankStep:
        events = [event(op, float(at), at + 1.0, 0, stage=stage) for at, op in enumerate(ops)]
        return RankStep(3, stage, 2, 0, "a", 0.0, 9.0, 0, tuple(events))

    steps = (
        rank(0, "FORWARD", "BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"),
        rank(1, "FORWARD", "BACKWARD", "BACKWARD"),
    )
    order, costs = measured(write(tmp_path, *steps))
    assert to_texts(order) == ("F0.0 I0.0 W0.0", "F1.0 B1.0")
    assert (costs.forward, costs.input, costs.weight, costs.backward) == ((1, 1), (2, 2), (1, 0), (0, 2))
    assert predicted(tmp_path).step == 7
