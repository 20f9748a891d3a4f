"""Parameters in pieces over tensor-parallel axes: values, whole values again, gradients, the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharded
from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Op
from shardwise.core.layout import Factor, Layout, rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.tensor_options import tensor_axes
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import batch_axes
from shardwise.runtime.batch import BatchState, StepInput
from shardwise.runtime.buffers import local_part
from shardwise.runtime.engine import Engine
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.units.trace import Parameter

PLANS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}), ({"tp": 3}, {"dp": 2, "zero": 1}), ({"tp": 2}, {"dp": 3, "zero": 2}),
    ({"tp": 3}, {"dp": 2, "zero": 3}),
    ({"tp": 2}, {"dp": 4, "zero": 3, "replicas": 2}), ({"tp": 2, "xp": 2}, {"dp": 2, "zero": 1}),
    ({"tp": 3, "xp": 2}, {}),
    ({"tp": 2}, {"pp": 2, "dp": 2, "zero": 3}),
    ({"tp": 2}, {"dp": 2, "zero": 1, "offload": "optimizer", "precision": "bf16"}),
]  # fmt: skip
CHOICE = OptimizerChoice("adamw", lr=1e-2)


def made(tensor: dict[str, int], fields: dict[str, Any]) -> Compiled:
    return sharded.compiled(sharded.planned(tensor, **fields))


def test_a_bucket_has_parameters_sharded_over_the_same_axes() -> None:
    found = made({"tp": 2, "xp": 2}, {})
    for bucket in found.buckets:
        assert {p.axes for p in bucket.parameters} == {bucket.axes}
    axes = {p.name: b.axes for b in found.buckets for p in b.parameters}
    assert (
        axes["embed.weight"] == ("tp", "xp") and axes["head.bias"] == ("xp",) and axes["blocks.1.out.weight"] == ("tp",)
    )
    assert axes["blocks.1.out.bias"] == axes["gain"] == axes["frozen.bias"] == ()
    plain = Compiled(sharded.net(), sharded.planned({"tp": 1}), sharded.batch())
    assert all(b.axes == () for b in plain.buckets) and len(plain.buckets) < len(found.buckets)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.sharded((4, 3), {0: "tp"}), Layout.sharded((4, 2), {0: "dp"}), Layout.sharded((4, 2), {1: "pp"}),
        Layout.sharded((4, 2), {1: "dp_replicate"}),
    ],
)  # fmt: skip
def test_layouts_that_no_parameter_can_have_are_refused(layout: Layout) -> None:
    with pytest.raises(ShardwiseError, match=r"parameter w of shape \(4, 2\) cannot lie as"):
        Parameter("w", (4, 2), torch.float32, (0,), layout)


def test_local_shapes() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    fused = Parameter("w", (12, 5), torch.float32, (0,), Layout(((Factor(3), Factor(4, ("tp",))), (Factor(5),))))
    assert [fused.local_shape(mesh, rank) for rank in range(3)] == [(3, 5), (3, 5), (6, 5)] and fused.axes == ("tp",)
    assert Parameter("w", (12, 5), torch.float32, (0,)).local_shape(mesh, 1) == (12, 5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_rank_starts_with_its_piece_and_all_together_have_the_whole(
    plan: tuple[dict[str, int], dict[str, Any]],
) -> None:
    found = made(*plan)
    truth = sharded.net().state_dict()
    other = {name: torch.randn(value.shape, dtype=value.dtype) for name, value in truth.items()}
    narrow = found.plan.numeric.precision != "fp64"

    def rank(comm: ThreadCommunicator) -> list[dict[str, Tensor]]:
        engine = Engine(found, comm, CHOICE)
        for memory in engine.memory.buckets.values():
            mine = torch.zeros(memory.layout.numel, dtype=memory.bucket.wide)
            for name, view in memory.views(mine).items():
                view.copy_(sharded.local(memory.bucket.by_name[name], truth[name], comm.mesh, comm.rank))
                assert narrow or torch.equal(local_part(truth[name], memory.bucket.by_name[name], comm), view)
            assert torch.equal(memory.master, mine[memory.held.start : memory.held.stop].to(memory.master.dtype))
            if memory.rule.state == "R":
                for name, leaf in memory.views(memory.param).items():
                    assert leaf.shape == memory.bucket.by_name[name].local_shape(comm.mesh, comm.rank)
        first = engine.state_dict()
        engine.load_state_dict(other)
        return [first, engine.state_dict()]

    for states in run_ranks(found.plan.mesh, rank, timeout=60):
        for state, expected in zip(states, (truth, other), strict=True):
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(state[name], value.to(state[name].dtype)), name


def gradients(parameters: tuple[Parameter, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {p.name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_norm_counts_every_element_once(plan: tuple[dict[str, int], dict[str, Any]]) -> None:
    """Gradients as they are after their reduction, put there by hand; the norm is reduced by the program."""
    found = made(*plan)
    whole = gradients(found.general.parameters)
    program = found.programs(found.general, 1)[0]
    (summed,) = [one for one in program.instructions if one.op is Op.REDUCE and one.writes[0].kind == "norm"]

    def rank(comm: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        engine = Engine(found, comm, CHOICE)
        buffers = Gradients(engine.memory, comm, strict=True)
        for memory in engine.memory.buckets.values():
            if memory.grad is None:
                continue
            mine = {n: sharded.local(p, whole[n], comm.mesh, comm.rank) for n, p in memory.bucket.by_name.items()}
            if memory.rule.grad == "P":
                for name, value in mine.items():
                    buffers.add(name, value)
            else:
                flat = torch.zeros(memory.layout.numel, dtype=memory.bucket.wide)
                for name, view in memory.views(flat).items():
                    view.copy_(mine[name])
                memory.grad.copy_(flat[memory.held.start : memory.held.stop])
                buffers._summed.add(memory.bucket.index)
        batch = BatchState(
            engine.interpreter, [found.general], StepInput(_rows(comm.mesh, comm.rank, found), 5, 0, 0.0)
        )
        batch.take_norm(buffers)
        assert batch.norms is not None
        comm.all_reduce(batch.norms, summed.axes).wait()
        batch.decide()
        return batch.norm, engine.everywhere(batch.gradients())

    exact = 1e-14 if found.plan.numeric.precision == "fp64" else 1e-6
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in whole.values()]))
    results = run_ranks(found.plan.mesh, rank, timeout=60)
    for norm, joined in results:
        assert torch.equal(norm, results[0][0]) and abs(float(norm) - float(expected)) <= exact * float(expected)
        assert joined.keys() == whole.keys()
        assert all(torch.equal(joined[name], value.to(joined[name].dtype)) for name, value in whole.items())


def _rows(mesh: Mesh, rank: int, found: Compiled) -> dict[str, Tensor]:
    axes = batch_axes(found.plan.mesh)
    ((start, stop),) = rank_rows(5, 1, mesh.axis_size(axes), mesh.index(rank, axes))
    return {name: value[start:stop] for name, value in sharded.batch().items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "fields", [{"dp": 2}, {"dp": 3, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 2, "pp": 2, "zero": 2}], ids=str
)
def test_axes_that_shard_nothing_change_nothing(fields: dict[str, Any]) -> None:
    """Steps that are clipped to a norm: who counted replicas would clip harder."""

    def trained(tensor: dict[str, int]) -> dict[str, Tensor]:
        found = Compiled(sharded.net(), sharded.planned(tensor, **fields), sharded.batch())

        def rank(comm: ThreadCommunicator) -> dict[str, Tensor]:
            engine = Engine(found, comm, CHOICE, clip_norm=0.05, strict=True)
            for _ in range(3):
                engine.step(_rows(comm.mesh, comm.rank, found), 5)
            return engine.state_dict()

        states = run_ranks(found.plan.mesh, rank, timeout=60)
        for state in states:
            assert all(torch.equal(state[name], value) for name, value in states[0].items())
        return states[0]

    plain, beside = trained({}), trained({"tp": 2, "xp": 2})
    for name, value in plain.items():
        assert float((beside[name] - value).norm()) <= 1e-13 * max(float(value.norm()), 1.0), name
    assert not torch.equal(plain["embed.weight"], sharded.net().embed.weight)


def test_traces_that_lay_parameters_differently_are_refused() -> None:
    found = made({"tp": 2}, {})
    evaluation = found.evaluation()
    assert evaluation.programs(evaluation.general, 1)
    sharded.place(evaluation.general, evaluation.module, evaluation.plan, {})
    with pytest.raises(ShardwiseError, match=r"parameter \S+ lies as \S+.* in training, and as \S+.* in another trace"):
        found._check_placed(evaluation.general, found.buckets)


def test_tensor_axes_are_those_of_no_other_parallelism() -> None:
    plan = sharded.planned({"tp": 2, "one": 1, "xp": 3}, dp=4, replicas=2, zero=1, pp=2)
    assert plan.mesh.names == ("pp", "dp_replicate", "dp", "tp", "one", "xp") and tensor_axes(plan.mesh) == ("tp", "xp")
    assert tensor_axes(sharded.planned({}).mesh) == ()
