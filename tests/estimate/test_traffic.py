"""What a step hands to the communicator: counted there, predicted from layouts, and as published."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from counting import counted
from torch import Tensor

import zoo
from covering import covering
from shardwise.core.instruction import Op
from shardwise.core.layout import shard_range
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.estimate.traffic import TrafficMoment, step_traffic
from shardwise.lower.compiled import Compiled
from shardwise.lower.step import lower
from shardwise.lower.versions import steady_batches
from shardwise.measure.unit_traffic import Traffic, UnitTraffic, traffic
from shardwise.models import GPT, Llama
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.ops.own_op import facts_of
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace

SGD = OptimizerChoice("sgd", lr=0.0)
KINDS = ("1d", "1d-sp")
Case = tuple[str, str, int, int, int, int, str, int]
CASES: list[Case] = [
    (name, kind, tp, dp, zero, pp, recompute, m)
    for name, kind, tp, (dp, zero), pp, recompute, m in itertools.product(
        ("own gpt", "own llama"), KINDS, (2, 3, 4), ((1, 0), (2, 0), (2, 3)), (1, 2), CHOICES["recompute"], (1, 2)
    )
    if tp * dp * pp <= 8
]


def planned(
    tp: int | dict[str, int], kind: str, dp: int = 1, zero: int = 0, pp: int = 1, replicas: int = 1, **fields: Any
) -> Plan:  # fmt: skip
    plan = pipeline(data_parallel(Plan.of(**fields), dp, zero, replicas), pp)
    axes = {"tp": tp} if isinstance(tp, int) else tp
    return plan.replace(mesh=Mesh((*plan.mesh.axes, *(Axis(name, size) for name, size in axes.items()))), tensor=kind)


@functools.cache
def captured(name: str, kind: str, tp: Mesh, precision: str = "fp32") -> tuple[zoo.Model, Compiled]:
    """A capture serves all plans with these tensor axes."""
    model, sizes = zoo.make(name), {axis.name: axis.size for axis in tp.axes}
    return model, Compiled(model.module, planned(sizes, kind, precision=precision), model.batch, model.loss)


def check(name: str, plan: Plan, anew: bool = False, choice: OptimizerChoice = SGD) -> None:
    """Every instruction of every rank: the same operations, of as many bytes."""
    find = captured.__wrapped__ if anew else captured
    tensor = Mesh(tuple(axis for axis in plan.mesh.axes if axis.name.startswith("tp")))
    model, one = find(name, plan.tensor.recipe, tensor, plan.numeric.precision)
    assert compared(one.under(plan), model.batch, choice) > 20


def compared(subject: Compiled, batch: Mapping[str, Tensor], choice: OptimizerChoice = SGD) -> int:
    """The number of operations of all instructions of all ranks, which are those that were predicted."""
    plan, rows = subject.plan, len(next(iter(batch.values())))
    sizes = [b - a for a, b in (shard_range(rows, plan.microbatches, m) for m in range(plan.microbatches))]
    traces, number = [subject.trace_of(subject.masks, size, rows) for size in sizes], 0
    programs = lower(traces[0], plan, batches=steady_batches(plan))
    for rank, seen in enumerate(counted(subject, batch, choice)):
        expected = step_traffic(traces, plan, choice, rows=rows, rank=rank, programs=programs)
        assert not any(one.unknown for one in expected)
        for mine, (one, theirs) in zip(expected, seen, strict=True):
            assert mine.instruction == one
            assert sorted(mine.traffic) == sorted(theirs), f"rank {rank}: {one}"
            number += len(theirs)
    return number


@pytest.mark.quick(1)
@pytest.mark.few(5)
@pytest.mark.parametrize("case", list(covering(CASES)), ids=lambda case: "-".join(map(str, case)))
def test_what_is_counted_is_what_was_predicted(case: Case) -> None:
    name, kind, tp, dp, zero, pp, recompute, m = case
    check(name, planned(tp, kind, dp, zero, pp, recompute=recompute, microbatches=m))


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [(2, 3, 3, 1), (3, 1, 0, 1), (2, 2, 1, 2)])
def test_a_step_by_whole_tensors_is_predicted(case: tuple[int, int, int, int]) -> None:
    tp, dp, zero, pp = case
    plan = planned(tp, "1d", dp, zero, pp, updates="tensors")
    check("own gpt", plan, choice=OptimizerChoice("muon", lr=0.0))
    assert any(one.op is Op.STEP and one.axes for one in lower(captured("own gpt", "1d", Mesh.of(tp=tp))[1].under(plan)
               .general, plan)[0].instructions)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_combination_is_predicted(case: Case) -> None:
    name, kind, tp, dp, zero, pp, recompute, m = case
    check(name, planned(tp, kind, dp, zero, pp, recompute=recompute, microbatches=m))


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("kind", CHOICES["context"])
@pytest.mark.parametrize("name", ["own llama", "own gpt"])
@pytest.mark.parametrize(("cp", "tp", "recompute"), [(2, 1, "none"), (3, 1, "selective"), (2, 2, "full")])
@pytest.mark.parametrize(("dp", "zero", "pp"), [(1, 0, 1), (2, 3, 1), (1, 0, 2)])
def test_context_parallelism_is_predicted(
    name: str, kind: Any, cp: int, tp: int, recompute: Any, dp: int, zero: int, pp: int
) -> None:
    model, plan = zoo.make(name), Plan.of(recompute=recompute, microbatches=2)
    plan = pipeline(data_parallel(tensor_parallel(plan, tp, "1d-sp"), dp, zero), pp)
    subject = Compiled(model.module, context_parallel(plan, cp, kind), model.batch, model.loss)
    assert compared(subject, model.batch) > 20


SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "2d-4": ("2d", {"tp_i": 2, "tp_j": 2}), "2d-9": ("2d", {"tp_i": 3, "tp_j": 3}),
    "2.5d-8": ("2.5d", {"tp_d": 2, "tp_i": 2, "tp_j": 2}), "3d-8": ("3d", {"tp_i": 2, "tp_j": 2, "tp_l": 2}),
}  # fmt: skip
Several = tuple[str, str, int, int, int, str, int]
SEVERAL: list[Several] = [
    (name, shape, dp, zero, pp, recompute, m)
    for name, shape, (dp, zero), pp, recompute, m in itertools.product(
        ("own gpt", "own llama", "own mlp"), SHAPES, ((1, 0), (2, 0), (2, 3)), (1, 2), CHOICES["recompute"], (1, 2)
    )
    if Mesh.of(dp=dp, pp=pp, **SHAPES[shape][1]).size <= 16 and (name != "own mlp" or pp == 1)
]
FEW: list[Several] = [
    ("own mlp", "2d-4", 2, 3, 1, "full", 2), ("own llama", "2d-9", 1, 0, 1, "selective", 1),
    ("own gpt", "2.5d-8", 1, 0, 1, "full", 2),
    ("own mlp", "3d-8", 2, 0, 1, "none", 1),
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [
    pytest.param(case, id="-".join(map(str, case)), marks=() if case in FEW else pytest.mark.full) for case in SEVERAL
])  # fmt: skip
def test_recipes_over_several_axes_are_predicted(case: Several) -> None:
    name, shape, dp, zero, pp, recompute, m = case
    kind, axes = SHAPES[shape]
    check(name, planned(axes, kind, dp, zero, pp, recompute=recompute, microbatches=m))


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("own convnet", planned(2, "1d-sp", 2, 2, microbatches=2)),  # BatchNorm
        ("own pairs", planned(2, "1d", 2, 3, reduce="bf16", recompute="selective")),  # other rows' values
        ("own gpt", planned(1, "1d", 4, 3, replicas=2, precision="bf16")),
        ("llama", planned(4, "1d-sp", 2, 3, microbatches=2)),  # heads of keys and values that two ranks share
        ("own fused", planned(2, "1d", 2, 1, recompute="full")),  # parts that are cut each by itself
        ("own fused", planned(3, "1d-sp")),  # and some that have to be gathered
        ("bloom", planned(2, "1d", 2, 1)),  # heads in one dim with the rows of the batch
        ("bert", planned(3, "1d-sp", 2, 1, precision="bf16")),
        ("mixtral balanced", planned(2, "1d-sp", 2, 0, 2, microbatches=2)),
        ("own gpt", planned({"tp_i": 2, "tp_j": 2}, "2d", 2, 3)),
        ("own llama", planned({"tp_d": 2, "tp_i": 2, "tp_j": 2}, "2.5d", recompute="full")),
        ("own gpt", planned({"tp_i": 2, "tp_j": 2, "tp_l": 2}, "3d", microbatches=2)),
        (
            "own gpt",
            planned(2, "1d", 2, 1, 2, recompute="full").replace(
                tensor_plan="propagate", pins={"*.qkv.weight": "column", "*.mlp": "1", "wte.weight": "column"}
            ),
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_other_models_are_predicted(name: str, plan: Plan) -> None:
    check(name, plan)


def test_a_move_that_nobody_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(facts_of(collectives.all_reduce), communicates=False)
    monkeypatch.setattr(collectives.all_reduce, "own_op", facts)
    with pytest.raises(AssertionError, match="rank 0: FORWARD"):
        check("own gpt", planned(2, "1d"), anew=True)


# ---- the closed form -------------------------------------------------------------------------------------------------

B, S, H, WORDS = 3, 24, 48, 48


def layer(kind: str, tp: int, model: str = "gpt") -> tuple[Trace, UnitTraffic]:
    """The first of two layers, on the last of ``tp`` ranks."""
    sizes: dict[str, int] = {"vocabulary": WORDS, "width": H, "layers": 2, "heads": 12, "context": S}
    module = GPT(**sizes) if model == "gpt" else Llama(**sizes, kv_heads=12)
    batch = {name: torch.zeros(B, S, dtype=torch.int64) for name in ("input_ids", "labels")}
    found = trace(module, batch, tensor=TensorParallelSpec({"tp": tp}, kind))
    unit = next(u for u in found.units if u.name.endswith(".0"))
    assert unit.graph is not None
    return found, traffic(unit.graph, Env(rows=B, tensor={"tp": (tp, tp - 1)}), unit.output_grads)


def elements(several: Sequence[Traffic], tp: int) -> float:
    return sum(one.ring(tp) for one in several) / 4  # fp32


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_layer_takes_8bsh_over_a_ring(model: str, tp: int) -> None:
    """Shoeybi et al., section 3, and Korthikanti et al., section 4.2.2: the same volume with sequence parallelism, half
    of it forward.

    There, the gradients of norms and biases are partial sums until the end of the step.
    """
    volume = 8 * B * S * H * (tp - 1) / tp
    _, plain = layer("1d", tp, model)
    assert Counter(one.kind for one in (*plain.forward, *plain.backward)) == {"all_reduce": 4}
    assert elements(plain.forward, tp) == elements(plain.backward, tp) == pytest.approx(volume / 2, rel=1e-12)
    _, spread = layer("1d-sp", tp, model)
    assert Counter(one.kind for one in spread.forward) == {"all_gather": 2, "reduce_scatter": 2}
    assert Counter(one.kind for one in spread.backward) == {"all_gather": 2, "reduce_scatter": 2}
    assert elements(spread.forward, tp) == elements(spread.backward, tp) == pytest.approx(volume / 2, rel=1e-12)


def test_only_uneven_pieces_are_padded() -> None:
    """48 words over 5 ranks of 24 positions each: pieces of 5 positions, of which one rank has 4."""
    _, plain = layer("1d", 5)
    _, spread = layer("1d-sp", 5)
    assert {one.nbytes // 4 for one in plain.forward} == {B * S * H}
    assert {one.nbytes // 4 for one in spread.forward} == {B * 5 * 5 * H}


def test_recomputation_communicates_what_forward_does_once_more() -> None:
    found: dict[str, list[TrafficMoment]] = {}
    for recompute in ("none", "full"):
        plan = planned(2, "1d", recompute=recompute)
        found[recompute] = step_traffic([captured("own gpt", "1d", Mesh.of(tp=2))[1].general], plan, SGD, rows=zoo.ROWS)
    volumes = {name: sum(t.ring(2) for one in moments for t in one.traffic) for name, moments in found.items()}
    again = sum(t.ring(2) for one in found["full"] if one.instruction.op == "RECOMPUTE" for t in one.traffic)
    assert again > 0 and volumes["full"] == volumes["none"] + again


@pytest.mark.parametrize(
    ("kind", "again"), [("1d", {"all_reduce": 1}), ("1d-sp", {"all_gather": 2, "reduce_scatter": 1})]
)
def test_what_no_backward_reads_is_not_communicated_again(kind: str, again: dict[str, int]) -> None:
    """The sum behind the last product of a block."""
    _, one = layer(kind, 2)
    assert Counter(t.kind for t in one.again) == again
    last = B * S * H * (1 if kind == "1d" else 0.5)
    assert elements(one.forward, 2) == elements(one.again, 2) + last
