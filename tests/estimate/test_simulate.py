"""The simulator against timetables played by hand, against closed forms, and against the bubble rates that papers
print.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import Task, Timetable
from shardwise.estimate.simulate import Costs, Simulation, simulate
from shardwise.parallel.schedule import timetable
from timetables import NAMES, SYNCHRONOUS, alive, numbers, play, uniform

EXACT = 1e-9


def some(name: str, ranks: int = 5, microbatches: int = 13) -> list[tuple[int, int, int]]:
    """A few of the legal numbers, the largest among them."""
    found = list(numbers(name, ranks, microbatches))
    return random.Random(name).sample(found, min(len(found), 25)) + found[-1:]


@pytest.mark.parametrize("name", NAMES)
def test_like_played_by_hand(name: str) -> None:
    for p, m, v in some(name):
        table = timetable(name, p, m, v)
        for seconds in ((1, 1, 1, 0), (2, 3, 1, 0.5), (1.5, 2.25, 1.75, 4)):
            unit = {"F": seconds[0], "I": seconds[1], "W": seconds[2], "B": seconds[1] + seconds[2]}
            found = simulate(table, uniform(p * v, *seconds))
            played = play(table, unit, seconds[3])
            for rank, tasks in enumerate(table):
                assert [played[rank][task] for task in tasks] == list(
                    zip(found.start[rank], found.stop[rank], strict=True)
                )


@pytest.mark.parametrize("name", NAMES)
def test_critical_path(name: str) -> None:
    """Each task of it starts when the one before has ended and arrived; nothing earlier could have ended the step."""
    for p, m, v in some(name):
        n, draw = p * v, random.Random(f"{name} {p} {m} {v}")
        costs = Costs(
            *([draw.uniform(1, 3) for _ in range(n)] for _ in range(3)),
            transfer=[draw.uniform(0, 2) for _ in range(n - 1)],
        )
        table = timetable(name, p, m, v)
        found = simulate(table, costs)
        assert (
            found.stop[found.critical[-1][0]][found.critical[-1][1]]
            == found.seconds
            == max(x.max() for x in found.stop)
        )
        assert found.start[found.critical[0][0]][found.critical[0][1]] == 0.0
        for (r, i), (q, j) in zip(found.critical, found.critical[1:], strict=False):
            gap = found.start[q][j] - found.stop[r][i]
            if r == q and j == i + 1:
                assert gap == 0.0
            else:
                edge = min(table[r][i].stage, table[q][j].stage)
                assert (
                    gap == pytest.approx(costs.transfer[edge] if r != q else 0.0)
                    and table[r][i].microbatch == table[q][j].microbatch
                )


# --------------------------------------------------------------------------------------------------------- closed forms


def bubble(
    name: str, p: int, m: int, v: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, norm: str = "barrier"
) -> Simulation:
    return simulate(timetable(name, p, m, v), uniform(p * v, f, i, w), norm)


def waiting(found: Simulation, p: int, m: int, v: int, seconds: float) -> float:
    """The seconds of the step beyond those of one rank's work."""
    return found.seconds - m * v * seconds


@pytest.mark.slow
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 1.5), (0.1, 0.1, 0.1)])
def test_bubbles_of_whole_backwards(times: tuple[float, float, float]) -> None:
    """GPipe and 1F1B: (p - 1) / (m + p - 1) of total and (p - 1) / m of ideal time, for all m and any F and B; naive is
    that of m = 1. Interleaved: (p - 1) / (v m) of ideal time, for all m >= p."""
    for name in ("gpipe", "1f1b", "pipedream", "naive", "interleaved"):
        for p, m, v in numbers(name):
            if m < p and name == "interleaved":
                continue
            found = bubble(name, p, m, v, *times)
            assert found.bubble_of_ideal == pytest.approx((p - 1) / (v * m), abs=EXACT)
            assert found.bubble_of_total == pytest.approx((p - 1) / (v * m + p - 1), abs=EXACT)
            assert bubble(name, p, m, v, *times, norm="post-validate").seconds == pytest.approx(
                found.seconds, abs=EXACT
            )


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (0.3, 0.3, 0.3), (2, 2, 1), (11, 10, 7)])
def test_bubble_of_zb_h1(f: float, i: float, w: float) -> None:
    """(p - 1) (F + I - W) seconds, a third of 1F1B's if F = I = W, where W <= I <= F and m >= 2 p."""
    for p in range(1, 9):
        for m in (2 * p, 2 * p + 1, 20):
            found = bubble("zb-h1", p, m, 1, f, i, w)
            assert waiting(found, p, m, 1, f + i + w) == pytest.approx((p - 1) * (f + i - w), abs=EXACT)


