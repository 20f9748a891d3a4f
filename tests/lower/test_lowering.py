"""What lowering makes of the rows of the data-parallel table: gathers, reductions, slots."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.check import ProgramError, check
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.lower.slots import SlotSpan, assign
from shardwise.lower.stages import StageSplit
from shardwise.lower.step import lower
from shardwise.lower.waits import derive_waits
from shardwise.models.gpt import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace

LAYERS = 6


@pytest.fixture(scope="module")
def gpt() -> Trace:
    batch = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    return trace(GPT(vocabulary=11, width=8, layers=LAYERS, heads=2, context=8), batch)


def lowered(
    one: Trace, zero: int, *, ranks: int = 2, replicas: int = 1, training: bool = True, **changes: Any
) -> Program:
    plan = data_parallel(Plan.of(**changes), ranks, zero, replicas)
    programs = lower(one, plan, training=training)
    check(programs, plan.mesh)
    return programs[0]


def kinds(program: Program) -> Counter[str]:
    return Counter(str(one.op) for one in program.instructions)


@pytest.mark.slow
def test_stages_differ_in_what_is_gathered_and_scattered(gpt: Trace) -> None:
    buckets = len(gpt.buckets)
    ddp, one, two, three = (lowered(gpt, zero) for zero in range(4))
    assert kinds(ddp)["GATHER"] == 0
    assert kinds(one)["GATHER"] == kinds(two)["GATHER"] == buckets
    assert kinds(three)["GATHER"] > 1.5 * buckets
    for program, scatters in ((ddp, 0), (one, buckets), (two, buckets), (three, buckets)):
        assert sum(i.scatters for i in program.instructions) == scatters
    assert (ddp.slots, one.slots, two.slots) == ((), (), ())
    assert (ddp.unreduced, one.unreduced) == ((), ())
    assert two.unreduced and three.slots


def test_blocks_share_a_few_slots(gpt: Trace) -> None:
    """One that computes, and `prefetch` that are on their way; whatever the number of blocks."""
    for prefetch in (1, 2):
        program = lowered(gpt, 3, prefetch=prefetch, microbatches=2, recompute="full")
        blocks = {b.index for b in gpt.buckets if len(b.parameters) > 5}
        assert len(blocks) == LAYERS
        assert sum(bool(blocks & set(held)) for held in program.slots) == prefetch + 1
        assert sum(bool(blocks & set(held)) for held in program.unreduced) == prefetch + 1


@pytest.mark.parametrize(("gathered", "times"), [("use", 2), ("forward", 1), ("step", 1)])
def test_how_often_a_block_is_gathered(gpt: Trace, gathered: Any, times: int) -> None:
    """The first block: in the middle of neither turn."""
    program = lowered(gpt, 3, gathered=gathered, microbatches=3)
    block = next(b.index for b in gpt.buckets if gpt.units[b.units[0]].name == "blocks.2" and len(b.units) == 1)
    found = sum(one.op is Op.GATHER and one.bucket == block for one in program.instructions)
    assert found == (1 if gathered == "step" else 3 * times)


@pytest.mark.parametrize(("reduced", "sums"), [("microbatch", 3), ("step", 1)])
def test_how_often_a_gradient_is_reduced(gpt: Trace, reduced: Any, sums: int) -> None:
    program = lowered(gpt, 2, reduced=reduced, microbatches=3)
    block = next(b.index for b in gpt.buckets if len(b.parameters) > 5)
    assert sum(one.op is Op.REDUCE and one.bucket == block for one in program.instructions) == sums


def test_gathers_come_ahead_of_their_use(gpt: Trace) -> None:
    for prefetch in (0, 1, 2):
        program = lowered(gpt, 3, prefetch=prefetch)
        order = [i for i, one in enumerate(program.instructions) if one.op is Op.FORWARD]
        for k in range(2 + prefetch, len(order) - 1):
            unit = program.instructions[order[k]].unit
            own = [b.index for b in gpt.buckets if b.units == (unit,)]
            at = max(
                i
                for i in range(order[k])
                if program.instructions[i].op is Op.GATHER and program.instructions[i].bucket in own
            )
            assert order[k - prefetch - 1] < at < order[k - prefetch]


def test_replicas_are_summed_once_a_step(gpt: Trace) -> None:
    program = lowered(gpt, 2, ranks=4, replicas=2, microbatches=3)
    across = [one for one in program.instructions if one.op is Op.REDUCE and one.axes == ("dp_replicate",)]
    assert Counter(one.bucket for one in across) == dict.fromkeys((b.index for b in gpt.buckets), 1)


def test_evaluation_gathers_and_frees(gpt: Trace) -> None:
    program = lowered(gpt, 3, training=False)
    assert {str(one.op) for one in program.instructions} == {"COUNT", "GATHER", "FORWARD", "REDUCE", "REPORT"}
    freed = [buffer for one in program.instructions for buffer in one.frees if buffer.kind == "activation"]
    assert {buffer.index for buffer in freed} == {unit.index for unit in gpt.units}


def test_what_is_freed_is_not_read_again() -> None:
    held = Buffer("slot", 0)
    first = Instruction(Op.FORWARD, unit=0, writes=(held,), frees=(held,))
    with pytest.raises(ProgramError, match=r"FORWARD u1 reads slot0, which .*FORWARD u0.* has freed"):
        check((Program("all", (), (first, Instruction(Op.FORWARD, unit=1, reads=(held,)))),), Mesh.of(dp=1))
    again = Instruction(Op.GATHER, bucket=0, lane=Lane.COMPUTE, writes=(held,))
    check((Program("all", (), (first, again, Instruction(Op.FORWARD, unit=1, reads=(held,)))),), Mesh.of(dp=1))


spans = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 20), st.integers(0, 6)).map(
        lambda t: SlotSpan(t[0], t[0] * 100 + 64, t[2], t[2] + t[3])
    ),
    max_size=30,
)


@given(spans)
def test_no_slot_holds_two_buckets_at_once(found: list[SlotSpan]) -> None:
    slots, held = assign(found)
    for i, a in enumerate(found):
        assert a.bucket in held[slots[i]]
        for j in range(i):
            b = found[j]
            assert slots[i] != slots[j] or a.start > b.stop or b.start > a.stop
    busiest = max((sum(s.start <= t <= s.stop for s in found) for t in range(30)), default=0)
    assert len(held) == busiest  # no more slots than are needed at once


@pytest.mark.quick(2)
@pytest.mark.parametrize("zero", range(4))
def test_tensor_axes_are_in_what_is_summed_over_all_ranks_alone(gpt: Trace, zero: int) -> None:
    """Loss and norm: every rank has a part of them.  Ranks that differ in tensor axes have the same rows, and other
    gradients.
    """
    plan = pipeline(data_parallel(Plan.of(Mesh.of(tp=2, one=1, xp=2), microbatches=2), 4, zero, 2), 2)
    batch, tensor = ("dp_replicate", "dp"), ("tp", "xp")
    for training in (True, False):
        programs = lower(gpt, plan, training=training)
        check(programs, plan.mesh)
        assert len(programs) == 2  # ranks that differ in tensor axes run the same
        for program in programs:
            sums = {
                one.writes[0].kind: one.axes for one in program.instructions if one.op is Op.REDUCE and one.bucket < 0
            }
            assert sums == dict.fromkeys(("loss", "norm") if training else ("loss",), ("pp", *batch, *tensor))
            counts = [one.axes for one in program.instructions if one.op is Op.COUNT]
            assert counts and set(counts) == {batch}
            others = {
                a
                for one in program.instructions
                if one.op in (Op.REDUCE, Op.GATHER) and one.bucket >= 0
                for a in one.axes
            }
            assert others <= set(batch) and (others or not training)


def test_a_stage_that_does_not_wait_sums_its_norm_over_its_own_ranks(gpt: Trace) -> None:
    plan = pipeline(data_parallel(Plan.of(Mesh.of(tp=2), microbatches=2, norm="post-validate", window=3), 2, 1), 2)
    for program in lower(gpt, plan, batches=3):
        norms = [one.axes for one in program.instructions if one.op is Op.REDUCE and one.writes[0].kind == "norm"]
        assert norms == [("dp", "tp"), ("pp",)] * 2 + [("pp", "dp", "tp")]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "pipedream-2bw"])
def test_what_is_sent_is_freed_once(gpt: Trace, schedule: Any) -> None:
    plan = pipeline(data_parallel(Plan.of(microbatches=4), 2), 2, schedule)
    programs = lower(gpt, plan)
    check(programs, plan.mesh)
    assert any(one.frees for program in programs for one in program.instructions if one.op is Op.SEND)


def test_a_transfer_waits_for_one_before_it_in_its_queue_that_writes_what_it_reads() -> None:
    """It is posted only when its operand is there; what computes has its operands anyway."""
    x, y = BufferKind.GRAD.of(0), BufferKind.GRAD.of(1)
    for lane, waits in ((Lane.REDUCE, (0,)), (Lane.COMPUTE, ())):
        first, second, other = (
            Instruction(Op.REDUCE, axes=("dp",), lane=lane, reads=(one,), writes=(one,)) for one in (x, x, y)
        )
        assert [one.waits for one in derive_waits([first, second, other])] == [(), waits, ()]


def test_ranks_of_a_pipeline_are_not_taken_for_stages(gpt: Trace) -> None:
    for schedule, each, names in (
        ("1f1b", 1, ["stage 0", "stage 1"]),
        ("interleaved", 2, ["stages 0, 2", "stages 1, 3"]),
    ):
        plan = pipeline(Plan.of(microbatches=2), 2, schedule, each)
        assert [program.name for program in lower(gpt, plan)] == names
    units = [
        SimpleNamespace(
            index=u, name=f"u{u}", inputs=(), outputs=(), updates=("b",) * (u == 2), buffers=("b",) * (u > 1)
        )
        for u in range(4)
    ]
    split = StageSplit(cast(Any, units), (0, 1, 2, 3), 2, "interleaved")
    with pytest.raises(ConfigError, match="b is written by rank 0 and read by rank 1 of the pipeline; legal: one rank"):
        split.updating()
