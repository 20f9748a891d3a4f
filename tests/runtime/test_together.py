"""STEPs that follow each other are taken together: the same bits, in the kernels of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.instruction import Instruction, Op
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.scale import ScaleChoice
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime import interpreter, together
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks

ROWS, LENGTH = 6, 8


def step(bucket: int, version: int = 0, waits: tuple[int, ...] = ()) -> Instruction:
    return Instruction(Op.STEP, bucket=bucket, version=version, waits=waits)


def test_only_steps_in_a_row_are_together() -> None:
    kinds: dict[int, Hashable | None] = {0: "a", 1: "a", 2: "b", 3: "b", 4: None, 5: None, 6: "a"}
    rows = [step(0), step(1), step(2), step(3), step(4), step(5), step(6)]
    assert together.joint_updates(Program("", instructions=tuple(rows)), kinds.get) == {
        0: (0, 1), 1: (), 2: (2, 3), 3: (), 4: (4,), 5: (5,), 6: (6,),
    }  # fmt: skip
    apart = (
        step(0),
        Instruction(Op.GATHER, bucket=0),
        step(1),
        step(6, waits=(1,)),
        step(0, version=1),
        step(1, version=1),
    )
    assert together.joint_updates(Program("", instructions=apart), kinds.get) == {
        0: (0,),
        2: (1,),
        3: (6,),
        4: (0, 1),
        5: (),
    }


class Kernels(TorchDispatchMode):
    """Counts the ops of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def trained(
    plan: Plan, choice: OptimizerChoice, scale: ScaleChoice | None = None
) -> list[tuple[dict[str, Tensor], Counter[str]]]:
    """Of each rank the state after four steps, and the kernels of one."""
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=16, layers=3, heads=2, context=LENGTH)
    batch = {name: torch.randint(0, 31, (ROWS, LENGTH)) for name in ("input_ids", "labels")}
    compiled = Compiled(module, plan, batch)

    def rank(comm: Communicator) -> tuple[dict[str, Tensor], Counter[str]]:
        engine = Engine(compiled, comm, choice, clip_norm=0.1, loss_scale=scale)
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(ROWS, plan.microbatches, parts, index) for i in range(a, b)]
        fields = {k: v[own] for k, v in batch.items()}
        for _ in range(3):
            engine.step(fields, ROWS)
        with Kernels() as kernels:
            engine.step(fields, ROWS)
        moments = {
            f"{b.bucket.index}.{k}": v.clone() for b in engine.memory.buckets.values() for u in b.updates for _,
            s in u.optimizer.states() for k, v in s.items()
        }  # fmt: skip
        return engine.state_dict() | moments, kernels.found

    return run_ranks(plan.mesh, rank, timeout=60)


PLANS = {
    "one rank": (Plan.of(precision="fp64"), OptimizerChoice("adamw", lr=1e-2)),
    "zero 3 in bf16": (
        data_parallel(Plan.of(precision="bf16", microbatches=2), 3, 3),
        OptimizerChoice("adam", lr=1e-2, weight_decay=0.1),
    ),
    "fp16": (data_parallel(Plan.of(precision="fp16"), 2, 1), OptimizerChoice("adamw", lr=1e-2)),
    "stages": (
        pipeline(Plan.of(precision="fp64", microbatches=3), 2, "1f1b"),
        OptimizerChoice("sgd", lr=1e-2, momentum=0.9),
    ),
    "without a fused kernel": (Plan.of(Mesh.of(dp=2), precision="fp64"), OptimizerChoice("radam", lr=1e-2)),
}


@pytest.mark.quick(1)
@pytest.mark.few(2)
@pytest.mark.parametrize("name", PLANS)
def test_the_bits_are_those_of_a_bucket_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fp16 the first steps overflow, and are skipped."""
    plan, choice = PLANS[name]
    scale = ScaleChoice(initial=2.0**40) if plan.numeric.precision == "fp16" else None
    ours = trained(plan, choice, scale)
    monkeypatch.setattr(interpreter, "joint_key", lambda memory: None)
    apart = trained(plan, choice, scale)
    for (mine, kernels), (theirs, more) in zip(ours, apart, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        fused, groups = f"_fused_{choice.name}_", 2
        if choice.name == "radam":
            assert not kernels[fused] and not more[fused]
        else:  # a tied weight's gradient comes from another stage, and is waited for before its STEP
            rows = 2 if name == "stages" else 1
            assert 0 < kernels[fused] <= groups * rows and kernels[fused] < more[fused]
            assert max(kernels["_foreach_add_"], kernels["_foreach_sub_"]) <= groups * rows
