"""Weights cut part by part, and whole over a sub-axis, saved by four ranks: two ranks and one read the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saving_of_checkpoints import same, save
from torch import Tensor

import zoo
from shardwise.checkpoint.atoms import Piece
from shardwise.checkpoint.reader import Checkpoint
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train import state

CHOICE = OptimizerChoice("adamw", lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weight", "placed"), [
    ("own fused", "blocks.1.qkv.weight", "[8+4+4:tp*4, 24]"),
    ("own llama", "blocks.1.attention.k_proj.weight", "[2:tp//2*4, 16]"),
])  # fmt: skip
def test_other_numbers_of_ranks_read_the_same(tmp_path: Path, name: str, weight: str, placed: str) -> None:
    model, empty = zoo.make(name), zoo.make(name)
    for parameter in empty.module.parameters():
        torch.nn.init.zeros_(parameter)
    wanted = {f"model.{name}": value.detach().clone() for name, value in model.module.named_parameters()}
    first = Compiled(model.module, tensor_parallel(data_parallel(Plan.of(), 2, 2), 4, "1d"), model.batch)
    assert next(str(p.placed) for p in first.general.parameters if p.name == weight) == placed

    def saving(comm: ThreadCommunicator) -> list[Piece]:
        return list(state.owned(Engine(first, comm, CHOICE)))

    pieces = run_ranks(first.plan.mesh, saving, timeout=60)
    for key, value in wanted.items():
        assert sum(piece.box.numel for one in pieces for piece in one if piece.name == key) == value.numel()
    assert save(tmp_path, 5, pieces)[0].error is None
    opened = Checkpoint.open(tmp_path / "step_00000005")
    assert all(same(opened.read(key), value) for key, value in wanted.items())

    for tp in (2, 1):
        second = Compiled(empty.module, tensor_parallel(Plan.of(mesh=Mesh(())), tp, "1d"), empty.batch)

        def loading(comm: ThreadCommunicator, second: Compiled = second) -> dict[str, Tensor]:
            engine = Engine(second, comm, CHOICE)
            state.restore(engine, opened)
            return engine.state_dict()

        for found in run_ranks(second.plan.mesh, loading, timeout=60):
            assert all(torch.equal(found[key.removeprefix("model.")], value) for key, value in wanted.items())
