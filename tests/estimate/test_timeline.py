"""Programs made by hand, with bytes added up by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwise.core.instruction import CATEGORY, Buffer, BufferKind, Category, Instruction, Lane, Op
from shardwise.estimate.timeline import Made, timeline, total

P, G, S = Buffer("param", 0), Buffer("grad", 0), Buffer("state", 0)
A, K, D = Buffer("activation", 0, 0), Buffer("saved", 0, 0), Buffer("gradient", 0, 0)


@dataclass
class Table:
    """Sizes by the position of an op in the program."""

    makes: Mapping[Op, Made]
    peaks: Mapping[Op, int] = field(default_factory=dict)
    persistent: Mapping[Buffer, int] = field(default_factory=dict)

    def made(self, one: Instruction) -> Made:
        return self.makes.get(one.op, {})

    def arrived(self, one: Instruction) -> tuple[Made, int]:
        return ({A: {"": 30}}, 40) if one.lane is Lane.MOVE else ({}, 0)

    def peak(self, one: Instruction) -> int:
        return self.peaks.get(one.op, 0)


FORWARD = Instruction(Op.FORWARD, unit=0, microbatch=0, writes=(A, K))
RECOMPUTE = Instruction(Op.RECOMPUTE, unit=0, microbatch=0, writes=(K,))
BACKWARD = Instruction(Op.BACKWARD, unit=0, microbatch=0, reads=(K,), writes=(G, D), frees=(K, A))
STEP = Instruction(Op.STEP, bucket=0, frees=(D, G))


def test_a_step_of_one_unit() -> None:
    sizes = Table(
        {Op.FORWARD: {A: {"": 10}, K: {"": 100}}, Op.BACKWARD: {D: {"x": 20}}},
        {Op.FORWARD: 150, Op.BACKWARD: 50, Op.STEP: 7},
        {P: 1000, G: 2000, S: 3000},
    )
    found = timeline((FORWARD, BACKWARD, STEP), sizes)
    states = {Category.PARAMETERS: 1000, Category.GRADIENTS: 2000, Category.OPTIMIZER: 3000}
    rest = {Category.ACTIVATIONS: 0, Category.TEMPORARY: 0, Category.RESERVE: 0}
    forward, backward, step = found.moments
    assert forward.before == states | rest
    assert forward.peak == states | {Category.ACTIVATIONS: 110, Category.TEMPORARY: 40, Category.RESERVE: 0}
    assert forward.after == backward.before == states | rest | {Category.ACTIVATIONS: 110}
    assert backward.peak == states | rest | {Category.ACTIVATIONS: 130, Category.TEMPORARY: 30}
    assert backward.after == states | rest | {Category.ACTIVATIONS: 20}
    assert step.peak == states | rest | {Category.ACTIVATIONS: 20, Category.TEMPORARY: 7}
    assert step.after == states | rest  # the gradient buffer is persistent, the pending gradient is not
    assert found.at == 1 and found.peak_bytes == 6000 + 160 and found.peak == backward.peak


def test_a_backward_that_frees_as_it_goes_has_no_more_than_its_peak() -> None:
    sizes = Table({Op.FORWARD: {K: {"": 100}}, Op.BACKWARD: {D: {"x": 80}}}, {Op.FORWARD: 100, Op.BACKWARD: 30})
    found = timeline((FORWARD, BACKWARD), sizes)
    assert total(found.moments[1].peak) == 130 and found.moments[1].peak[Category.TEMPORARY] == 0
    assert total(found.moments[1].after) == 80


def test_parts_of_a_buffer_add_up_and_replace_themselves() -> None:
    """Gradients of two outputs come from two units; a third adds to the first."""
    steps = [Instruction(op, unit=i, microbatch=0) for i, op in enumerate((Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD))]
    sizes = Table(
        {Op.FORWARD: {D: {"x": 8}}, Op.RECOMPUTE: {D: {"y": 4}}, Op.BACKWARD: {D: {"x": 16}}},
        {Op.FORWARD: 8, Op.RECOMPUTE: 4, Op.BACKWARD: 16},
    )
    found = timeline((*steps, Instruction(Op.NORM, frees=(D,))), sizes)
    assert [total(m.after) for m in found.moments] == [8, 12, 20, 0]
    assert [total(m.peak) for m in found.moments] == [8, 12, 28, 20]


def test_what_is_freed_can_be_made_again() -> None:
    again = (FORWARD, BACKWARD, RECOMPUTE, BACKWARD)
    sizes = Table({Op.FORWARD: {K: {"": 5}}, Op.RECOMPUTE: {K: {"": 6}}}, {Op.FORWARD: 5, Op.RECOMPUTE: 6})
    assert [total(m.after) for m in timeline(again, sizes).moments] == [5, 0, 6, 0]


def test_freeing_what_was_never_made_is_nothing() -> None:
    assert total(timeline((BACKWARD,), Table({})).moments[0].after) == 0


def test_the_first_of_equal_peaks_counts() -> None:
    found = timeline((FORWARD, FORWARD, STEP), Table({}, {Op.FORWARD: 3, Op.STEP: 3}))
    assert found.at == 0


def test_every_kind_of_buffer_has_a_category() -> None:
    assert set(CATEGORY) == set(BufferKind)


def test_what_is_under_way_is_there_until_it_is_waited_for() -> None:
    moving = Buffer("moving", 1, 0)
    post = Instruction(
        Op.FORWARD, unit=1, microbatch=0, lane=Lane.MOVE, axes=("tp",), writes=(moving,), frees=(moving,)
    )
    found = timeline((post, STEP, replace(BACKWARD, waits=(0,))), Table({Op.FORWARD: {moving: {"": 25}}}, {}, {P: 100}))
    posted, between, arrived = found.moments
    assert total(posted.after) == total(between.before) == total(between.after) == 125
    assert total(arrived.peak) == 165  # what has come beside what was under way, and 10 more
    assert total(arrived.after) == 100  # BACKWARD has freed what came