def test_no_bubble() -> None:
    """ZB-H2 and ZB-V with F = I = W: none between steps under post-validation, from 2 p - 1 microbatches on.  With a
    barrier a rank still waits (p - 1) F for its first forward or, as all end one after another, at the end."""
    for name in ("zb-h2", "zbv"):
        v = SCHEDULES[name].stages_per_rank
        for p, m, _ in numbers(name):
            if m >= 2 * p - 1:
                found = bubble(name, p, m, v, norm="post-validate")
                assert found.bubble_of_total == pytest.approx(0, abs=EXACT) == found.bubble_of_ideal
                assert waiting(bubble(name, p, m, v), p, m, v, 3) == pytest.approx(p - 1, abs=EXACT)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (0.5, 0.5, 0.25), (3, 3, 2)])
def test_bubble_of_dualpipe_v(f: float, i: float, w: float) -> None:
    """With PP = 2 p stages, (PP / 2 - 1) (F&B + B - 3 W) if a forward and the backward beside it are one piece of F&B =
    F + B seconds. One after the other the forward's output leaves before the backward: I less, (PP / 2 - 1) (F + B - 2
    W).  Both for F = I."""
    for p in range(1, 9):
        for m in (2 * p, 2 * p + 3):
            table, work = timetable("dualpipe-v", p, m), 2 * m * (f + i + w)
            whole = i + w
            assert bubble("dualpipe-v", p, m, 2, f, i, w).seconds - work == pytest.approx(
                (p - 1) * (f + whole - 2 * w), abs=EXACT
            )
            played = play(table, {"F": f, "I": i, "W": w, "B": whole}, together=pairs(table))
            seconds = max(stop for rank in played for _, stop in rank.values())
            assert seconds - work == pytest.approx((p - 1) * ((f + whole) + whole - 3 * w), abs=EXACT)


