"""Order what each rank of a pipeline computes, as pure data: lowering adds everything else.  ``core/schedules.py`` has
the traits of each schedule.

A model is cut into ``stages``; each rank of the axis ``pp`` has ``stages_per_rank`` of them.  A schedule emits the
tasks of every rank: F (forward), B (backward), or B in two parts: I (gradients of the stage's inputs) and W (gradients
of its weights).

Most schedules run the same kinds of task in every round, each kind some rounds, its *lag*, behind the forwards
(``lagged``).  The two that are laid out like a V are sequences of phases, each a few tasks repeated (``phases``).

A timetable stays executable if microbatches are left out of it, because tasks of different microbatches never need each
other.  So the phases of some number of microbatches serve any smaller number: the surplus is dropped.

In the drawings a box is one unit of time, F = I = W = 1 and B = 2; stages of a rank after its first have an apostrophe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.schedules import SCHEDULES, Schedule
from shardwise.core.timetable import Task, Timetable, rank_of_stage

Order = Callable[[int, int, int, int], Iterable[Task]]
"""This returns the tasks of a rank: a function of (rank, ranks, microbatches, stages per rank)."""


# --------------------------------------------------------------------------------------------------------------- places


def looped(stage: int, ranks: int) -> int:
    """Return the rank of a stage when stages go round: rank 0 has stages 0, ``ranks``, 2 ``ranks``, ..."""
    return stage % ranks


def v_shape(stage: int, ranks: int) -> int:
    """Return the rank of a stage in a V: rank 0 has the first and the last, the last rank the two in the middle."""
    return min(stage, 2 * ranks - 1 - stage)


# ---------------------------------------------------------------------------------------------------------------- lags


def lagged(*lanes: tuple[int, Sequence[Task]]) -> Iterator[Task]:
    """Take in round k the task k - lag of each lane (lag, tasks), where it has one."""
    for k in range(max(lag + len(tasks) for lag, tasks in lanes)):
        yield from (tasks[k - lag] for lag, tasks in lanes if 0 <= k - lag < len(tasks))


def _all(kind: str, stage: int, microbatches: int) -> list[Task]:
    return [Task(kind, stage, m) for m in range(microbatches)]


def gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Run all forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965, section 2.2).  ``naive`` is this
    with one microbatch.

    ::

        0  F0 F1 F2                   B0 -- B1 -- B2 --
        1     F0 F1 F2          B0 -- B1 -- B2 --
        2        F0 F1 F2 B0 -- B1 -- B2 --
    """
    return lagged((0, _all("F", rank, microbatches)), (microbatches, _all("B", rank, microbatches)))


