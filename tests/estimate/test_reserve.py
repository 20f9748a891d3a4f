"""What a GPU has for tensors: its memory, less what others have taken, and what a process takes beside its tensors."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from shardwise.backend import Backend
from shardwise.cli.main import app
from shardwise.config import build_plan
from shardwise.core.communicators import communicators, sizes
from shardwise.core.devices import MODELS, NAMED, model_of
from shardwise.core.errors import ConfigError
from shardwise.core.program import class_of
from shardwise.core.rates import rates
from shardwise.estimate.devices import GIB, Device, Reserve, here, named
from shardwise.launch.devices import Card
from shardwise.launch.forecast import Forecast, changed
from shardwise.launch.subject import forecast, load_anywhere
from shardwise.launch.training import scarcest
from shardwise.lower.stages import StageSplit, weights_of

TINY = ["model.width=32", "model.layers=4", "model.heads=2", "data.sequence_length=32", "data.batch_size=16"]
PLANS = {
    "one rank": ["parallel.dp=1"],
    "replicas": ["parallel.dp=4"],
    "zero 3 and replicas": ["parallel.dp=4", "parallel.dp_replicate=2", "parallel.zero=3"],
    "pipeline": ["parallel.pp=4", "parallel.dp=2", "parallel.microbatches=4"],
    "two stages a rank": [
        "parallel.pp=2",
        "parallel.stages_per_rank=2",
        "parallel.schedule=interleaved",
        "parallel.microbatches=4",
    ],
    "layers": ["parallel.tp=2", "parallel.dp=2"],
}


def predicted(*plan: str, device: str = "H100-80GB") -> Forecast:
    return forecast(load_anywhere(None, [*TINY, *plan]), named(device))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_communicators_of_a_rank_are_those_that_training_makes(name: str) -> None:
    found = predicted(*PLANS[name])
    compiled, plan, mesh = found.compiled, found.plan, found.plan.mesh
    programs = compiled.programs(compiled.general, plan.microbatches)
    more = compiled.beside_programs(compiled.general)
    made = communicators(programs, mesh, more)
    for rank in range(mesh.size):
        mine = sizes(class_of(programs, mesh, rank), mesh, more)
        assert Counter(mine) == Counter(len(one.ranks) for one in made if rank in one.ranks)
    assert set(made) <= set(compiled.first_communicators)
    assert bool(made) == (mesh.size > 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_not_for_tensors_is_taken_from_the_budget(name: str) -> None:
    found = predicted(*PLANS[name])
    beside, reserve = found.beside, Reserve()
    assert list(beside) == ["context", "workspaces", "communicators", "fragmentation"]
    assert found.budget + sum(beside.values()) == found.device.memory == round(79.10 * GIB)
    rest = found.device.memory - beside["context"] - beside["workspaces"] - beside["communicators"]
    assert beside["fragmentation"] == int(0.03 * rest)
    assert (beside["communicators"] == 0) == (found.plan.mesh.size == 1)
    program = found.worst.program
    counted = sizes(program, found.plan.mesh, found.compiled.beside_programs(found.compiled.general))
    assert beside["communicators"] == sum(reserve.pair if ranks == 2 else reserve.group for ranks in counted)


def test_a_limit_of_ones_own_is_for_tensors_and_a_cpu_has_nothing_beside() -> None:
    own = predicted("parallel.dp=2", "train.memory_gib=3")
    assert own.budget == 3 * GIB and own.beside["context"] > 0
    cpu = predicted("parallel.dp=2", device="cpu=8")
    assert cpu.beside == {} and cpu.budget == 8 * GIB and cpu.device.taken == 0


@pytest.mark.slow
def test_what_others_have_taken_of_a_card_is_not_there_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free, mine = 80 * GIB, 10 * GIB, 2 * GIB
    monkeypatch.setattr(Backend, "free_and_total", lambda self, device: (free, total))
    monkeypatch.setattr(Backend, "name", lambda self, device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(Backend, "reserved", lambda self, device: mine)
    found = here(torch.device("xpu", 0))
    assert (found.memory, found.budget) == (total, free + mine + Reserve().context)
    assert found.taken == total - found.budget and found.model is NAMED["H100-80GB"]
    free = total  # an estimate of the context never makes more of a card than there is
    assert here(torch.device("xpu", 0)).budget == total
    scarce = Device(
        "NVIDIA H100 80GB HBM3", "gpu", total, 1 * GIB + 8 * 2**20, Reserve(context=2**30, workspaces=2**21)
    )
    told = forecast(load_anywhere(None, [*TINY, "parallel.dp=1", "data.batch_size=64"]), scarce)
    assert not told.fits
    with pytest.raises(
        ConfigError,
        match=r"has for tensors on NVIDIA H100 80GB HBM3 \(of 80.0+ GiB, .* beside tensors, 7\d.* GiB others have "
        r"taken\)",
    ):
        told.check()


def test_another_plan_is_asked_with_its_own_communicators() -> None:
    """One rank has none: what a plan on more ranks takes for its own counts against it, when the nearest that fits is
    looked for.
    """
    found = predicted("parallel.dp=1")
    more = found._peak({"parallel.dp": 2})
    plain = found.predict(found.plan.replace(mesh=predicted("parallel.dp=2").plan.mesh)).peak_bytes
    assert more > plain + Reserve().pair


@pytest.mark.slow
def test_a_limit_of_ones_own_does_not_pay_for_communicators() -> None:
    """``train.memory_gib`` is for tensors alone, whatever plan is looked for."""
    found = predicted("parallel.dp=2", "train.memory_gib=1")
    for changes in ({"parallel.dp": 1, "parallel.tp": 2}, {"parallel.zero": 3}, {"parallel.dp": 4}):
        plan = build_plan(changed(found.config, changes))
        assert found._peak(changes) == found.predict(plan).peak_bytes
    shared = predict_shared()
    least = shared.worst.peak_bytes / GIB
    tight = predicted("parallel.dp=2", f"train.memory_gib={least * 1.001}", device="T4")
    assert tight.fits or tight.nearest().changes is not None


def predict_shared() -> Forecast:
    return predicted("parallel.dp=1", "parallel.tp=2", device="T4")


@pytest.mark.slow
def test_a_plan_with_fewer_communicators_is_found_and_a_device_without_room_is_named() -> None:
    """ZeRO-3 gathers in a communicator of its own, which a small card has no room for."""
    two, three = (predicted("parallel.dp=2", f"parallel.zero={zero}", device="H200=16") for zero in (0, 3))
    assert sum(three.beside.values()) > sum(two.beside.values()) + 500e6
    least = (sum(two.beside.values()) - two.beside["fragmentation"] + two.worst.peak_bytes / 0.97 + 2**20) / GIB
    tight = predicted("parallel.dp=2", "parallel.zero=3", device=f"H200={least}")
    assert tight.budget == 0 and not tight.fits
    assert predicted("parallel.dp=2", device=f"H200={least}").fits
    fit = tight.nearest()
    assert fit.changes == {"parallel.zero": 0} and fit.peak == two.worst.peak_bytes
    with pytest.raises(
        ConfigError,
        match=r"more than H200 leaves: of its .* are for what is beside tensors; most of it.*plan that fits: "
        r"parallel.zero = 0",
    ):
        tight.check()
    none = predicted("parallel.dp=2", "data.batch_size=2", device="H200=0.25")
    with pytest.raises(
        ConfigError, match=r"no plan fits; legal: a device with at least (.*) free, the least that any plan"
    ) as error:
        none.check()
    told = re.search(r"at least ([0-9.]+) ([MG]iB) free", str(error.value))
    assert told is not None
    legal = float(told[1]) * {"MiB": 2**-10, "GiB": 1}[told[2]] * 1.001
    changes = none.nearest().least_changes
    assert forecast(changed(none.config, changes), named(f"H200={legal}")).fits


def test_a_device_of_all_ranks_is_that_of_the_rank_with_least() -> None:
    big, small = named("H100-80GB"), named("T4")
    cards = [Card(one.name, one.memory, one.budget) for one in (big, small)]
    found = scarcest(big, [big.budget, small.budget], [big.memory, small.memory], cards)
    assert found == small and found.taken == 0
    cpu = named("cpu=8")
    assert scarcest(cpu, [cpu.budget, 5.0], [cpu.memory, 6.0], []) == Device("cpu", "cpu", 6, 5)


@pytest.mark.slow
def test_memory_shows_them() -> None:
    command = ["memory", *TINY, "parallel.dp=4", "--device", "A100-40GB"]
    values = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert values["budget_bytes"] + sum(values["beside_bytes"].values()) == round(39.38 * GIB)
    assert Device.from_dict(values["device"]) == named("A100-40GB")
    words = CliRunner().invoke(app, command).stdout
    assert "beside tensors" in words and max(map(cell_len, words.splitlines())) <= 80
    for what in ("context 736.0 MiB", "workspaces 64.0 MiB", "communicators", "fragmentation"):
        assert what in words


def test_a_device_read_from_a_run_of_before_has_no_reserve() -> None:
    old = {"name": "cpu", "kind": "cpu", "memory": 5, "budget": 4}
    assert Device.from_dict(old) == Device("cpu", "cpu", 5, 4)
    assert (
        Device.from_dict({"name": "T4", "kind": "gpu", "memory": 100, "budget": 95}).taken == 0
    )  # the margin that there was
    assert Device.from_dict(named("H200").to_dict()) == named("H200")


@pytest.mark.parametrize(
    ("name", "words"),
    [("H100", "H100-80GB, "), ("H100-80GB=x", "above 0"), ("MI300X", "MI300X=80"), ("MI300X=-1", "above 0")],
)
def test_devices_that_are_not_known(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: .*{words}"):
        named(name)


def test_names_of_models_are_their_own() -> None:
    assert len(NAMED) == len(MODELS)
    assert model_of("NVIDIA H200") is model_of("H200") and model_of("AMD Instinct MI300X") is NAMED["MI300X"]
    assert named("MI300X=191").memory == 191 * GIB and model_of("cpu") is None


def test_rates_are_those_of_the_model() -> None:
    """As much of each data sheet as is measured of an H100, which is what an unknown GPU is taken to be."""
    assumed, known = rates("gpu", "bf16"), rates("gpu", "bf16", model=NAMED["A100-80GB"])
    assert rates("gpu", "bf16", model=NAMED["H100-80GB"]) == assumed
    assert (
        assumed.flops == pytest.approx(794e12)
        and assumed.memory == 3.35e12
        and assumed.link.bandwidth == pytest.approx(330e9)
    )
    assert known.flops / assumed.flops == pytest.approx(312 / 989) and known.link.bandwidth == pytest.approx(220e9)
    for model in MODELS:
        for precision in ("fp32", "fp64", "bf16", "fp16"):
            assert 0.2e12 < rates("gpu", precision, model=model).flops < 3e15


@pytest.mark.slow
def test_stages_are_balanced_by_the_devices_that_compute_them() -> None:
    """A GPU computes more while it moves a byte, so what moves bytes weighs more there; a forecast cuts as training
    does.
    """
    found = predicted("parallel.pp=2", "parallel.microbatches=2", "parallel.precision=bf16")
    compiled = found.compiled
    gpu, cpu = compiled.unit_weights(), weights_of(compiled.general)
    assert all(gpu[unit] >= cpu[unit] for unit in cpu) and gpu != cpu
    assert gpu == weights_of(compiled.general, "gpu", rates("gpu", "bf16", model=NAMED["H100-80GB"]))
    cut = compiled.stages_of(compiled.general)
    assert cut.stage == StageSplit.of(compiled.general, found.plan, weights=compiled.unit_weights).stage
    rank = found.worst.rank
    assert found.worst.program == class_of(compiled.programs(compiled.general, 2), found.plan.mesh, rank)