def pairs(table: Timetable) -> frozenset[Task]:
    """Forwards that DualPipeV overlaps with the next backward; DeepSeek's code keeps the last rank's first apart."""
    found = [[one for one, after in zip(t, t[1:], strict=False) if one.kind + after.kind == "FB"] for t in table]
    return frozenset(
        task for rank, tasks in enumerate(found) for task in (tasks[1:] if rank == len(table) - 1 else tasks)
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_steps_follow_each_other_at_that_period(name: str) -> None:
    """Under post-validation a rank goes on with the next step: six steps played at once take six times ``seconds``,
    beside the start.
    """
    for p, m, v in some(name):
        for times in ((1, 1, 1, 0), (2, 2.5, 1.5, 0.25)):
            table, costs = timetable(name, p, m, v), uniform(p * v, *times)
            one = simulate(table, costs, "post-validate").seconds
            steps = [
                tuple(tuple(t._replace(microbatch=t.microbatch + k * m) for k in range(n) for t in r) for r in table)
                for n in (5, 6)
            ]
            before, after = (simulate(run, costs).seconds for run in steps)
            assert after - before == pytest.approx(one, abs=EXACT)


# ------------------------------------------------------------------------------------------------------------ published

ZERO_BUBBLE = """
1.5B  8 24 18.522 18.086 9.337 0.601 0.2431 0.1055 0.1585 0.1083
1.5B  8 32 18.513 18.086 9.331 0.626 0.1985 0.0818 0.1242 0.0837
1.5B  8 64 18.546 18.097 9.321 0.762 0.124 0.0443 0.0674 0.0444
6.2B  8 24 29.718 29.444 19.927 0.527 0.2347 0.0808 0.1323 0.0698
6.2B  8 32 29.802 29.428 19.530 0.577 0.1898 0.0628 0.1045 0.0559
6.2B  8 64 29.935 29.621 19.388 0.535 0.1091 0.032 0.0554 0.0294
14.6B 16 48 11.347 11.248 8.132 0.377 0.2552 0.1104 0.1397 0.0672
14.6B 16 64 11.307 11.254 8.101 0.379 0.2082 0.0852 0.1088 0.0516
14.6B 16 128 11.325 11.308 8.109 0.378 0.1251 0.0445 0.0576 0.0266
28.3B 32 96 10.419 10.207 7.715 0.408 0.2646 0.1493 0.1421 0.0641
28.3B 32 128 10.408 10.204 7.703 0.408 0.2168 0.1164 0.1106 0.049
28.3B 32 256 10.402 10.248 7.698 0.460 0.1352 0.0624 0.0594 0.0257
"""
"""Qi et al., arXiv 2401.10241: model, ranks, microbatches, milliseconds of F, I, W and a transfer (table 9), and the
bubble rates that the authors computed from them, of total time (table 5): 1F1B, 1F1B interleaved, ZB-H1, ZB-H2."""

CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Stages a rank of their interleaved runs: one layer a stage, and two layers' place for embedding and loss (22, 30, 46,
62 layers).
"""


@pytest.mark.parametrize("row", ZERO_BUBBLE.strip().splitlines(), ids=lambda row: "-".join(row.split()[:3]))
def test_published_bubble_rates(row: str) -> None:
    model, *numbers_ = row.split()
    p, m = int(numbers_[0]), int(numbers_[1])
    f, i, w, transfer, *rates = map(float, numbers_[2:])
    for name, rate in zip(("1f1b", "interleaved", "zb-h1", "zb-h2"), rates, strict=True):
        v = CHUNKS[model] if name == "interleaved" else 1
        costs = uniform(p * v, f / v, i / v, w / v, transfer)
        found = simulate(timetable(name, p, m, v), costs, "post-validate").bubble_of_total
        if name == "interleaved":
            assert abs(found - rate) < 0.004
        else:
            assert found == pytest.approx(rate, abs=6e-5)  # as printed, to four digits


GPIPE = {
    (1, 2): (1.0, 1.0), (1, 4): (1.07, 1.0), (1, 8): (1.3, 1.0),
    (4, 2): (1.7, 1.6), (4, 4): (3.2, 2.29), (4, 8): (4.8, 2.91),
    (32, 2): (1.8, 1.94), (32, 4): (3.4, 3.66), (32, 8): (6.3, 6.56),
}  # fmt: skip
"""By microbatches and partitions: the throughput of Transformer-48 that was measured, 1 being that of (1, 2) (Huang et
al., GPipe, arXiv 1811.06965, table 2), and that of the simulation with equal stages and no transfers."""


@pytest.mark.parametrize(("m", "k"), GPIPE)
def test_gpipe_throughput(m: int, k: int) -> None:
    measured, simulated = GPIPE[m, k]
    part = 1 / (3 * m * k)  # of a whole batch's time on one device, F, I and W together being a third each
    found = 1 / simulate(timetable("gpipe", k, m), uniform(k, part, part, part)).seconds
    assert found == pytest.approx(simulated, abs=0.005)
    if m == 32:  # with few microbatches what they measured is more than stages of equal and constant times allow
        assert 0.92 * found < measured < found


# ------------------------------------------------------------------------------------------------------------ the rest


def test_two_definitions_of_bubble() -> None:
    """Two stages of 3 and 6 seconds, one microbatch: 9 seconds, of which the ranks compute 3 and 6."""
    found = simulate(timetable("naive", 2, 1), Costs([1, 2], [1, 2], [1, 2]))
    assert found.seconds == 9 and found.work.tolist() == [3, 6]
    assert found.rank_bubbles_of_total == pytest.approx([6 / 9, 3 / 9]) and found.bubble_of_total == pytest.approx(0.5)
    assert found.rank_bubbles_of_ideal == pytest.approx([2, 0.5]) and found.bubble_of_ideal == pytest.approx(1)


def test_norm_and_step() -> None:
    """1F1B of one microbatch: both ranks end together only under the barrier."""
    costs = Costs([1, 1], [1, 1], [1, 1], transfer=[0.5], step=[2, 5], norm=0.25)
    table = timetable("1f1b", 2, 1)  # rank 0: F at 0, B at 5 to 7; rank 1: F at 1.5, B to 4.5
    assert simulate(table, costs).seconds == 7 + 0.25 + 5
    late = simulate(table, costs, "post-validate")
    assert late.seconds == 7 + 2 and late.work.tolist() == [5, 8]
    slow = simulate(table, Costs([1, 1], [1, 1], [1, 1], transfer=[0.5], step=[0, 7]), "post-validate")
    rank, place = slow.critical[-1]
    assert slow.seconds == 4.5 + 7 - 1.5 and slow.timetable[rank][place] == Task("B", 1, 0)


def test_a_backward_may_be_faster_than_its_parts() -> None:
    assert simulate(timetable("1f1b", 1, 3), Costs([1], [1], [1], backward=[1.5])).seconds == 7.5
    assert simulate(timetable("zb-h1", 1, 3), Costs([1], [1], [1], backward=[1.5])).seconds == 9


def test_stages_of_one_rank_transfer_nothing() -> None:
    """ZB-V's middle stages are both on the last rank: four transfers, four F, four I, W of stage 2 before I of stage 1,
    W of stage 0.
    """
    assert simulate(timetable("zbv", 2, 1), uniform(4, transfer=10)).seconds == 4 * 10 + 4 + 4 + 1 + 1


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_memory(name: str) -> None:
    for p, m, v in some(name):
        table, n = timetable(name, p, m, v), p * v
        found = simulate(table, Costs([1] * n, [1] * n, [1] * n))
        assert list(found.peak_bytes) == [alive(tasks) for tasks in table]
        draw = random.Random(n)
        held, kept = ([draw.randrange(1, 9) for _ in range(n)] for _ in range(2))
        costs = Costs([1] * n, [1] * n, [1] * n, activations=held, weight_activations=kept)
        for tasks, peak in zip(table, simulate(table, costs).peak_bytes, strict=True):
            sizes: dict[tuple[int, int], int] = {}
            most = 0
            for kind, stage, microbatch in tasks:
                sizes[stage, microbatch] = {"F": held[stage], "I": kept[stage]}.get(kind, 0)
                most = max(most, sum(sizes.values()))
            assert peak == most


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            ("F00 B00 F01 B01", "F10 F11 B10 B11"),
            "rank 0 has B of stage 0 and microbatch 0 next, which waits for B of stage 1 and microbatch 0 on rank 1; "
            "rank 1 has F of stage 1 and microbatch 1 next, which waits for F of stage 0 and microbatch 1 on rank 0",
        ),
        (
            ("F00 W00 I00",),
            "W of stage 0 and microbatch 0 next, which waits for I of stage 0 and microbatch 0 on rank 0",
        ),
        (
            ("F00 I00", "F10"),
            "I of stage 0 and microbatch 0 on rank 0 waits for B of stage 1 and microbatch 0, which no rank computes",
        ),
        (("F00 B00", "F00 B00 F10 B10"), "a stage is on two ranks, of (stage, rank) [(0, 0), (0, 1), (1, 1)]"),
        (("F00 B00 I00",), "I of stage 0 and microbatch 0 is in it twice"),
    ],
)
def test_timetables_that_cannot_run(ranks: tuple[str, ...], words: str) -> None:
    table = tuple(tuple(Task(word[0], int(word[1]), int(word[2])) for word in rank.split()) for rank in ranks)
    with pytest.raises(ShardwiseError) as found:
        simulate(table, uniform(len({task.stage for tasks in table for task in tasks})))
    assert words in str(found.value), str(found.value)


def test_shuffled_timetables_run_or_are_refused_as_by_hand() -> None:
    ran = 0
    for seed in range(200):
        draw = random.Random(seed)
        table = [list(tasks) for tasks in timetable("zb-h1", 3, 3)]
        for _ in range(draw.randrange(1, 12)):
            tasks = draw.choice(table)
            at = draw.randrange(len(tasks) - 1)
            tasks[at], tasks[at + 1] = tasks[at + 1], tasks[at]
        changed = tuple(map(tuple, table))
        try:
            played = play(changed, dict.fromkeys("FIW", 1.0))
        except AssertionError:
            with pytest.raises(ShardwiseError, match="cannot run: rank"):
                simulate(changed, uniform(3))
        else:
            ran += 1
            assert simulate(changed, uniform(3)).seconds == max(stop for rank in played for _, stop in rank.values())
    assert 20 < ran < 180


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (lambda: Costs([1, 1], [1, 1], [1]), "costs.weight: .* is not legal for 2 stages; legal: 2 finite"),
        (lambda: Costs([1, 1], [1, 1], [1, -1]), "costs.weight"),
        (lambda: Costs([1, float("nan")], [1, 1], [1, 1]), "costs.forward"),
        (lambda: Costs([1, 1], [1, 1], [1, 1], transfer=[1, 1]), "costs.transfer: .*legal: 1 finite"),
        (lambda: simulate(timetable("1f1b", 3, 3), uniform(2)), "costs: those of 2 stages"),
        (lambda: simulate(timetable("1f1b", 2, 3), uniform(2), "none"), "norm: 'none' is not legal"),
    ],
)
def test_refused(costs: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        costs()  # type: ignore[operator]


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
def test_64_stages_and_512_microbatches_take_less_than_a_second(name: str) -> None:
    v = SCHEDULES[name].stages_per_rank

    def once() -> float:
        began = time.process_time()
        found = simulate(
            timetable(name, 64 // v, SCHEDULES[name].max_microbatches or 512, v), uniform(64, transfer=0.1)
        )
        spent = time.process_time() - began
        assert np.isfinite(found.seconds)
        return spent

    assert min(once() for _ in range(3)) < 1.0
