"""Does a plan fit, and what would: the numbers in the words are those of predictions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from shardwise.config import Config, build_optimizer, build_plan
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.estimate.devices import GIB, Device, named
from shardwise.estimate.predict import predict
from shardwise.launch.forecast import Forecast, changed, gib_at_least
from shardwise.launch.left_open import COMBINATIONS, EarlierChoice
from shardwise.launch.subject import forecast, load_anywhere, with_device_choices
from shardwise.lower.compiled import Compiled
from shardwise.lower.stages import StageSplit
from shardwise.report.tables import size
from shardwise.shard.solver.cost_model import MicrobatchCost

TINY = ["model.width=32", "model.layers=3", "model.heads=2", "data.sequence_length=32", "data.batch_size=16"]


def config(*more: str) -> Config:
    return load_anywhere(None, [*TINY, *more])


def device(nbytes: int, kind: str = "gpu") -> Device:
    return Device("a device", kind, nbytes, nbytes)


def bare(given: Config, budget: int = 1 << 40, kind: str = "gpu") -> Forecast:
    return forecast(given, device(budget, kind))


@pytest.mark.slow
def test_a_forecast_is_the_prediction_of_the_plan() -> None:
    given = config("parallel.dp=4", "parallel.zero=2", "parallel.microbatches=2", "parallel.reduced=microbatch")
    found = bare(given)
    mine = predict(found.compiled.general, build_plan(given), build_optimizer(given), rows=16, device="gpu")
    assert found.plan == build_plan(given) and found.note is None
    assert (found.worst.peak, found.worst.persistent) == (mine.peak, mine.persistent)
    assert found.fits and bare(given, mine.peak_bytes).fits and not bare(given, mine.peak_bytes - 1).fits


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gathered_is_the_longest_that_fits(microbatches: int) -> None:
    open_ = config(
        "parallel.dp=4", "parallel.zero=3", f"parallel.microbatches={microbatches}", "parallel.reduced=microbatch"
    )
    found = bare(open_)
    plan, choice = build_plan(open_), build_optimizer(open_)
    needs = {
        word: predict(found.compiled.general, plan.replace(gathered=word), choice, rows=16, device="gpu").peak_bytes
        for word in ("step", "forward", "use")
    }
    assert found.plan.data.gathered == "step" and f"({size(needs['step'])} needed)" in str(found.note)
    assert needs["step"] > needs["use"]
    for budget in sorted({n + d for n in needs.values() for d in (-1, 0)}):
        expected = next((word for word, n in needs.items() if n <= budget), "use")
        now = bare(open_, budget)
        assert now.plan.data.gathered == expected and now.plan == plan.replace(gathered=expected)
        assert now.fits == (budget >= needs[expected])
        assert ("longest that fits" in str(now.note)) == now.fits
    fixed = bare(config("parallel.dp=4", "parallel.zero=3", "parallel.gathered=forward"))
    assert fixed.plan.data.gathered == "forward" and fixed.note is None
    assert bare(config("parallel.dp=4", "parallel.zero=2")).note is None


@pytest.mark.slow
def test_gathered_and_reduced_are_what_communicates_least() -> None:
    """In the order of the bytes that a step of several microbatches communicates."""
    open_ = config("parallel.dp=4", "parallel.zero=3", "parallel.microbatches=4")
    found = bare(open_)
    assert COMBINATIONS == (
        ("step", "step"), ("step", "microbatch"), ("forward", "step"), ("forward", "microbatch"), ("use", "step"),
        ("use", "microbatch")
    )  # fmt: skip
    needs = {way: found.predict(found.plan.replace(gathered=way[0], reduced=way[1])).peak_bytes for way in COMBINATIONS}
    assert needs["step", "step"] > needs["step", "microbatch"] > needs["use", "microbatch"]
    for budget in sorted({n + d for n in needs.values() for d in (-1, 0)}):
        now = bare(open_, budget)
        expected = next((way for way, n in needs.items() if n <= budget), COMBINATIONS[-1])
        assert (now.plan.data.gathered, now.plan.data.reduced) == expected
    half = bare(config("parallel.dp=4", "parallel.zero=2", "parallel.microbatches=4"))
    assert half.plan.data.reduced == "step" and half.plan.data.gathered == "use" and "gathered" not in str(half.note)
    assert (
        bare(config("parallel.dp=4", "parallel.zero=2", "parallel.microbatches=4", "parallel.reduced=microbatch")).note
        is None
    )


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_way() -> None:
    open_ = config("parallel.dp=4", "parallel.zero=3", "parallel.microbatches=4")
    compiled = bare(open_).compiled.under(build_plan(open_))
    before = EarlierChoice(COMBINATIONS.index(("forward", "microbatch")), 0)
    again = Forecast.of(open_, compiled, device(1 << 40), before=before)
    assert (again.plan.data.gathered, again.plan.data.reduced) == COMBINATIONS[before.way]
    assert EarlierChoice.of(again.plan) == before
    fitting = again.predict(again.plan.replace(gathered="use", reduced="microbatch")).peak_bytes
    tight = Forecast.of(open_, compiled, device(fitting), before=before)
    assert (tight.plan.data.gathered, tight.plan.data.reduced) == COMBINATIONS[-1]
    same = replace(open_, train=replace(open_.train, deterministic=True))
    assert EarlierChoice.of(Forecast.of(same, compiled, device(1 << 40), before=before).plan) == before
    with pytest.raises(
        ConfigError, match=r"train.deterministic: what this run began with .* legal: as much free memory"
    ):
        Forecast.of(same, compiled, device(fitting), before=before)
    said = config("parallel.dp=4", "parallel.zero=3", "parallel.microbatches=4", "parallel.gathered=use")
    said = replace(said, train=replace(said.train, deterministic=True))
    for shown in (said, replace(said, parallel=replace(said.parallel, reduced="step"))):  # changed by the user
        now = Forecast.of(shown, compiled.under(build_plan(shown)), device(1 << 40), before=before)
        assert (now.plan.data.gathered, now.plan.data.reduced) == ("use", shown.parallel.reduced or "microbatch")


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_a_solver_had() -> None:
    """Whatever is free when it starts again: less would have led to another plan, and so would more."""
    given = config("parallel.tp=2", "parallel.tensor_plan=auto", "data.batch_size=2")
    largest = bare(given).worst.peak_bytes
    first = bare(given, largest - 1)
    before = EarlierChoice.of(first.plan)
    assert first.fits and before.tensor_bytes > 0 and first.worst.peak_bytes < largest
    compiled = first.compiled.under(build_plan(given))
    more, less = (Forecast.of(given, compiled, device(n), before=before) for n in (1 << 40, first.worst.peak_bytes))
    for again in (more, less):
        assert again.plan == first.plan and "as this run began" in str(again.note)
        assert again.worst.program.instructions == first.worst.program.instructions
    same = replace(given, train=replace(given.train, deterministic=True))
    with pytest.raises(ConfigError, match="train.deterministic: what this run began with"):
        Forecast.of(same, compiled, device(first.worst.peak_bytes - 1), before=before)


@pytest.mark.full
def test_stages_are_those_that_train_where_a_mask_of_ones_has_a_trace_of_its_own() -> None:
    """That trace lacks the unit of inputs, so that all others have other numbers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 5}
    module = BertForMaskedLM(BertConfig(vocab_size=512, **sizes))
    ids = torch.randint(0, 512, (16, 8))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    given = config("parallel.pp=2", "parallel.dp=1", "parallel.microbatches=4")
    compiled = Compiled(module, build_plan(given), batch)
    found = Forecast.of(given, compiled, device(1 << 40))
    ones, plan = compiled.trace(compiled.masks, 4), found.plan
    assert compiled.masks and len(ones.units) < len(compiled.general.units)
    assert StageSplit.of(ones, plan, weights=compiled.unit_weights).stage != compiled.stages_of(ones).stage
    assert compiled.stages_of(ones, plan.replace(prefetch=2)).stage == compiled.stages_of(ones).stage
    trained = predict(
        ones, plan, build_optimizer(given), rows=16, device="gpu", split=lambda one, _: compiled.stages_of(one)
    )
    assert found.worst.peak == trained.peak and found.worst.program == trained.program
    assert found.peaks(plan) == [found.predict(plan, rank).peak_bytes for rank in range(2)]