def one_forward_one_backward(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """1F1B: a rank runs ahead by as many forwards as there are ranks behind it, then takes turns (PipeDream-Flush:
    Narayanan et al., arXiv 2006.09503, section 3.2; Megatron-LM, arXiv 2104.04473, section 2.2.1).  At most ``ranks``
    microbatches live on a rank.

    PipeDream (arXiv 1806.03377, section 3.2) and PipeDream-2BW have this order too, over the microbatches of all steps
    together.

    ::

        0  F0 F1 F2             B0 -- F3 B1 -- F4 B2 --    B3 --    B4 --
        1     F0 F1       B0 -- F2 B1 -- F3 B2 -- F4 B3 --    B4 --
        2        F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 --
    """
    return lagged((0, _all("F", rank, microbatches)), (ranks - rank - 1, _all("B", rank, microbatches)))


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Run 1F1B over several stages a rank: microbatches go in groups through one stage after the other (Megatron-LM,
    arXiv 2104.04473, section 2.2.2).  A group has ``ranks`` microbatches, or a few more where that leaves a remainder
    (Megatron-LM refuses that): the bubble stays, and a rank holds the extra ones for each of its stages but one.

    ::

        0  F0  F1  F0' F1' F2      B0' --  F3  B1' --  F2' B0  --  F3' B1  --      B2' --      B3' --  B2  --  B3  --
        1      F0  F1  F0' B0' --  F1' B1' --  F2  B0  --  F3  B1  --  F2' B2' --  F3' B3' --  B2  --  B3  --
    """
    chunks, groups = range(stages_per_rank), max(1, microbatches // ranks)
    bounds = [microbatches * g // groups for g in range(groups + 1)]
    group = [range(start, stop) for start, stop in pairwise(bounds)]
    forwards = [Task("F", c * ranks + rank, m) for g in group for c in chunks for m in g]
    backwards = [Task("B", c * ranks + rank, m) for g in group for c in reversed(chunks) for m in g]
    return lagged((0, forwards), (2 * (ranks - rank - 1) + (stages_per_rank - 1) * max(map(len, group)), backwards))


def zb_h1(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Run 1F1B with B in two parts: I goes up the pipeline at once, W fills the end (Qi et al., Zero Bubble Pipeline
    Parallelism, arXiv 2401.10241, section 2.1).  W is ``ranks`` - 1 rounds behind F on every rank, so each has as many
    microbatches alive as the first of 1F1B: ``ranks``.

    ::

        0  F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        1     F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
    """
    lanes = (_all(kind, rank, microbatches) for kind in "FIW")
    return lagged(*zip((0, ranks - rank - 1, ranks - 1), lanes, strict=True))


def zb_h2(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Run ZB-H1 with twice the lags: forwards fill the bubble before the first backward too, and what is left is a
    parallelogram whose ends fit into each other if no barrier is between two steps (arXiv 2401.10241, section 2.2).  At
    most 2 ``ranks`` - 1 microbatches live on a rank.

    ::

        0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    lanes = (_all(kind, rank, microbatches) for kind in "FIW")
    return lagged(*zip((0, 2 * (ranks - rank - 1), 2 * (ranks - 1)), lanes, strict=True))


# --------------------------------------------------------------------------------------------------------------- phases


def phases(stages: Sequence[int], microbatches: int, *steps: tuple[int, str]) -> Iterator[Task]:
    """Each step (times, words) repeats its words: ``F1`` is the next forward of this rank's second stage, I and B
    likewise the next backward, in order of microbatches; ``W`` is the oldest W that is due.  Microbatches from
    ``microbatches`` on are dropped."""
    done: Counter[str] = Counter()
    due: deque[Task] = deque()
    for word in (word for times, words in steps for _ in range(times) for word in words.split()):
        if word == "W":
            task = due.popleft()
        else:
            lane = word.replace("I", "B")
            task = Task(word[0], stages[int(word[1])], done[lane])
            done[lane] += 1
            if word[0] == "I":
                due.append(task._replace(kind="W"))
        if task.microbatch < microbatches:
            yield task


def zbv(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Leave no bubble with the activations of 1F1B, in 2 ``ranks`` half-size stages: the loss is on rank 0, which
    therefore begins backwards early (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362,
    section 3, and the handcrafted order of sail-sg/zero-bubble-pipeline-parallelism).  From 2 ``ranks`` - 1
    microbatches on there is no bubble between the steps, if F = I = W.

    ::

        0  F0  F1  F2  F0' I0' W0' F1' I1' W1' F3  I0  W0  F2' I2' W2' I1  W1  F3' I3' W3' I2  W2  I3  W3
        1      F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' F3  I1  W1  F3' I2' W2' I2  I3' I3  W2  W3' W3
    """
    n, up = max(microbatches, 2 * ranks - 1), ranks - rank
    return phases(
        (rank, 2 * ranks - 1 - rank),
        microbatches,
        (2 * up - 1, "F0"),
        (rank, "F1 F0"),
        (up, "F1 I1 W"),
        (n - 2 * ranks + rank + 1, "F0 I0 W F1 I1 W"),
        (up - 1, "I0 W F1 I1 W"),
        (rank, "I0 I1"),
        (up, "I0 W"),
        (2 * rank, "W"),
    )


def dualpipe_v(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterable[Task]:
    """Run DualPipe cut in half: in the middle a forward of one stage is beside a backward of the other, so that the
    communication inside one hides behind the other's computing (DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and
    deepseek-ai/DualPipe, ``DualPipeV``). At most 2 ``ranks`` + 1 half-size activations live on a rank.  It is made for
    2 ``ranks`` microbatches or more.

    ::

        0  F0  F1  F2  F0' I0' W0' F1' F3  B1' --  F2' B0  --  B2' --  F3'     B1  --  B3' --  I2  W2  I3  W3
        1      F0  F0' F1  F1' F2  B0' --  F2' B0  --  F3  B1' --  F3' B1  --  B2' --  B2  --  I3' I3  W3' W3
    """
    n, up, down = max(microbatches, 2 * ranks), ranks - rank - 1, rank + 1
    return phases(
        (rank, 2 * ranks - 1 - rank),
        microbatches,
        (2 * up, "F0"),
        (down, "F0 F1"),
        (up, "I1 W F1"),
        (n - 2 * ranks + down, "F0 B1 F1 B0"),
        (up, "B1 F1 B0"),
        # Of the last 2 (rank + 1) pairs of backwards the second half is in two parts.
        (down // 2, "B1 B0"),
        (down % 2, "B1 I0"),
        (down // 2, "I1 I0"),
        (up, "W I0"),
        (down, "W"),
    )


# -------------------------------------------------------------------------------------------------------------- by name


ORDERS: Mapping[str, Order] = {
    "naive": gpipe,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "dualpipe-v": dualpipe_v,
    "pipedream": one_forward_one_backward,
    "pipedream-2bw": one_forward_one_backward,
}
"""These are the orders of the tasks of ranks under each of :data:`SCHEDULES`."""


def check_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Return the schedule of that name; raise :class:`ConfigError` if it is not legal for these numbers.

    ``microbatches`` is the number in a batch; the timetable of an asynchronous schedule may then be asked for several
    batches.
    """
    check_choice("schedule", name, SCHEDULES)
    check_count("pp", ranks)
    check_count("microbatches", microbatches)
    schedule = SCHEDULES[name]
    if stages_per_rank is not None:
        check_count("stages_per_rank", stages_per_rank)
        if not schedule.takes(stages_per_rank):
            others = ", ".join(f'"{other.name}"' for other in SCHEDULES.values() if other.takes(stages_per_rank))
            wrong = f'{stages_per_rank} is not legal with schedule "{name}"'
            wanted = f"{'at least ' * schedule.more_stages}{schedule.stages_per_rank}"
            raise ConfigError.on("stages_per_rank", wrong, f"{wanted}. Schedules for {stages_per_rank}: {others}.")
    least = max(1, schedule.min_microbatches_per_rank * ranks)
    if microbatches < least or (schedule.max_microbatches is not None and microbatches > schedule.max_microbatches):
        legal = f"at least {least}" if schedule.max_microbatches is None else f"{schedule.max_microbatches}"
        wrong = f'{microbatches} is not legal with schedule "{name}" on {ranks} ranks'
        raise ConfigError.on("microbatches", wrong, f"{legal}.")
    return schedule


def timetable(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Timetable:
    """Return the tasks of each rank under a schedule; ``stages_per_rank`` is by default the schedule's (least) number.

    Raises :class:`ConfigError` for a schedule that does not exist or numbers that are not legal for it.
    """
    schedule = check_schedule(name, ranks, microbatches, stages_per_rank)
    each = stages_per_rank or schedule.stages_per_rank
    return tuple(tuple(ORDERS[name](rank, ranks, microbatches, each)) for rank in range(ranks))


def stage_ranks(name: str, ranks: int, stages: int, order: Timetable = ()) -> tuple[int, ...]:
    """Return the rank of each stage: that of the ``order``, if there is one, else the schedule's."""
    if order or ranks == 1:
        return rank_of_stage(order) if order else (0,) * stages
    check_choice("schedule", name, SCHEDULES)
    place = v_shape if SCHEDULES[name].v_shaped else looped
    return tuple(place(stage, ranks) for stage in range(stages))
