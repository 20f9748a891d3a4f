"""What units communicate, forward and backward: by what is known of tensor parallelism, and by what ranks really send."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, rank_rows
from shardwise.models.gpt import GPT
from shardwise.parallel.tensor import tensor_axes
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.trace.collectives import VOLUME, Collective, collectives
from shardwise.trace.ops import Env

ROWS, SEQUENCE, WIDTH = 4, 8, 16


def tokens(rows: int = ROWS) -> dict[str, Tensor]:
    return {name: torch.randint(0, 32, (rows, SEQUENCE)) for name in ("input_ids", "labels")}


def gpt(plan: Plan) -> Compiled:
    torch.manual_seed(0)
    return Compiled(GPT(vocabulary=32, width=WIDTH, layers=2, heads=4, context=SEQUENCE), plan, tokens())


def place(plan: Plan, rank: int = 0, rows: int = ROWS) -> Env:
    mesh = plan.mesh
    tensor = {axis: (mesh.axis_size(axis), mesh.index(rank, axis)) for axis in tensor_axes(plan)}
    return Env(parts=mesh.axis_size(AXES), index=mesh.index(rank, AXES), rows=rows, tensor=tensor)


def of(compiled: Compiled, name: str, rows: int = ROWS) -> list[Collective]:
    unit = next(unit for unit in compiled.general.units if unit.name == name)
    return collectives(unit, place(compiled.plan, rows=rows))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tensor", ["1d", "1d-sp"])
def test_a_layer_sends_what_megatron_says(tensor: Any, tp: int) -> None:
    """Shoeybi et al., section 3, and Korthikanti et al., section 4.2.2: four all-reduces of b s h, or as many halves of them."""
    compiled = gpt(Plan(Mesh.of(dp=1, tp=tp), precision="fp64", tensor=tensor))
    found = of(compiled, "blocks.1")
    whole, norms = ROWS * SEQUENCE * WIDTH * 8, 4 * WIDTH * 8
    extra = 2 * norms if tensor == "1d-sp" else 0  # gradients of norms, which see a part of the sequence
    assert sum(one.sent for one in found) == pytest.approx((8 * whole + extra) * (tp - 1) / tp)
    large = [one for one in found if one.size == whole]
    kinds = Counter((one.note.forward, one.note.backward) for one in large for _ in range(one.count))
    if tensor == "1d":
        assert kinds == {("", "all_reduce"): 2, ("all_reduce", ""): 2}
    else:
        assert kinds == {("all_gather", "reduce_scatter"): 2, ("reduce_scatter", "all_gather"): 2}
    assert [one.note.path for one in large if one.note.cause.startswith("aten.linear")] == [
        "blocks.1.attention.qkv", "blocks.1.mlp.up",
    ]  # fmt: skip
    assert [one.note._replace(path="") for one in of(compiled, "blocks.0")] == [
        one.note._replace(path="") for one in found
    ]  # fmt: skip


def test_it_grows_with_the_rows_of_a_rank() -> None:
    compiled = gpt(Plan(Mesh.of(dp=2, tp=2), precision="fp64"))
    few, many = (sum(one.sent for one in of(compiled, "blocks.0", rows)) for rows in (4, 12))
    assert many == 3 * few > 0
    assert not of(gpt(Plan(Mesh.of(dp=2), precision="fp64")), "blocks.0")


class Normed(nn.Module):
    """Statistics of the whole batch, and negatives of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.net(x), dim=-1)
        return F.cross_entropy(y @ y.T, torch.arange(len(y), device=y.device))


def test_ops_that_mix_rows_say_so() -> None:
    plan = Plan(Mesh.of(dp=3), precision="fp64")
    compiled = Compiled(Normed(), plan, {"x": torch.randn(6, 6)})
    found = [one.note for unit in compiled.general.units for one in collectives(unit, place(plan, rows=6))]
    assert ("all_gather", "all_reduce", ("rows",), "batch_norm", "net.1") in found
    assert any((one.forward, one.backward) == ("all_gather", "reduce_scatter") for one in found), found
    alone = Plan(Mesh.of(dp=1), precision="fp64")
    assert not any(collectives(unit, place(alone, rows=6)) for unit in compiled.general.units)


@pytest.mark.parametrize(("tensor", "tp", "dp"), [("1d", 2, 1), ("1d-sp", 2, 1), ("1d", 4, 2), ("1d-sp", 4, 1), ("1d-sp", 2, 2)])
def test_ranks_send_just_that(monkeypatch: pytest.MonkeyPatch, tensor: Any, tp: int, dp: int) -> None:
    """Every call of a communicator from inside a unit, by kind and bytes."""
    plan = Plan(Mesh.of(dp=dp, tp=tp), precision="fp64", tensor=tensor)
    compiled, batch = gpt(plan), tokens()

    def rank(comm: Communicator) -> Counter[tuple[str, int]]:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.1))
        calls: Counter[tuple[str, int]] = Counter()
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            real = getattr(comm, kind)

            def counted(*args: Any, real: Any = real, kind: str = kind, **options: Any) -> Any:
                if options.get("lane") == "compute" and "softmax" not in options["what"]:
                    calls[kind, max(a.nbytes for a in args if isinstance(a, Tensor))] += 1
                return real(*args, **options)

            setattr(comm, kind, counted)
        mine = [i for a, b in rank_rows(ROWS, 1, dp, comm.mesh.index(comm.rank, AXES)) for i in range(a, b)]
        engine.step({name: value[mine] for name, value in batch.items()}, ROWS)
        return calls

    for index, calls in enumerate(run_ranks(plan.mesh, rank, timeout=60)):
        expected: Counter[tuple[str, int]] = Counter()
        for unit in compiled.general.units:
            for one in collectives(unit, place(plan, index)):
                for kind in (one.note.forward, one.note.backward):
                    if VOLUME[kind] and one.size is not None:
                        expected[kind, one.size] += one.count
        assert calls == expected