def test_the_host_has_to_have_room_for_what_is_offloaded() -> None:
    found = bare(config("parallel.dp=2", "parallel.offload=optimizer"))
    needed = found.worst.host_bytes
    assert needed > 0
    found.check_host(needed)
    with pytest.raises(ConfigError, match=r'parallel.offload = "optimizer": rank 0 needs .* on the host'):
        found.check_host(needed - 1)
    bare(config("parallel.dp=2")).check_host(0)


def test_all_commands_choose_alike() -> None:
    given = config("parallel.dp=2", "parallel.zero=3", "train.memory_gib=1")
    found = forecast(given)
    compiled = with_device_choices(given, Compiled(found.compiled.module, build_plan(given), found.compiled.example))
    assert compiled.plan == found.plan and compiled.plan.data.gathered == "step"
    assert found.note in compiled.general.notes
    closed = config("parallel.dp=2", "parallel.zero=1")
    one = Compiled(found.compiled.module, build_plan(closed), found.compiled.example)
    assert with_device_choices(closed, one) is one


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.3])
def test_what_is_proposed_fits_and_what_is_refused_does_not(share: float) -> None:
    given = config("parallel.dp=4")
    needed = bare(given).worst.peak_bytes
    budget = int(share * needed)
    found = bare(given, budget)
    with pytest.raises(ConfigError) as error:
        found.check()
    words, worst = str(error.value), found.worst
    largest = max(worst.peak, key=lambda c: worst.peak[c])
    assert words.startswith(
        f"memory: rank {worst.rank} needs {size(needed)}, {size(needed - budget)} more than the {size(budget)} that a "
        "rank has on a device"
    )
    assert f"most of it, {size(worst.peak[largest])}, is {largest} (the peak: {worst.at})" in words
    proposed = re.search(r"the nearest plan that fits: (.*) \((.*) a rank\)", words)
    assert proposed is not None
    again = bare(config("parallel.dp=4", *(re.sub(r" = ", "=", one) for one in proposed[1].split(", "))), budget)
    assert again.fits and size(again.worst.peak_bytes) == proposed[2]


