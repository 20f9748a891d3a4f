"""Programs compute what one device computes: run by all ranks on toy units in exact integers (``toys``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from covering import covering
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Instruction, Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import to_texts
from shardwise.lower.step import lower
from shardwise.models import GPT, Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace
from timetables import any_order
from toys.units import ALWAYS, NEVER, PRIME, Toy
from toys.world import differences

LAYERS, DRAWN = 6, 2000
PP, DP = (1, 2, 3), ((1, 1), (2, 1), (3, 1), (4, 2), (2, 2))
"""Ranks of the pipeline; ranks of data parallelism, and groups of them."""
WAYS = (
    ("none", "selective", "full"),
    ("use", "forward", "step"),
    ("microbatch", "step"),
    ("auto", "bf16"),
    (0, 1, 2),
)
"""Choices of recompute, gathered, reduced, reduce and prefetch."""


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """Of a model with tied embeddings, of one without, and of one with a weight that every other block has."""
    batch = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    return {
        "gpt": trace(GPT(vocabulary=11, width=8, layers=LAYERS, heads=2, context=8), batch),
        "llama": trace(Llama(vocabulary=11, width=8, layers=LAYERS, heads=2, context=8), batch),
        "shared": trace(shared(), batch),
    }


def shared() -> Llama:
    model = Llama(vocabulary=11, width=8, layers=LAYERS, heads=2, context=8)
    for block in model.blocks[2::2]:
        block.mlp.up_proj.weight = model.blocks[0].mlp.up_proj.weight
    return model


def synchronous() -> Iterator[tuple[Any, ...]]:
    """Some of the legal combinations of what a synchronous plan can say: all would be 30,000."""
    schedules = [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]
    draw = random.Random(0).choice
    for _ in range(DRAWN):
        case = (
            draw(("gpt", "llama", "shared")),
            draw(schedules),
            draw(PP),
            draw(DP),
            draw(range(4)),
            draw((1, 2, 3, 5)),
            tuple(map(draw, WAYS)),
        )
        if case[1] == "1f1b" or case[2] > 1:  # one rank has no schedule
            with suppress(ConfigError):
                planned(*case[1:])
                yield case


def planned(schedule: str, pp: int, dp: tuple[int, int], zero: int, microbatches: int, way: tuple[Any, ...]) -> Plan:
    recompute, gathered, reduced, reduce, prefetch = way
    precision: Any = "bf16" if reduce == "bf16" else "fp32"
    plan = Plan.of(
        microbatches=microbatches,
        recompute=recompute,
        gathered=gathered,
        reduced=reduced,
        reduce=reduce,
        precision=precision,
        prefetch=prefetch,
    )
    plan = data_parallel(plan, dp[0], zero, dp[1])
    return pipeline(plan, pp, schedule) if pp > 1 else plan


def asynchronous() -> Iterator[tuple[Any, ...]]:
    """The same of asynchronous plans, with the batches of a window."""
    draw = random.Random(1).choice
    for _ in range(DRAWN):
        schedule, pp, microbatches = draw(("pipedream", "pipedream-2bw")), draw((2, 3, 4)), draw((1, 2, 3, 4, 5))
        zero, sync, way = draw(range(4)), draw((False, True)), tuple(map(draw, WAYS))
        case = (
            draw(("gpt", "llama", "shared")),
            schedule,
            pp,
            draw(DP),
            zero,
            microbatches,
            draw((1, 2, 3, 4, 7)),
            sync,
            way,
        )
        with suppress(ConfigError):
            plan = late(*case[1:])
            if not plan.stages_alone or case[0] == "llama":  # tied weights would be updated by each stage for itself
                yield case


def late(
    schedule: str,
    pp: int,
    dp: tuple[int, int],
    zero: int,
    microbatches: int,
    window: int,
    sync: bool,
    way: tuple[Any, ...],
) -> Plan:
    plan = pipeline(planned("1f1b", 1, dp, zero, microbatches, way), pp, schedule)
    return plan.replace(window=window, vertical_sync=sync)


def validated() -> Iterator[tuple[Any, ...]]:
    """The same of plans whose updates are validated later: with how often gradients are clipped, and the unit and the
    batch whose backward overflows.
    """
    draw = random.Random(2).choice
    for _ in range(DRAWN):
        case = (
            draw(("gpt", "llama", "shared")),
            draw([name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]),
            draw((2, 3, 4)),
            draw(DP),
            draw(range(4)),
            draw((1, 2, 3, 5, 8)),
            draw((2, 3, 4)),
            draw(list(LIMITS)),
            draw(("nowhere", "first", "middle", "last")),
            draw((0, 1)),
            tuple(map(draw, WAYS)),
        )
        with suppress(ConfigError):
            optimistic(*case[1:])
            yield case


def optimistic(
    schedule: str, pp: int, dp: tuple[int, int], zero: int, microbatches: int, window: int, *rest: Any
) -> Plan:
    return planned(schedule, pp, dp, zero, microbatches, rest[-1]).replace(norm="post-validate", window=window)


def overflows(one: Trace, where: str, batch: int, microbatches: int) -> frozenset[tuple[int, int]]:
    """Of a unit in the last microbatch of a batch."""
    units = [unit.index for unit in one.units if unit.differentiable]
    places = {"first": units[0], "middle": units[len(units) // 2], "last": units[-1]}
    return frozenset({(places[where], (batch + 1) * microbatches - 1)}) if where in places else frozenset()


def columns(case: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*case[:-1], *case[-1])


LIMITS = {"never": NEVER, "sometimes": PRIME // 2, "always": ALWAYS}
"""Of the norm, by how often gradients are clipped."""

CASES, LATE = list(synchronous()), sorted(set(asynchronous()), key=str)
VALIDATED = list(validated())


def wrong(
    one: Trace, plan: Plan, change: Callable[[tuple[Program, ...]], tuple[Program, ...]] = lambda programs: programs,
    batches: int = 1
) -> list[str]:  # fmt: skip
    """What a plan's programs compute otherwise than one device."""
    return differences(Toy(one, plan.mesh.axis_size("dp")), plan, change(lower(one, plan, batches=batches)))


