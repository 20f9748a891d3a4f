"""A simulated step is drawn as a timetable."""

from __future__ import annotations

from shardwise.estimate.simulate import Costs, Simulation

from .timetable import Drawing, TimeBox


def drawing(title: str, simulation: Simulation, costs: Costs, norm: str = "barrier") -> Drawing:
    """Return what :func:`shardwise.estimate.simulate.simulate` found for ``costs`` and ``norm``, with optimizer steps.

    The memory of a rank is that of its activations, in microbatches of a rank.
    """
    critical = set(simulation.critical)
    boxes = [
        TimeBox(rank, float(start), float(stop), *task, critical=(rank, place) in critical)
        for rank, tasks in enumerate(simulation.timetable)
        for place, (task, start, stop) in enumerate(
            zip(tasks, simulation.start[rank], simulation.stop[rank], strict=True)
        )
    ]
    return Drawing(
        title, (*boxes, *_updates(simulation, costs, norm)), len(simulation.timetable), simulation.seconds,
        simulation.bubble_of_total,
        simulation.peak_bytes, "activations",
    )  # fmt: skip


def _updates(simulation: Simulation, costs: Costs, norm: str) -> list[TimeBox]:
    """Return the reduction of the norm, which ends for all ranks at once, and their optimizer steps."""
    ends = [float(times[-1]) for times in simulation.stop]
    steps = [sum(costs.step[stage] for stage in {task.stage for task in tasks}) for tasks in simulation.timetable]
    last = simulation.critical[-1][0]
    if norm != "barrier":
        return [
            TimeBox(r, end, end + step, "STEP", critical=r == last)
            for r, (end, step) in enumerate(zip(ends, steps, strict=True))
            if step
        ]
    begin, end = max(ends), max(ends) + costs.norm
    norms = [TimeBox(rank, begin, end, "NORM", critical=rank == last) for rank in range(len(ends)) if costs.norm]
    longest = steps.index(max(steps))
    return norms + [
        TimeBox(rank, end, end + step, "STEP", critical=rank == longest) for rank, step in enumerate(steps) if step
    ]
