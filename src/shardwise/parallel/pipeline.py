"""Cut a model by layers into the stages of a pipeline, which the ranks of the axis ``pp`` compute one after the other.

The schedule (``schedule.py``) says which rank computes what, and when.  The costs of its units say where a model is
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan
from shardwise.core.schedules import AUTO
from shardwise.core.timetable import Timetable, rank_of_stage, read
from shardwise.parallel.schedule import check_schedule, stage_ranks

PIPELINE = "pp"


def pipeline(
    plan: Plan,
    size: int,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    stages: Sequence[int] = (),
    timetable: Sequence[str] = (),
) -> Plan:
    """Return ``plan`` over a pipeline of ``size`` ranks, the outermost axis, because its messages are the smallest.

    ``stages_per_rank`` is by default the least that the schedule takes, or that of the ``timetable``, which schedule
    "auto" needs.
    """
    if schedule == AUTO:
        found = rank_of_stage(read(timetable, size, stages_per_rank, plan.microbatches)) if timetable else ()
        stages_per_rank = stages_per_rank or max(1, len(found) // size)
    else:
        stages_per_rank = stages_per_rank or check_schedule(schedule, size, plan.microbatches).stages_per_rank
        check_schedule(schedule, size, plan.microbatches, stages_per_rank)
    others = tuple(axis for axis in plan.mesh.axes if axis.name != PIPELINE)
    mesh = Mesh((Axis(PIPELINE, size), *others)) if size > 1 else Mesh(others)
    return plan.replace(
        mesh=mesh, schedule=schedule, stages_per_rank=stages_per_rank, stages=tuple(stages), timetable=tuple(timetable)
    )


def carried(plan: Plan) -> Timetable:
    """Return the timetable that the plan carries for its step; () where its schedule makes one."""
    options = plan.pipeline
    if not options.timetable:
        return ()
    return read(options.timetable, plan.mesh.axis_size(PIPELINE), options.stages_per_rank, plan.microbatches)


def stages_in_words(plan: Plan, rank: int) -> str:
    """Return the stages of a rank in words, ``stage 1`` or ``stages 0, 3``; "" where there is no pipeline."""
    size, place = plan.mesh.axis_size(PIPELINE), plan.mesh.index(rank, PIPELINE)
    if size == 1:
        return ""
    where = stage_ranks(plan.pipeline.schedule, size, size * plan.pipeline.stages_per_rank, carried(plan))
    return stages_at(where, place)


def stages_at(homes: Sequence[int], place: int) -> str:
    """Return the stages at a place in the pipeline in words; ``homes`` are the places of all stages."""
    own = [str(stage) for stage, home in enumerate(homes) if home == place]
    return f"stage{'s' * (len(own) > 1)} {', '.join(own)}"


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many units each of ``stages`` neighbouring stages gets, so that the most expensive one is cheapest.

    This is dynamic programming over units and stages, O(units² · stages); among equals the sum of squares is least.

    ::

        costs 1 5 5 5 2, stages 2:  [1 5 5] [5 2]
    """
    units = len(costs)
    if not 1 <= stages <= units:
        raise ConfigError.on("stages", f"{stages} of {units} units are not legal", f"1 to {units}.")
    before = [0.0, *accumulate(costs)]
    best: list[tuple[float, float] | None] = [(0.0, 0.0), *[None] * units]  # [i]: (largest, squares) of i units
    cuts: list[list[int]] = []
    for _ in range(stages):
        found: list[tuple[float, float] | None] = [None] * (units + 1)
        cut = [0] * (units + 1)
        for stop in range(1, units + 1):
            for start in range(stop):
                rest = best[start]
                if rest is None:
                    continue
                mine = before[stop] - before[start]
                value = max(rest[0], mine), rest[1] + mine * mine
                known = found[stop]
                if known is None or value < known:
                    found[stop], cut[stop] = value, start
        best = found
        cuts.append(cut)
    ends = [units]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.reverse()
    return tuple(stop - start for start, stop in zip(ends, ends[1:], strict=False))
