"""A step that a run has recorded becomes a timetable: the files of its ranks are put on one axis of time."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.core.instruction import OP_INFO, Op
from shardwise.core.recording import RankStep
from shardwise.core.timetable import Task, Timetable
from shardwise.estimate.simulate import Costs, simulate
from shardwise.runtime.recorder import TRACE, trace_name

from .files import parsed_line
from .kinds import kind_of
from .simulated import drawing
from .timetable import COMPUTE, Drawing, TimeBox, mark_critical

SEEN = 1 / 500  # the fraction of a step below which a gap is less than two pixels wide
LEGAL = "legal: the folder of a run (train.run_dir) that has come to one of its train.trace_steps"


def of_recorded(folder: Path, step: int | None = None, *, whole: bool = True) -> Drawing:
    """Return what the ranks of the run in ``folder`` did in ``step``, by default the last that all of them have
    recorded; instructions that were run again appear each time.

    With ``whole``, instructions of a kind, stage and microbatch that follow each other are one box.  Raises
    :class:`ConfigError` if there is no such step.
    """
    ranks = read_step(folder, step)
    hosts = {one.host: min(r.wall for r in ranks if r.host == one.host) for one in ranks}
    begins = [one.wall - hosts[one.host] for one in ranks]
    seconds = max(begin + one.seconds for begin, one in zip(begins, ranks, strict=True))
    boxes = [box for begin, one in zip(begins, ranks, strict=True) for box in _boxes(one, begin)]
    busy = sum(box.stop - box.start for box in boxes if box.lane == COMPUTE)
    if whole:
        boxes = [box for one in ranks for box in _merged([b for b in boxes if b.rank == one.rank], SEEN * seconds)]
    notes = ("what communicates is drawn until it was waited for",) if any(box.lane != COMPUTE for box in boxes) else ()
    return Drawing(
        f"{folder}: step {ranks[0].step} of {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, recorded",
        mark_critical(boxes, [one.pipeline for one in ranks]),
        len(ranks), seconds, 1 - busy / (seconds * len(ranks)), tuple(one.memory for one in ranks), notes=notes,
    )  # fmt: skip


def predicted(folder: Path, step: int | None = None) -> Drawing:
    """Return the recorded step simulated: each rank's tasks in its order, each in the median time of its kind on its
    stage; communication takes no time.  Compared with :func:`of_recorded` it shows what communication and uneven times
    cost.

    Pipelines that are replicas of each other are simulated each for itself.
    """
    ranks = read_step(folder, step)
    boxes: list[TimeBox] = []
    for first in sorted({one.pipeline for one in ranks}):
        group = [one for one in ranks if one.pipeline == first]
        timetable, costs = _costs(group)
        found = drawing("", simulate(timetable, costs), costs)
        boxes += [replace(box, rank=group[box.rank].rank, critical=False) for box in found.boxes]
    boxes = list(mark_critical(boxes, [one.pipeline for one in ranks]))
    seconds = max(box.stop for box in boxes)
    busy = sum(box.stop - box.start for box in boxes)
    return Drawing(
        f"step {ranks[0].step}, simulated from the medians of its tasks", tuple(boxes), len(ranks), seconds,
        1 - busy / (seconds * len(ranks)),
        notes=("without communication",),
    )  # fmt: skip


def measured(folder: Path, step: int | None = None, microbatches: int | None = None) -> tuple[Timetable, Costs]:
    """Return the tasks of a recorded step's first pipeline, in each rank's order, and the median seconds of its stages.

    ``microbatches`` is the number in a batch; of a window of several batches the first is taken.
    """
    ranks = read_step(folder, step)
    timetable, costs = _costs([one for one in ranks if one.pipeline == ranks[0].pipeline])
    if microbatches is None:
        return timetable, costs
    batches = (1 + max(task.microbatch for tasks in timetable for task in tasks)) / microbatches
    first = tuple(tuple(task for task in tasks if task.microbatch < microbatches) for tasks in timetable)
    return first, replace(costs, step=[seconds / batches for seconds in costs.step])


def _costs(group: Sequence[RankStep]) -> tuple[Timetable, Costs]:
    seconds = [_tasks(one) for one in group]
    stages = 1 + max(task.stage for tasks in seconds for task in tasks)
    like: dict[tuple[str, int], list[float]] = defaultdict(list)
    for tasks in seconds:
        for task, length in tasks.items():
            like[task.kind, task.stage].append(length)
    medians = {
        kind: [statistics.median(like[kind, s]) if (kind, s) in like else 0.0 for s in range(stages)] for kind in "FBIW"
    }
    # A stage that defers nothing has B in place of I.
    medians["I"] = [medians["I" if ("I", s) in like else "B"][s] for s in range(stages)]
    updates = [0.0] * stages
    for one, tasks in zip(group, seconds, strict=True):
        updates[next(iter(tasks)).stage] += sum(
            event.stop - event.start for event in one.events if event.op is Op.STEP and event.lasting
        )
    return tuple(map(tuple, seconds)), Costs(medians["F"], medians["I"], medians["W"], medians["B"], step=updates)


def _tasks(one: RankStep) -> dict[Task, float]:
    """Return the tasks of a rank in its order, and how many seconds they took; recomputing is a part of backward.

    If a backward is in two parts, whatever of it has no second part counts to the first.
    """
    found: dict[Task, float] = {}
    halved = {(event.stage, event.microbatch) for event in one.events if event.op is Op.BACKWARD_WEIGHT}
    for event in one.events:
        kind = OP_INFO[event.op].task
        if kind == "B" and (event.stage, event.microbatch) in halved:
            kind = "I"
        if kind and event.microbatch >= 0 and event.lasting:
            task = Task(kind, event.stage, event.microbatch)
            found[task] = found.get(task, 0.0) + event.stop - event.start
    return found


def read_step(folder: Path, step: int | None = None) -> list[RankStep]:
    """Return what each rank has recorded of ``step``, by default the last that all have."""
    first = _read(folder / TRACE / trace_name(0))
    files = [first, *(_read(folder / TRACE / trace_name(rank)) for rank in range(1, next(iter(first.values())).ranks))]
    common = sorted(set.intersection(*map(set, files)))
    if not common:
        raise ConfigError(f"{folder / TRACE}: no step that all {len(files)} ranks have recorded; {LEGAL}")
    if step is not None and step not in common:
        raise ConfigError(f"--step {step}: not recorded in {folder / TRACE}; legal: {', '.join(map(str, common))}")
    return [steps[common[-1] if step is None else step] for steps in files]


def _read(path: Path) -> dict[int, RankStep]:
    """Return the steps of a rank by number; of a step that was taken twice, after a restart, the later one."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {LEGAL}") from None
    values = [found for line in lines if (found := parsed_line(line)) is not None]  # the last may be cut short
    try:
        steps = [RankStep.from_dict(one) for one in values]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: damaged: {type(error).__name__}: {error}; {LEGAL}") from None
    if not steps:
        raise ConfigError(f"{path}: no step is recorded; {LEGAL}")
    return {one.step: one for one in steps if one.ranks == steps[-1].ranks}


