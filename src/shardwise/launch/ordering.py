"""Find the order of schedule ``auto`` before the first step, for the times of the model's units as measured by the
ranks that will train.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardwise.backend import Backend
from shardwise.config import Config, build_optimizer
from shardwise.core.communicators import CONTROL, Members, groups
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import CHANNELS, OP_INFO
from shardwise.core.plan import Plan
from shardwise.core.recording import RankStep
from shardwise.core.schedules import AUTO
from shardwise.core.timetable import Task, Timetable, read, to_texts
from shardwise.data.loader import Batch
from shardwise.data.stream_loader import open_loader
from shardwise.estimate.order import Order, UnitCosts, order
from shardwise.estimate.simulate import Costs
from shardwise.lower.stages import EVERYWHERE
from shardwise.measure.unit_cost import cost
from shardwise.parallel.pipeline import PIPELINE
from shardwise.report.files import PLAN, SCHEDULE, current
from shardwise.report.tables import size
from shardwise.report.timetable import milliseconds
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.background import Background
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.recorder import Recorder

from .folder import plan_to_keep
from .forecast import Forecast
from .results import write_json

"""The file in the run's folder that rank 0 writes the choice to."""
WARMUP, STEPS, PINGS = 1, 3, 5
TOO_LARGE = b"too large"
"""This stands for the plan that a run began with, if it does not fit now."""

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by the name of a unit and the kind of a task (F, B, I or W)."""


def unordered(config: Config) -> bool:
    """Return whether a config leaves its timetable to be found."""
    return config.parallel.schedule == AUTO and config.parallel.timetable is None


def settle(forecast: Forecast, comm: Communicator, dataset: Any) -> None:
    """Replace the plan of ``forecast``, with which the units are measured, by one with the best order for their times.

    A run that goes on keeps the order in its folder if that suits the config.  All ranks call it together.  Raise
    :class:`ConfigError` on all of them if no order fits into the memory.
    """
    config, first, talk = forecast.config, comm.rank == 0, Background(comm)
    folder = Path(config.train.run_dir)
    try:
        kept, *_ = talk.gather(_kept(forecast, folder).encode() if first else b"")
        if kept == TOO_LARGE:
            forecast.check_kept(False)
        elif kept:
            forecast.take(Plan.from_toml(kept.decode()), f'parallel.schedule = "{AUTO}": the order of {folder / PLAN}')
            return
        each = [json.loads(one) for one in talk.gather(json.dumps(_measured(forecast, comm, dataset)).encode())]
        answer, *_ = talk.gather(json.dumps(_answer(forecast, each, folder)).encode() if first else b"")
    finally:
        talk.close()
    found = json.loads(answer)
    if "error" in found:
        raise ConfigError(found["error"])
    forecast.take(Plan.from_toml(found["plan"]), found["note"])


def settle_by_costs(forecast: Forecast) -> None:
    """Do as :func:`settle` where nothing trains, by the units' FLOPs and memory traffic instead of measured times, if
    the config leaves the timetable open."""
    if not unordered(forecast.config):
        return
    trace, _ = forecast.profile()
    ratio, found = forecast.compiled.device_rates().flops_per_byte, {}
    for c in cost(trace, trace.rows or 2, device=forecast.device.kind):
        traffic = ratio * c.forward_bytes
        f, i, w = c.forward_flops + traffic, c.input_flops + 2 * traffic, float(c.weight_flops)
        found[c.name] = {"F": f, "B": i + w, "I": i, "W": w}
    chosen = _order(forecast, found, 0.0)
    note = (
        f'parallel.schedule = "{AUTO}": an order for the units\' FLOPs and memory traffic; `shardwise train` '
        "measures first"
    )
    forecast.take(_planned(forecast.plan, chosen.stages, chosen.found.timetable), note)


def chosen_before(folder: Path) -> tuple[str, Timetable, Costs] | None:
    """Read what :func:`settle` chose for the run in ``folder``: the order's name, the order, and its stages' costs.

    Return None if it chose nothing; raise :class:`ConfigError` if the file is damaged.
    """
    path = folder / SCHEDULE
    try:
        values = json.loads(path.read_bytes())
        plan = Plan.from_toml(values["plan"])
        timetable = read(plan.pipeline.timetable, plan.mesh.axis_size(PIPELINE), None, 1)
        return values["name"], timetable, Costs(**values["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: damaged: {type(error).__name__}: {error}; legal: what a run has written") from None


def _kept(forecast: Forecast, folder: Path) -> str:
    """Return the plan to go on with, with the order of an earlier start of this run; return an empty string if that
    order does not suit this config, and :data:`TOO_LARGE` if it does not fit."""
    before = plan_to_keep(folder)
    if before is None:
        return ""
    now, given = forecast.plan, forecast.config.parallel
    then, ranks = before.pipeline, before.mesh.axis_size(PIPELINE)
    if (before.microbatches, then.schedule, ranks) != (now.microbatches, AUTO, given.pp):
        return ""
    if given.stages not in (None, then.stages) or given.stages_per_rank not in (None, then.stages_per_rank):
        return ""
    plan = _planned(now, then.stages, read(then.timetable, given.pp, then.stages_per_rank, before.microbatches))
    return plan.to_toml() if max(forecast.peaks(plan)) <= forecast.budget else TOO_LARGE.decode()


def _planned(plan: Plan, stages: Sequence[int], timetable: Timetable) -> Plan:
    each = len(stages) // plan.mesh.axis_size(PIPELINE)
    return plan.replace(schedule=AUTO, stages=tuple(stages), stages_per_rank=each, timetable=to_texts(timetable))


# ---- measuring -------------------------------------------------------------------------------------------------------


def _halved(timetable: Timetable) -> Timetable:
    """Split the backwards of every other microbatch into two parts, one after the other."""

    def parts(task: Task) -> tuple[Task, ...]:
        halves = task.kind == "B" and task.microbatch % 2
        return (task._replace(kind="I"), task._replace(kind="W")) if halves else (task,)

    return tuple(tuple(part for task in tasks for part in parts(task)) for tasks in timetable)


def _measured(forecast: Forecast, comm: Communicator, dataset: Any) -> dict[str, Any]:
    """Measure the seconds of this rank's units, by unit and kind of task, and of messages to the next rank.

    A separate engine runs a few steps on one batch while the other ranks do the same; ranks do not wait for each other
    within a step, and the engine is dropped afterwards.
    """
    plan = forecast.plan
    cut = forecast.compiled.stages_of(forecast.compiled.general)
    plan = plan.replace(schedule=AUTO, timetable=to_texts(_halved(cut.tasks(plan.microbatches))))
    compiled = forecast.compiled.under(plan)
    alone = AloneCommunicator(plan.mesh, comm.rank, comm.device)
    engine = Engine(compiled, alone, build_optimizer(forecast.config), seed=forecast.config.train.seed)
    with open_loader(
        dataset, plan.mesh, comm.rank, forecast.config.data.batch_size, plan.microbatches, forecast.config.train.seed
    ) as loader:
        batch = next(loader)
    units = engine.choose(batch.fields, batch.rows)[0].units
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in range(WARMUP + STEPS):
        comm.barrier(what="a measured step")
        recorded = _step(engine, batch)
        for (unit, kind), each in _seconds(recorded).items() if step >= WARMUP else ():
            found[units[unit].name][kind] += each
    longest = max(unit.outputs for unit in forecast.profile()[1].units)
    return {"units": found, "transfers": list(_transfers(comm, longest))}


def _step(engine: Engine, batch: Batch) -> RankStep:
    with Recorder(engine.interpreter, lambda one: one.unit) as recorder:
        engine.step(batch.fields, batch.rows)
    return recorder.found(0, 0)


def _seconds(recorded: RankStep) -> dict[tuple[int, str], list[float]]:
    """Return the seconds of each microbatch by unit and kind of task; the recorder has recorded units as stages."""
    spent: dict[tuple[int, str, int], float] = defaultdict(float)
    for one in recorded.events:
        task = OP_INFO[one.op].task
        kind = task if task in ("", "F", "W") else "I" if one.microbatch % 2 else "B"
        if kind:
            spent[one.stage, kind, one.microbatch] += one.stop - one.start
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (unit, kind, _), seconds in spent.items():
        found[unit, kind].append(seconds)
    return found


def _transfers(comm: Communicator, nbytes: int) -> Iterator[float]:
    """Yield half of the seconds of messages of ``nbytes`` bytes to the next rank of the pipeline and back."""
    mesh, ranks = comm.mesh, comm.mesh.group(comm.rank, PIPELINE)
    me = ranks.index(comm.rank)
    pipelines = [one.ranks for one in groups(mesh, PIPELINE, CONTROL)]
    ways = [way for line in pipelines for way in pairwise(line)]
    comm.prepare(Members(way, CHANNELS[0], True) for a, b in ways for way in ((a, b), (b, a)))
    x = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=comm.device)

    def wait(handle: Any) -> None:
        handle.wait()
        Backend.of(comm.device).synchronize(comm.device)

    for here, there in enumerate(range(1, len(ranks))):
        comm.barrier(what="a measured message")
        for ping in range(PINGS) if me in (here, there) else ():
            other, start = ranks[there if me == here else here], time.perf_counter()
            if me == there:
                wait(comm.receive(x, other, what="a measured message"))
            wait(comm.send(x, other, what="a measured message"))
            if me == here:
                wait(comm.receive(x, other, what="a measured message"))
                if ping:  # the first one connects
                    yield (time.perf_counter() - start) / 2


# ---- choosing --------------------------------------------------------------------------------------------------------


def _answer(forecast: Forecast, each: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Return, on rank 0, the plan for what all ranks have measured and a note, or an error that says why none fits."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in each:
        for name, kinds in one["units"].items():
            for kind, seconds in kinds.items():
                values[name][kind] += seconds
    seconds = {
        name: {kind: statistics.median(found) for kind, found in kinds.items()} for name, kinds in values.items()
    }
    transfer = statistics.median([found for one in each for found in one["transfers"]])
    try:
        chosen = _order(forecast, seconds, transfer)
    except ConfigError as error:
        return {"error": str(error)}
    plan = _planned(forecast.plan, chosen.stages, chosen.found.timetable).to_toml()
    counted = replace(chosen.costs, activations=(), weight_activations=())
    note = _note(chosen, forecast.config.parallel.pp)
    write_json(
        current(folder, SCHEDULE),
        {"name": f"{AUTO}: {chosen.found.words}", "note": note, "costs": vars(counted), "plan": plan},
    )
    return {"plan": plan, "note": note}


def _order(forecast: Forecast, seconds: Seconds, transfer: float) -> Order:
    parallel = forecast.config.parallel
    units = _unit_costs(forecast, seconds, transfer)
    numbers = (1, 2) if parallel.stages_per_rank is None else (parallel.stages_per_rank,)
    cuts = [units.cut(parallel.pp * n) for n in numbers if parallel.pp * n <= units.units]

    def peaks(stages: tuple[int, ...], timetable: Timetable) -> list[int]:
        return forecast.peaks(_planned(forecast.plan, stages, timetable))

    given = [parallel.stages] if parallel.stages else cuts
    return order(units, parallel.pp, parallel.microbatches, given, peaks, forecast.budget, norm=parallel.norm)


def _unit_costs(forecast: Forecast, seconds: Seconds, transfer: float) -> UnitCosts:
    """Return the costs of the units that a stage can have, with the bytes that each needs for a microbatch."""
    trace, profile = forecast.profile()
    cut = forecast.compiled.stages_of(trace)
    units = [u for u in trace.units if cut.stage[u.index] != EVERYWHERE]
    outputs = {u.index: profile.units[u.index].outputs * (cut.stage[u.index] != EVERYWHERE) for u in trace.units}
    again = forecast.plan.memory.recompute != "none"
    ways = [one.again if again else one.none for one in (profile.units[u.index] for u in units)]
    before = [cut.producers[u.index] for u in units]
    held = [
        sum(outputs[p] for p in (*made, u.index) if set(trace.units[p].outputs) & set(u.held))
        for u, made in zip(units, before, strict=True)
    ]
    f, b, i, w = ([seconds.get(u.name, {}).get(kind, 0.0) for u in units] for kind in "FBIW")
    return UnitCosts(
        f, b, i, w, transfer,
        kept=[outputs[u.index] + way.kept for u, way in zip(units, ways, strict=True)],
        deferred=[way.deferred + own for way, own in zip(ways, held, strict=True)],
        inputs=[sum(outputs[p] for p in made) for made in before],
    )  # fmt: skip


def _note(chosen: Order, ranks: int) -> str:
    """Return a note such as ``parallel.schedule = "auto": from zbv, 2 stages a rank of [3, 3, 3, 3] units: …``."""
    step, named = chosen.found.simulation, chosen.named
    each = len(chosen.stages) // ranks
    words = f"{chosen.found.words}, {each} stage{'s' if each > 1 else ''} a rank of {list(chosen.stages)} units"
    known = (
        f"{milliseconds(step.seconds)} a step simulated, bubble {step.bubble_of_total:.2%} of total, at most "
        f"{size(chosen.peak)} a rank"
    )
    if named is None:
        rest = "no named schedule fits"
    elif named.timetable == step.timetable:
        rest = "the search found nothing better than this named schedule"
    else:
        less = 1 - step.seconds / named.simulation.seconds
        rest = (
            f"the search took {less:.2%} off {named.name}, the best named schedule "
            f"({milliseconds(named.simulation.seconds)})"
        )
    return f'parallel.schedule = "{AUTO}": {words}: {known}; {rest}'