@pytest.mark.full
def test_a_budget_below_every_plan_says_what_is_the_least() -> None:
    given = config("parallel.dp=2", "data.batch_size=4", "train.memory_gib=1e-5")
    found = bare(given)
    assert found.budget == int(1e-5 * GIB)
    with pytest.raises(
        ConfigError, match=r"more than train.memory_gib = 1e-05.*no plan fits; legal: train.memory_gib of at least"
    ) as error:
        found.check()
    fit = found.nearest()
    least = float(re.search(r"at least ([0-9.]+)", str(error.value))[1])  # type: ignore[index]
    assert fit.least <= least * GIB < fit.least * 1.002
    best = changed(given, fit.least_changes)
    best = replace(best, train=replace(best.train, memory_gib=least))
    again = Forecast.of(best, found.compiled.under(build_plan(best)), found.device)
    assert again.fits and again.worst.peak_bytes == fit.least


@pytest.mark.slow
def test_layers_are_shared_where_all_else_is_not_enough() -> None:
    """And what is proposed was predicted of a trace of its own."""
    given = config(
        "parallel.dp=4", "parallel.zero=3", "parallel.recompute=full", "parallel.microbatches=4",
        "parallel.gathered=use",
        "parallel.reduced=microbatch",
    )  # fmt: skip
    needed = bare(given, kind="cpu").worst.peak_bytes
    fit = bare(given, needed - 1, "cpu").nearest()
    assert fit.changes == {"parallel.dp": 2, "parallel.tp": 2} and fit.peak < needed
    assert bare(changed(given, fit.changes), kind="cpu").worst.peak_bytes == fit.peak


def test_gib_are_rounded_upwards() -> None:
    for nbytes in (1, 1000, 123_456_789, GIB, 79 * GIB + 1, 12345 * GIB + 1):
        shown = float(gib_at_least(nbytes))
        assert nbytes <= shown * GIB <= nbytes * 1.001


