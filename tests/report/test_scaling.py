"""Where the time of ranks goes in recorded steps made by hand, and what that costs of the efficiency."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.instruction import Lane, Op
from shardwise.core.recording import Event, Operation, RankStep
from shardwise.report.scaling import USES, MeasuredStep, Point, Scaling, split
from shardwise.report.scaling_shown import draw, percent, tables
from shardwise.report.tables import make_console, show

BOTH = (0, 1)


def event(start: float, stop: float, lane: str = Lane.COMPUTE, op: Op = Op.FORWARD) -> Event:
    return Event(op, lane, 0, 0, -1, start, stop, "")


def summed(posted: float, waited: float, arrived: float, queue: str = "reduce") -> Operation:
    return Operation("all_reduce", BOTH, queue, posted, waited, arrived)


def step(
    rank: int, seconds: float, events: list[Event], operations: list[Operation], *, wall: float = 100.0,
    host: str = "a", ranks: int = 2, moved: float = 0.0,
) -> RankStep:  # fmt: skip
    return RankStep(3, rank, ranks, rank, host, wall, seconds, 0, tuple(events), tuple(operations), moved)


def seconds_of(*ranks: RankStep) -> dict[str, float]:
    """The seconds of all ranks together by use; those of zero are left out."""
    seconds, shares = split(ranks)
    assert sum(shares.values()) == pytest.approx(1)
    return {use: pytest.approx(share * seconds * len(ranks)) for use, share in shares.items() if abs(share) > 1e-9}


def test_a_late_rank_lets_the_other_wait() -> None:
    """Rank 0 has posted after 1 s, rank 1 after 3 s; then the sum takes half a second."""
    found = seconds_of(
        step(0, 3.5, [event(0, 1)], [summed(1, 1, 3.5)]), step(1, 3.5, [event(0, 3)], [summed(3, 3, 3.5)])
    )
    assert found == {"computing": 4, "waiting": 2, "exposed": 1}


def test_a_slow_link_is_exposed() -> None:
    one, other = (step(rank, 5, [event(0, 1)], [summed(1, 1, 5)]) for rank in BOTH)
    assert seconds_of(one, other) == {"computing": 2, "exposed": 8}


def test_what_computing_hides_is_not_exposed() -> None:
    """The sum is under way from 1 to 4 s; both compute until 3.5 s."""
    one, other = (step(rank, 4, [event(0, 1), event(1, 3.5)], [summed(1, 3.5, 4)]) for rank in BOTH)
    assert seconds_of(one, other) == {"computing": 7, "exposed": 1}


def test_the_bubble_of_a_pipeline_is_waiting() -> None:
    """Rank 1 wants at 0 what rank 0 sends at 1 s and what is on its way for 0.2 s; rank 0 wants the gradient at 1 s,
    which is sent at 3.2 s, and ends half a second after rank 1 has ended at 3.5 s."""
    forth, back = ("message tensors",) * 2
    first = [Operation("send", (0, 1), forth, 1, 1, 1), Operation("receive", (1, 0), back, 0, 1, 3.3)]
    second = [Operation("receive", (0, 1), forth, 0, 0, 1.2), Operation("send", (1, 0), back, 3.2, 3.2, 3.2)]
    found = seconds_of(
        step(0, 4, [event(0, 1), event(3.3, 4, op=Op.BACKWARD)], first), step(1, 3.5, [event(1.2, 3.2)], second)
    )
    assert found == {
        "computing": 1 + 0.7 + 2,
        "waiting": 1 + 2.2 + 0.5,  # for a forward, for a gradient, for the end of rank 0
        "exposed": 0.2 + 0.1,
        "other": 0.3,  # of rank 1 after its send
    }


def test_what_a_unit_waits_for_inside_is_no_computing() -> None:
    """A unit of 3 s sums in the middle of it; of rank 1 it begins half a second later."""
    one = step(0, 3, [event(0, 3)], [summed(1, 1, 2, "compute")])
    other = step(1, 3, [event(0.5, 3)], [summed(1.5, 1.5, 2, "compute")])
    assert seconds_of(one, other) == {"computing": 2 + 2, "waiting": 0.5, "exposed": 0.5 + 0.5, "other": 0.5}


def test_instructions_off_the_compute_lane_and_the_hosts_work() -> None:
    """An instruction that posts lasts until what it posts has arrived, and is no computing; work on operations under
    way is exposed."""
    events = [event(0, 1), event(1, 2.5, Lane.REDUCE, Op.REDUCE), event(1.25, 2)]
    one, other = (step(rank, 3, events, [summed(1.25, 2, 2.5)], moved=0.125) for rank in BOTH)
    assert seconds_of(one, other) == {"computing": 3.5, "exposed": 1.25, "other": 1.25}


def test_an_instruction_ends_where_the_next_begins() -> None:
    """One of the compute lane may post a sum too, and then lasts until that is waited for."""
    one, other = (step(rank, 3, [event(0, 2.5), event(1, 2)], [summed(0.5, 2, 2.5)]) for rank in BOTH)
    assert seconds_of(one, other) == {"computing": 4, "exposed": 1, "other": 1}


def test_a_clock_for_each_host() -> None:
    """Rank 1 began half a second after rank 0 by the clock of their host; on another host both began together."""
    one, other = (step(rank, 2, [event(0, 1)], [summed(1, 1, 2)], wall=100 + rank / 2) for rank in BOTH)
    assert split([one, other])[0] == pytest.approx(2.5)
    assert seconds_of(one, other)["waiting"] == pytest.approx(0.5 + 0.5)  # for the post of rank 1, and for its end
    apart = step(1, 2, [event(0, 1)], [summed(1, 1, 2)], wall=9e8, host="b")
    assert split([one, apart])[0] == pytest.approx(2) and "waiting" not in seconds_of(one, apart)


def test_operations_are_matched_by_members_queue_and_order() -> None:
    """Of four sums in two queues, rank 1 is late with the second of the first queue alone."""
    first = [summed(0, 0, 0.1), summed(0.1, 0.1, 0.2, "gather")]
    last = summed(1.5, 1.5, 1.6, "gather")
    operations, late = [*first, summed(0.2, 0.2, 1.5), last], [*first, summed(1.4, 1.4, 1.5), last]
    found = seconds_of(step(0, 1.6, [], operations), step(1, 1.6, [event(0.2, 1.4)], late))
    assert found == {"computing": 1.2, "waiting": 1.2, "exposed": 0.4 + 0.4}
    with pytest.raises(ShardwiseError, match="operation 1 of queue gather among ranks 0, 1 is not recorded by rank 1"):
        split([step(0, 1.6, [], operations), step(1, 1.6, [], late[:3])])


def test_the_last_member_is_waited_for() -> None:
    """Of three members the others post at 1 and at 2 s, and only members count; units wait in another order than they
    have posted."""
    every = (0, 1, 2)

    def total(posted: float, waited: float, arrived: float, queue: str = "compute") -> Operation:
        return Operation("all_reduce", every, queue, posted, waited, arrived)

    alone = Operation("all_gather", BOTH, "gather", 0.25, 2.5, 2.75)  # posted first, waited for last
    found = seconds_of(
        step(0, 3, [event(0, 1), event(1, 3)], [alone, total(0.5, 0.5, 2.5)], ranks=3),
        step(1, 3, [event(0, 3)], [alone, total(1, 1, 2.5)], ranks=3),
        step(2, 3, [event(0, 3)], [total(2, 2, 2.5)], ranks=3),
    )
    waiting, exposed = (2 - 0.5) + (2 - 1), 3 * 0.5 + 2 * 0.25
    assert found == {"waiting": waiting, "exposed": exposed, "computing": 9 - waiting - exposed}


def test_shares_of_any_recording_add_up() -> None:
    numbers = random.Random(0)
    for _ in range(50):
        ranks = []
        for rank in BOTH:
            at, events, operations = numbers.random(), [], []
            for _ in range(4):
                length, wait = numbers.random(), numbers.random()
                events.append(event(at, at + length))
                posted = at + length * numbers.random()
                operations.append(summed(posted, at + length, at + length + wait))
                at += length + wait + numbers.random()
            ranks.append(step(rank, at + numbers.random(), events, operations, wall=100 + numbers.random()))
        _, shares = split(ranks)
        assert sum(shares.values()) == pytest.approx(1) and all(share > -1e-9 for share in shares.values())


# ---- over numbers of ranks -------------------------------------------------------------------------------------------


def measured(ranks: int, rows: int, seconds: float, shares: tuple[float, ...], round: int = 0) -> MeasuredStep:
    return MeasuredStep(ranks, 1, rows, round, 3, 1, seconds, *shares)


ALONE, FOUR = (0.9, 0.0, 0.0, 0.1), (0.6, 0.2, 0.1, 0.1)
STEPS = (
    measured(1, 8, 0.8, ALONE), measured(4, 8, 0.25, FOUR), measured(4, 32, 1.0, (0.7, 0.1, 0.1, 0.1)),
    *(measured(1, 8, 0.8, ALONE, round) for round in (1, 2)), measured(4, 8, 9.0, (0.1, 0.0, 0.9, 0.0), 1),
    measured(4, 8, 0.25, FOUR, 2), measured(4, 32, 1.0, (0.7, 0.1, 0.1, 0.1), 1),
)  # fmt: skip
"""A slow moment fell on one step of four ranks."""


def scaling(*steps: MeasuredStep, **more: Any) -> Scaling:
    values: dict[str, Any] = {
        "config": {"model.layers": 2, "parallel.pins": None}, "axis": "dp", "kinds": ("strong", "weak"),
        "batch_size": 8, "tokens": 16, "about": ({"host": "a"},), "measured": steps or STEPS,
    }  # fmt: skip
    return Scaling(**(values | more))


def point(kind: str, ranks: int, found: Scaling | None = None) -> Point:
    (one,) = (p for p in (found or scaling()).points if (p.kind, p.ranks) == (kind, ranks))
    return one


def test_speed_up_efficiency_and_what_it_loses() -> None:
    strong, weak = point("strong", 4), point("weak", 4)
    assert (strong.batch_size, strong.seconds, strong.steps) == (8, 0.25, 3)  # the median
    assert (strong.speed_up, strong.efficiency) == (pytest.approx(3.2), pytest.approx(0.8))
    assert (strong.rows_per_second, strong.tokens_per_second) == (pytest.approx(32), pytest.approx(512))
    assert strong.shares == pytest.approx(dict(zip(USES, FOUR, strict=True)))
    # Four ranks take 1 s together: 0.6 s of it compute, where one rank computes for 0.72 s.
    assert strong.lost == pytest.approx({"computing": -0.12, "exposed": 0.2, "waiting": 0.1, "other": 0.02})
    # Weak: 4 s for four times the rows, for which one rank takes 3.2 s, 2.88 s of it to compute.
    assert (weak.batch_size, weak.speed_up, weak.efficiency) == (32, pytest.approx(3.2), pytest.approx(0.8))
    assert weak.lost == pytest.approx({"computing": -0.02, "exposed": 0.1, "waiting": 0.1, "other": 0.02})
    for kind in ("strong", "weak"):
        first = point(kind, 1)
        assert (first.speed_up, first.efficiency) == (1, 1) and first.lost == pytest.approx(dict.fromkeys(USES, 0))


def test_efficiency_and_losses_add_up_to_one() -> None:
    numbers = random.Random(1)
    steps = []
    for ranks in (2, 4, 8):
        for rows in {8, 4 * ranks}:
            for _ in range(5):
                parts = [numbers.random() for _ in USES]
                shares = tuple(part / sum(parts) for part in parts)
                steps.append(measured(ranks, rows, numbers.uniform(0.1, 2), shares))
    points = scaling(*steps).points
    assert [(p.kind, p.ranks) for p in points] == [(kind, n) for kind in ("strong", "weak") for n in (2, 4, 8)]
    for one in points:
        assert one.efficiency + sum(one.lost.values()) == pytest.approx(1)
        assert sum(one.shares.values()) == pytest.approx(1)
        assert one.efficiency == pytest.approx(one.speed_up * 2 / one.ranks)


def test_json_and_what_was_measured_earlier() -> None:
    found = scaling()
    text = json.dumps(found.to_dict())
    assert Scaling.of_json(text, "x") == found
    values = json.loads(text)
    assert [(p["kind"], p["ranks"]) for p in values["points"]] == [
        ("strong", 1), ("strong", 4), ("weak", 1), ("weak", 4)
    ]  # fmt: skip
    assert len(values["measured"]) == len(STEPS) and set(values["points"][0]["lost"]) == set(USES)
    more = scaling(measured(2, 8, 0.45, FOUR), kinds=("strong",)).beside(found, "--with x")
    assert [p.ranks for p in more.points if p.kind == "strong"] == [1, 2, 4] and more.kinds == ("strong", "weak")
    other = {"model.layers": 3, "parallel.pins": None}
    with pytest.raises(ConfigError, match=r"--with x: model.layers is 2, not 3; legal"):
        scaling(config=other).beside(found, "--with x")
    with pytest.raises(ConfigError, match=r"axis is dp, not tp, data.batch_size is 8, not 4"):
        scaling(axis="tp", batch_size=4).beside(found, "--with x")
    assert scaling(config=other).digest != found.digest == scaling(batch_size=4).digest


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measured": [{"ranks": 1}]}', '{"measured": []}', "3"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--with x: no measured scaling: .*`shardwise bench scaling --out`"):
        Scaling.of_json(text, "--with x")


@pytest.mark.parametrize("more", [{"measured": []}, {"batch_size": 7}, {"kinds": None}])
def test_a_file_has_a_first_point(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no measured scaling"):
        Scaling.of_json(json.dumps(scaling().to_dict() | more), "x")


# ---- tables and the picture ------------------------------------------------------------------------------------------


def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show(make_console(), *tables(scaling()))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for words in ("strong scaling over dp", "weak scaling over dp", "3.20", "80.0 %", "-12.0 %", "tokens/s", "512"):
        assert words in out
    hosts = tuple(MeasuredStep(**{**vars(one), "hosts": one.ranks}) for one in STEPS)
    show(make_console(), *tables(scaling(*hosts, tokens=None)))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "hosts" in out and "rows/s" in out
    assert percent(-1e-9) == "0.0 %"


def test_the_picture(tmp_path: Path) -> None:
    for name, found in (("a.png", scaling()), ("b.svg", scaling(kinds=("strong",))), ("c.svg", scaling(STEPS[0]))):
        draw(found, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.gif is not legal"):
        draw(scaling(), tmp_path / "a.gif")
