"""Schedule ``auto`` of a run: measured, chosen within the memory, kept by a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config import Config, build_data, build_plan
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan
from shardwise.core.timetable import read
from shardwise.estimate.devices import Device
from shardwise.estimate.simulate import simulate
from shardwise.launch import ordering
from shardwise.launch.forecast import Forecast
from shardwise.launch.ordering import chosen_before, settle
from shardwise.launch.subject import forecast, load_anywhere, subject
from shardwise.lower.compiled import Compiled
from shardwise.parallel.pipeline import PIPELINE
from shardwise.report.files import PLAN, SCHEDULE
from shardwise.report.timetable import milliseconds
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

TINY = ["model.width=32", "model.layers=4", "model.heads=2", "data.sequence_length=32", "data.batch_size=16"]
AUTO = ["parallel.schedule=auto", "parallel.pp=2", "parallel.microbatches=4"]


def config(*more: str) -> Config:
    return load_anywhere(None, [*TINY, *AUTO, *more])


def made(given: Config, tp: int = 1) -> Compiled:
    found, plan = subject(given, 1), build_plan(given)
    plan = plan.replace(mesh=Mesh((*plan.mesh.axes, *((Axis("tp", tp),) if tp > 1 else ()))))
    return Compiled(found.module, plan, found.batches[0], found.loss)


def ranks(given: Config, compiled: Compiled, budget: int = 1 << 40) -> list[Forecast]:
    """The forecasts of all ranks, as threads."""
    dataset = build_data(given).train

    def rank(comm: ThreadCommunicator) -> Forecast:
        found = Forecast.of(given, compiled, Device("a device", "cpu", budget, budget))
        settle(found, comm, dataset)
        return found

    return run_ranks(compiled.plan.mesh, rank, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(), ("parallel.pp=3", "parallel.recompute=full"), ("parallel.dp=2", "parallel.zero=3", "parallel.reduced=step")],
)
def test_all_ranks_go_by_what_was_found(tmp_path: Path, more: tuple[str, ...]) -> None:
    given = config(f"train.run_dir={tmp_path}", *more)
    found = ranks(given, made(given))
    plan, p = found[0].plan, given.parallel.pp
    assert all(one.plan == plan and one.note == found[0].note for one in found)
    assert plan.pipeline.schedule == "auto" and sum(plan.pipeline.stages) == 6
    assert len(plan.pipeline.stages) == p * plan.pipeline.stages_per_rank
    changed = {"schedule": "1f1b", "timetable": (), "stages": (), "stages_per_rank": 1}
    assert plan.replace(**changed).mesh == build_plan(given).mesh and plan.data.gathered == found[0].plan.data.gathered
    before = chosen_before(tmp_path)
    assert before is not None
    name, timetable, costs = before
    assert timetable == read(plan.pipeline.timetable, p, plan.pipeline.stages_per_rank, 4)
    assert min(costs.forward) > 0 and min(costs.backward) > 0 and min(costs.input) > 0 and max(costs.weight) > 0
    note = str(found[0].note)
    assert f"{milliseconds(simulate(timetable, costs).seconds)} a step simulated" in note
    assert name.removeprefix("auto: ") in note and ("search" in note)
    assert sorted(one.name for one in tmp_path.iterdir()) == [SCHEDULE]


@pytest.mark.slow
def test_stages_in_pieces_are_measured_too(tmp_path: Path) -> None:
    """Each rank by itself, on what it has of parameters and activations."""
    given = config(f"train.run_dir={tmp_path}")
    found = ranks(given, made(given, tp=2))
    assert all(one.plan == found[0].plan for one in found) and sum(found[0].plan.pipeline.stages) == 6
    assert found[0].plan.mesh.axis_size("tp") == 2 and chosen_before(tmp_path) is not None


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(f"train.run_dir={tmp_path}")
    compiled = made(given)
    plan = ranks(given, compiled)[0].plan
    (tmp_path / PLAN).write_text(plan.to_toml())

    def again(*more: str) -> Callable[[], list[Forecast]]:
        other = config(f"train.run_dir={tmp_path}", *more)
        return lambda: ranks(other, compiled.under(build_plan(other)))

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(ordering, "_measured", never)
        for kept in (
            again(),
            again("parallel.recompute=full"),
            again("parallel.dp=2"),
            again(f"parallel.stages={list(plan.pipeline.stages)}"),
        ):
            found = kept()
            assert {one.plan.pipeline for one in found} == {plan.pipeline}
            assert PLAN in str(found[0].note)
        others = ["parallel.microbatches=2", "parallel.pp=3", "parallel.stages=[1, 5]", "parallel.stages_per_rank=3"]
        for other in others:
            with pytest.raises(Exception, match="measured again"):
                again(other)()
        (tmp_path / PLAN).write_text("damaged")
        with pytest.raises(Exception, match="measured again"):
            again()()
    found = again("parallel.microbatches=2")()
    assert found[0].plan.microbatches == 2 and found[0].plan.pipeline.timetable != plan.pipeline.timetable


@pytest.mark.slow
def test_within_the_memory(tmp_path: Path) -> None:
    """Less of it takes longer, by the same times of units."""
    given = config("parallel.microbatches=8", f"train.run_dir={tmp_path}")

    def bare(budget: int) -> Forecast:
        return forecast(given, Device("a device", "cpu", budget, budget))

    most = bare(1 << 40)
    needed = most.worst.peak_bytes
    assert most.plan.pipeline.schedule == "auto" and "FLOPs" in str(most.note)
    assert most.peaks(most.plan) == [most.predict(most.plan, rank).peak_bytes for rank in range(2)]
    less = bare(needed - 1)
    assert less.fits and less.plan.pipeline.timetable != most.plan.pipeline.timetable
    with pytest.raises(
        ConfigError, match='parallel.schedule = "auto": no timetable was found that fits in 1,000 bytes a rank'
    ):
        bare(1000)


@pytest.mark.slow
def test_measuring_leaves_no_trace(tmp_path: Path) -> None:
    """Neither in the values that training starts from nor in the order of samples."""
    given = config(f"train.run_dir={tmp_path}")
    compiled = made(given)
    before = {name: value.clone() for name, value in compiled.module.state_dict().items()}
    found = ranks(given, compiled)[0]
    assert found.compiled.values is compiled.values
    assert all(value.equal(before[name]) for name, value in compiled.module.state_dict().items())
    assert found.compiled.programs(found.compiled.general, 4)[0] != compiled.programs(compiled.general, 4)[0]


def test_a_damaged_choice_is_named(tmp_path: Path) -> None:
    assert chosen_before(tmp_path) is None
    (tmp_path / SCHEDULE).write_text(json.dumps({"name": "auto"}))
    with pytest.raises(ConfigError, match=f"{SCHEDULE}: damaged: KeyError"):
        chosen_before(tmp_path)


def test_a_given_timetable_is_not_looked_for() -> None:
    texts = '["F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"]'
    given = config(f"parallel.timetable={texts}")
    found = forecast(given)
    assert found.plan == build_plan(given) and found.note is None
    assert Plan.from_toml(found.plan.to_toml()).mesh.axis_size(PIPELINE) == 2
    assert replace(given.parallel, timetable=None).schedule == "auto"