@pytest.mark.slow
def test_traces_serve_every_plan_of_a_precision() -> None:
    compiled = bare(config("parallel.dp=4")).compiled
    sharded = compiled.under(build_plan(config("parallel.dp=8", "parallel.zero=3", "parallel.recompute=full")))
    assert sharded.general is compiled.general and sharded.plan.mesh.size == 8
    low = compiled.under(build_plan(config("parallel.dp=4", "parallel.precision=bf16")))
    assert low.general is not compiled.general and low.general.precision == "bf16"


def test_devices_by_name() -> None:
    a100 = named("a100-80gb")
    assert (a100.name, a100.kind) == ("A100-80GB", "gpu") and 79 * GIB < a100.memory < 80 * GIB
    assert a100.budget == a100.memory and a100.reserve is not None
    assert named("cpu=64") == Device("cpu", "cpu", 64 * GIB, 64 * GIB) and named("H200=100").memory == 100 * GIB
    assert named("cpu").memory > 0
    for wrong in ("A100", "H100-80GB=", "cpu=-1", "cpu=nan", "cpu=x"):
        with pytest.raises(ConfigError, match="--device .*legal: "):
            named(wrong)
    with pytest.raises(ConfigError, match='Did you mean "A100-80GB"'):
        named("A100-80B")


@pytest.mark.slow
def test_each_kind_of_rank_is_there_once() -> None:
    """20 parameters over 3 ranks: the padding at the end is in no optimizer state."""
    found = bare(config("parallel.dp=16", "parallel.zero=3", "model.width=34"))
    shown = [found.worst, *found.others()]
    assert found.worst.peak_bytes == max(one.peak_bytes for one in shown)
    assert {one.rank for one in shown} <= {0, 15, found.worst.rank}
    assert len({one.rank for one in shown}) == len(shown) == 2


@pytest.mark.slow
def test_auto_finds_the_fastest_tensor_plan_that_fits() -> None:
    """With the tensor-parallel ranks of two stages, whose bytes the solver knows only together."""
    open_ = config(
        "parallel.tp=2", "parallel.dp=1", "parallel.pp=2", "parallel.microbatches=2", "parallel.tensor_plan=auto"
    )
    free = bare(open_, kind="cpu")
    assert free.note is None and not free.plan.tensor.bytes
    fastest, seconds = free.worst.peak_bytes, []
    for part in (1.0, 0.8, 0.6):
        now = bare(open_, int(fastest * part), kind="cpu")
        assert now.fits and now.worst.peak_bytes <= now.budget
        assert (now.plan.tensor.bytes == 0) == (part == 1.0)
        assert Plan.from_toml(now.plan.to_toml()) == now.plan
        seconds.append(predicted(now.compiled).total)
    assert seconds == sorted(set(seconds))
    assert (
        f"a plan of {1e3 * seconds[-1]:.3g} ms a microbatch, for that of {1e3 * seconds[0]:.3g} ms does not fit"
        in str(now.note)
    )
    least = bare(open_, 1 << 16, kind="cpu")
    assert (
        not least.fits
        and least.worst.peak_bytes < fastest * 0.6
        and "the least plan, and even so too large" in str(least.note)
    )
    with pytest.raises(
        ConfigError, match="tensor_bytes: 7 is not legal; legal: .* or more, which the smallest plan found takes"
    ):
        free.compiled.under(free.plan.replace(tensor_bytes=7))


def test_auto_goes_by_the_rows_of_a_batch_not_of_the_example() -> None:
    open_ = config("parallel.tp=2", "parallel.dp=1", "parallel.tensor_plan=auto")
    found = bare(open_, kind="cpu")
    (rows,) = {len(x) for x in found.compiled.example.values()}
    whole = {name: x.repeat(8, 1) for name, x in found.compiled.example.items()}
    assert rows == 2 and predicted(found.compiled) == predicted(Compiled(found.compiled.module, found.plan, whole))


def predicted(compiled: Compiled) -> MicrobatchCost:
    assert compiled.general.predicted is not None
    return compiled.general.predicted()
