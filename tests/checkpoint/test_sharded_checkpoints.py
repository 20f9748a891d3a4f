"""State in pieces over tensor-parallel axes, saved under one layout and read under another: bit-equal, each element
saved once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saving_of_checkpoints import same, save
from torch import Tensor

import sharded
from shardwise.checkpoint.atoms import Piece
from shardwise.checkpoint.reader import Checkpoint
from shardwise.core.optim import OptimizerChoice
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train import state

Plan = tuple[dict[str, int], dict[str, Any]]

PLANS: list[Plan] = [
    ({"tp": 2}, {}), ({"tp": 3}, {"dp": 2, "zero": 1}), ({}, {"dp": 2, "zero": 3}), ({"tp": 3}, {"dp": 2, "zero": 3}),
    ({"tp": 2, "xp": 2}, {"dp": 2}), ({"tp": 2}, {"dp": 4, "replicas": 2, "zero": 1}),
    ({"tp": 2}, {"pp": 2, "dp": 2, "zero": 2}),
    ({}, {}), ({"tp": 3, "xp": 2}, {}),
]  # fmt: skip
CHOICES = {"adamw": OptimizerChoice("adamw", lr=1e-2), "nadam": OptimizerChoice("nadam", lr=1e-2, decay="all")}


def truth(choice: OptimizerChoice) -> dict[str, Tensor]:
    """Numbers for all that a run saves, by name."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, Tensor] = {}
    for name, value in sharded.net().named_parameters():
        found[f"model.{name}"] = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.requires_grad and name != "unread":
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.{name}.{key}"] = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            counters = ("step", "mu_product") if choice.name == "nadam" else ("step",)
            found |= {f"optimizer.{name}.{key}": torch.tensor(7.0 + len(key)) for key in counters}
    return found


def flats(engine: Engine) -> dict[str, Tensor]:
    """What a rank holds in its flat buffers, each buffer by bucket and key."""
    found: dict[str, Tensor] = {}
    for index, memory in engine.memory.buckets.items():
        found[f"{index} model"] = memory.master
        for number, update in enumerate(memory.updates):
            for segment, values in update.optimizer.states():
                found |= {f"{index} {number} {segment.start} {key}": value for key, value in values.items()}
    return found


def expected(engine: Engine, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same made of whole tensors, cut factor by factor; padding is zero."""
    comm, found = engine.comm, {}

    def flat(memory: Any, name: str) -> Tensor:
        out = torch.zeros(memory.layout.numel, dtype=torch.float64)
        for parameter, view in memory.views(out).items():
            view.copy_(
                sharded.local(memory.bucket.by_name[parameter], values[name.format(parameter)], comm.mesh, comm.rank)
            )
        return out

    for index, memory in engine.memory.buckets.items():
        held = memory.held
        found[f"{index} model"] = flat(memory, "model.{}")[held.start : held.stop]
        for number, update in enumerate(memory.updates):
            for segment, given in update.optimizer.states():
                for key, value in given.items():
                    name, stop = f"{index} {number} {segment.start} {key}", segment.start + segment.param.numel()
                    first = f"optimizer.{memory.bucket.parameters[0].name}.{key}"
                    found[name] = (
                        flat(memory, f"optimizer.{{}}.{key}")[segment.start : stop] if value.dim() else values[first]
                    )
    return found


def fill(engine: Engine, values: dict[str, Tensor]) -> None:
    now = flats(engine)
    for name, value in expected(engine, values).items():
        now[name].copy_(value)
    for memory in engine.memory.buckets.values():
        memory.publish()
    for name, value in engine.unused.items():
        value.copy_(values[f"model.{name}"])


@pytest.mark.quick(1)
@pytest.mark.few(5)
@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize(
    ("before", "after"), [(0, 1), (1, 7), (7, 3), (2, 4), (3, 5), (4, 6), (5, 0), (6, 8), (8, 2), (1, 1)]
)
def test_checkpoints_go_from_layout_to_layout(tmp_path: Path, before: int, after: int, kind: str) -> None:
    """Tensor parallelism of two, of three (uneven, with empty pieces), of two axes, of none, under any ZeRO."""
    choice, values = CHOICES[kind], truth(CHOICES[kind])
    first, second = (
        sharded.compiled(sharded.planned(tensor, **fields)) for tensor, fields in (PLANS[before], PLANS[after])
    )

    def saving(comm: ThreadCommunicator) -> list[Piece]:
        engine = Engine(first, comm, choice)
        fill(engine, values)
        return list(state.owned(engine))

    pieces = run_ranks(first.plan.mesh, saving, timeout=60)
    owned = {piece.name: 0 for one in pieces for piece in one}
    for piece in (piece for one in pieces for piece in one):
        owned[piece.name] += piece.box.numel
    assert owned == {name: value.numel() for name, value in values.items()}
    assert save(tmp_path, 5, pieces)[0].error is None
    opened = Checkpoint.open(tmp_path / "step_00000005")
    assert set(opened.tensors) == set(values) and all(same(opened.read(name), value) for name, value in values.items())

    def loading(comm: ThreadCommunicator) -> dict[str, Tensor]:
        engine = Engine(second, comm, choice)
        state.restore(engine, opened)
        now = flats(engine)
        for name, value in expected(engine, values).items():
            assert torch.equal(now[name], value), name
        assert engine.step_index == 5
        return engine.state_dict()

    for found in run_ranks(second.plan.mesh, loading, timeout=60):
        assert all(torch.equal(value, values[f"model.{name}"]) for name, value in found.items())


def test_ranks_that_have_the_same_share_what_is_saved() -> None:
    """Of parameters that nothing shards each of the ranks over a tensor-parallel axis saves a part."""
    found = sharded.compiled(sharded.planned({"tp": 2}))
    replicated = {f"model.{p.name}" for p in found.general.parameters if not p.axes}

    def saving(comm: ThreadCommunicator) -> int:
        return sum(p.box.numel for p in state.owned(Engine(found, comm, CHOICES["adamw"])) if p.name in replicated)

    mine, other = run_ranks(found.plan.mesh, saving, timeout=60)
    assert mine + other == sum(p.numel for p in found.general.parameters if not p.axes)
    assert min(mine, other) >= 0.3 * (mine + other)