def _boxes(one: RankStep, begin: float) -> Iterator[TimeBox]:
    """Yield a box for each instruction.  A lane runs in order, so what is posted there begins when the one before is
    done. Messages between two ranks are matched in order too; of a repeated message the last counts."""
    free: dict[str, float] = {}
    sent: Counter[tuple[int, int]] = Counter()
    for event in one.events:
        start = max(begin + event.start, free.get(event.lane, 0.0))
        stop = free[event.lane] = max(start, begin + event.stop)
        flow = ""
        if event.peer >= 0 and event.lasting:
            ends = (one.rank, event.peer) if event.op is Op.SEND else (event.peer, one.rank)
            flow = f"{ends[0]} to {ends[1]}: {sent[ends]}"
            sent[ends] += 1
        kind = kind_of(event.op)
        yield TimeBox(
            one.rank, start, stop, kind, event.stage, event.microbatch, event.lane, flow=flow, name=event.text
        )


def _merged(boxes: Sequence[TimeBox], gap: float) -> Iterator[TimeBox]:
    """Yield one box for those that compute one after the other, with at most ``gap`` seconds in between, and have the
    same kind, stage and microbatch."""
    last: TimeBox | None = None
    for box in boxes:
        if box.lane != COMPUTE:
            yield box
        elif last is not None and _alike(last, box) and box.start - last.stop <= gap:
            last = replace(last, stop=box.stop, name="")
        else:
            if last is not None:
                yield last
            last = box
    if last is not None:
        yield last


def _alike(one: TimeBox, other: TimeBox) -> bool:
    return (one.kind, one.stage, one.microbatch) == (other.kind, other.stage, other.microbatch)