def wrong_later(
    one: Trace,
    case: tuple[Any, ...],
    change: Callable[[tuple[Program, ...]], tuple[Program, ...]] = lambda programs: programs,
) -> list[str]:
    """The same of a case whose updates are validated later."""
    plan, (limit, where, batch, _) = optimistic(*case), case[-4:]
    toy = Toy(one, plan.mesh.axis_size("dp"), LIMITS[limit], overflows(one, where, batch, plan.microbatches))
    return differences(toy, plan, change(lower(one, plan, batches=plan.pipeline.window)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", list(covering(CASES, columns)), ids=str)
def test_programs_compute_what_one_device_computes(traces: dict[str, Trace], case: tuple[Any, ...]) -> None:
    name, *rest = case
    assert wrong(traces[name], planned(*rest)) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", sorted({case[1] for case in CASES}))
def test_all_programs_compute_what_one_device_computes(traces: dict[str, Trace], schedule: str) -> None:
    for name, *rest in (case for case in CASES if case[1] == schedule):
        assert wrong(traces[name], planned(*rest)) == [], (name, rest)


@pytest.mark.quick(1)
@pytest.mark.few(22)
@pytest.mark.parametrize("case", list(covering(LATE, columns)), ids=str)
def test_programs_of_several_batches_use_the_versions_that_their_schedule_is_defined_by(
    traces: dict[str, Trace], case: tuple[Any, ...]
) -> None:
    name, *rest = case
    plan = late(*rest)
    assert wrong(traces[name], plan, batches=plan.pipeline.window) == []


@pytest.mark.quick(2)
@pytest.mark.few(18)
@pytest.mark.parametrize("case", list(covering(VALIDATED, columns)), ids=str)
def test_updates_that_are_validated_later_are_those_of_a_barrier(
    traces: dict[str, Trace], case: tuple[Any, ...]
) -> None:
    name, *rest = case
    assert wrong_later(traces[name], tuple(rest)) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", sorted({case[1] for case in VALIDATED}))
def test_all_updates_that_are_validated_later_are_those_of_a_barrier(traces: dict[str, Trace], schedule: str) -> None:
    for name, *rest in (case for case in VALIDATED if case[1] == schedule):
        assert wrong_later(traces[name], tuple(rest)) == [], (name, rest)


CHAIN = (
    "F0.0 F5.0 B5.0 F0.1 F5.1 B5.1 B0.0 B0.1",
    "F1.0 F4.0 F1.1 B4.0 F4.1 B4.1 B1.0 B1.1",
    "F2.0 F3.0 F2.1 B3.0 F3.1 B3.1 B2.0 B2.1",
)
"""The first rank sends what F1.1 needs behind its first backward, the second what F2.1 needs before its own: both have
to validate before that."""
ORDERS = [CHAIN, *(to_texts(any_order((0, 1, 2, 2, 1, 0), 2, random.Random(seed))) for seed in range(3))]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("order", ORDERS, ids=("chain", "any", "other", "third"))
def test_whatever_ranks_compute_first(traces: dict[str, Trace], order: tuple[str, ...], limit: str) -> None:
    one = traces["llama"]
    plan = data_parallel(Plan.of(microbatches=2, norm="post-validate", window=2), 2, 3)
    plan = pipeline(plan, len(order), "auto", stages=(1, 1, 1, 1, 1, len(one.units) - 5), timetable=order)
    assert differences(Toy(one, 2, LIMITS[limit]), plan, lower(one, plan, batches=2)) == []


# ---- the oracle finds what is wrong ----------------------------------------------------------------------------------

Change = Callable[[Instruction], Instruction | None]
"""What becomes of an instruction; None: it is dropped."""


def of(op: Op, change: Change, **like: Any) -> Change:
    return lambda one: change(one) if one.op is op and all(getattr(one, k) == v for k, v in like.items()) else one


def drop(_: Instruction) -> None:
    return None


FAULTS: dict[str, Change] = {
    "a gradient is not summed": of(Op.REDUCE, drop, bucket=2),
    "nor the norm": of(Op.REDUCE, lambda one: None if one.writes[0].kind == "norm" else one),
    "nor the loss": of(Op.REDUCE, lambda one: None if one.writes[0].kind == "loss" else one),
    "a sum over the pipeline": of(Op.REDUCE, lambda one: replace(one, axes=("pp",)), bucket=2),
    "a shard of a sum that all need": of(Op.REDUCE, lambda one: replace(one, scatters=not one.scatters), bucket=2),
    "a gradient that begins with the one before": of(Op.BACKWARD, lambda one: replace(one, first=())),
    "a gradient that begins anew": of(Op.BACKWARD,
    lambda one: replace(one, first=tuple(b.index for b in one.writes if b.kind == "grad"))),
    "a slot added as if it were the first": of(Op.ADD, lambda one: replace(one, first=(one.bucket,))),
    "a slot that is not added": of(Op.ADD, drop),
    "parameters that are not gathered": of(Op.GATHER, drop, bucket=3),
    "an update that does not happen": of(Op.STEP, drop, bucket=1),
    "an update that happens twice": of(Op.DECIDE, lambda one: one),  # by `twice`
    "activations of another microbatch": of(Op.FORWARD, lambda one: replace(one, microbatch=0)),
    "a message without what it is for": of(Op.SEND, lambda one: replace(one, tensors=())),
    "a unit that is not run again": of(Op.RECOMPUTE, drop),
    "a slot that is freed too late": lambda one: replace(one, frees=tuple(b for b in one.frees if b.kind != "slot")),
    "a slot that is freed too early": of(Op.GATHER, lambda one: replace(one, frees=one.writes)),
    "targets that are not counted": of(Op.COUNT, drop),
    "a backward that does not leave what the other half needs": of(Op.BACKWARD_INPUT,
    lambda one: replace(one, writes=tuple(b for b in one.writes if b.kind != "deferred"))),
    "a half that is not run": of(Op.BACKWARD_WEIGHT, drop),
}  # fmt: skip


LATER: dict[str, Change] = {
    "an update that cannot be taken back": of(Op.BACKUP, drop),
    "a copy of what has been updated": of(Op.BACKUP, lambda one: one),  # by `swapped`
    "an update that nobody validates": of(Op.VALIDATE, drop),
    "a validation by the norm of one stage": of(Op.REDUCE,
    lambda one: None if one.axes == ("pp",) and one.writes[0].kind == "norm" else one),
    "a validation that waits for nothing": of(Op.VALIDATE, lambda one: replace(one, waits=())),
    "a message that comes twice and does not say so": of(Op.RECEIVE, lambda one: replace(one, crosses=False)),
    "a message that says so and comes once": of(Op.RECEIVE, lambda one: replace(one, crosses=True)),
    "an update of a stage that knows of no other": of(Op.STEP, drop, version=0),
}  # fmt: skip
"""The same of programs whose updates are validated later."""


def changed(programs: tuple[Program, ...], change: Change) -> tuple[Program, ...]:
    """With other instructions; what waits for a dropped one waits for nothing."""
    found = []
    for program in programs:
        new = [change(one) for one in program.instructions]
        at = {old: i for i, old in enumerate(k for k, one in enumerate(new) if one is not None)}
        kept = tuple(replace(one, waits=tuple(at[w] for w in one.waits if w in at)) for one in new if one is not None)
        found.append(replace(program, instructions=kept))
    return tuple(found)


def twice(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """The last STEP once more; it waits for nothing."""
    found = []
    for program in programs:
        at = max(i for i, one in enumerate(program.instructions) if one.op is Op.STEP)
        found.append(
            replace(
                program, instructions=(*program.instructions[:at], program.instructions[at], *program.instructions[at:])
            )
        )
    return tuple(found)


def swapped(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Each BACKUP behind its STEP; nobody waits for them."""
    found = []
    for program in programs:
        new = list(program.instructions)
        at = {(one.op, one.bucket, one.version): i for i, one in enumerate(new)}
        for (op, *which), i in at.items():
            if op is Op.BACKUP:
                j = at[Op.STEP, *which]
                new[i], new[j] = new[j], new[i]
        found.append(replace(program, instructions=tuple(new)))
    return tuple(found)


FAULTY = [
    planned("zb-h1", 2, (2, 1), 3, 3, ("full", "use", "microbatch", "auto", 1)),
    planned("1f1b", 2, (2, 1), 1, 2, ("none", "use", "step", "auto", 1)),
    planned("1f1b", 1, (2, 1), 2, 3, ("none", "use", "microbatch", "auto", 1)),
    planned("gpipe", 2, (4, 2), 0, 2, ("none", "use", "step", "auto", 1)),
]  # fmt: skip
"""A few plans that have all instructions."""


@pytest.mark.parametrize("plan", FAULTY, ids=lambda plan: plan.pipeline.schedule)
def test_without_a_fault_they_are_right(traces: dict[str, Trace], plan: Plan) -> None:
    assert wrong(traces["gpt"], plan) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_program_is_found(traces: dict[str, Trace], fault: str) -> None:
    """In the first plan that has what the fault changes."""
    change = twice if fault == "an update that happens twice" else lambda programs: changed(programs, FAULTS[fault])
    for plan in FAULTY:
        programs = lower(traces["gpt"], plan)
        if change(programs) == programs:
            continue
        try:
            if wrong(traces["gpt"], plan, change):
                return
        except (AssertionError, KeyError, TypeError, ValueError):
            return
    pytest.fail(f"nobody has noticed: {fault}")


FAULTY_LATER = ("1f1b", 2, (2, 1), 1, 3, 2, "always", "nowhere", 0, ("none", "use", "step", "auto", 1))


def test_without_a_fault_a_validated_program_is_right(traces: dict[str, Trace]) -> None:
    assert wrong_later(traces["llama"], FAULTY_LATER) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", LATER)
def test_a_wrong_validation_is_found(traces: dict[str, Trace], fault: str) -> None:
    change = swapped if "copy of what" in fault else lambda programs: changed(programs, LATER[fault])
    try:
        found = wrong_later(traces["llama"], FAULTY_LATER, change)
    except (AssertionError, KeyError, TypeError, ValueError):
        return
    assert found
