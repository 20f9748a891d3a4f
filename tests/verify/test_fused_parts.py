"""Fused projections of unequal parts: each part is sharded by itself, and nothing is gathered."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_tensor import OPTIMIZER, PLAIN, check, oracle
from torch import Tensor, nn

import zoo
from communicating import communicated
from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.verify.verify import verify

Case = tuple[int, int, str, int]
CASES: list[Case] = [
    (8, 2, "split", 2), (8, 2, "slices", 2), (8, 2, "view", 2), (9, 3, "split", 3), (8, 4, "slices", 4),
    (12, 6, "view", 6),
    (6, 3, "split", 2), (8, 2, "split", 4),  # pieces of unequal size, and heads that are fewer than ranks
]  # fmt: skip


@functools.cache
def subject(heads: int, shared: int, how: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(heads)
    batch = zoo.tokens()
    return zoo.Fused(heads, shared, how).double(), [batch, {k: v[:3] for k, v in batch.items()}]


@functools.cache
def compiled(heads: int, shared: int, how: str, tp: int, kind: Any) -> Compiled:
    module, batches = subject(heads, shared, how)
    return Compiled(module, tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), tp, kind), batches[0])


def parity(case: Case, kind: str) -> None:
    one, (module, batches) = compiled(*case, kind), subject(*case[:3])
    check(one, batches, oracle(module, None, batches, PLAIN, 1), PLAIN)
    heads, shared, _, tp = case
    if shared % tp == 0:
        gathered = [key for key in communicated(one.general) if key[0] == "all_gather" and key[2].startswith("blocks")]
        assert kind == "1d-sp" or not gathered
        placed = {p.name: p.placed for b in one.general.buckets for p in b.parameters}
        assert str(placed["blocks.0.qkv.weight"]) == f"[{heads}+{shared}+{shared}:tp*4, 24]"


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(("case", "kind"), [(case, ("1d", "1d-sp")[i % 2]) for i, case in enumerate(CASES)], ids=str)
def test_parity(case: Case, kind: str) -> None:
    parity(case, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parity(case: Case, kind: str) -> None:
    parity(case, kind)


@pytest.mark.parametrize(
    ("kind", "dp", "zero", "pp", "recompute", "m"), [("1d", 2, 3, 1, "selective", 2), ("1d-sp", 1, 0, 2, "full", 2)]
)
def test_together_with_all_else(kind: str, dp: int, zero: int, pp: int, recompute: Any, m: int) -> None:
    one, (module, batches) = compiled(8, 2, "split", 2, kind), subject(8, 2, "split")
    plan = pipeline(data_parallel(Plan.of(microbatches=m, recompute=recompute, precision="fp64"), dp, zero), pp)
    check(one.under(tensor_parallel(plan, 2, kind)), batches, oracle(module, None, batches, OPTIMIZER, m), OPTIMIZER)  # type: ignore[arg-type]


class AllOfIt(nn.Module):
    """A projection of which a part is all and the rest nothing, as where all dims of a head are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rotated, rest = self.key(x).split([8, 0], -1)
        return F.mse_loss(self.out(torch.cat([rotated.sin(), rest], -1)).squeeze(-1), y)


def test_a_part_may_be_empty() -> None:
    torch.manual_seed(2)
    batches = [{"x": torch.randn(rows, 6), "y": torch.randn(rows)} for rows in (5, 3)]
    report = verify(AllOfIt(), batches, tensor_parallel(Plan.of(Mesh(())), 2, "1d"))
    assert report.passed, report.worst


@pytest.mark.parametrize("parts", [(8, 2, 2), (5, 1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("outer", [(), ("o",)], ids=["one axis", "within another"])
def test_moves_of_concatenations(parts: tuple[int, ...], outer: tuple[str, ...]) -> None:
    """A slice and a gather of each part, alone, in the order of the whole; the sums of pieces; and gradients."""
    mesh, size = Mesh.of(o=2, i=3), sum(parts)
    layout = Layout(((Factor(2), Factor(size, (*outer, "i"), parts), Factor(2)),))
    above = Layout(((Factor(2), Factor(size, outer, parts), Factor(2)),))
    x = torch.arange(4.0 * size, dtype=torch.float64) + 1

    def owned(one: Layout, rank: int) -> Tensor:
        return torch.cat([x[a:b] for a, b in one.intervals(mesh, rank)[0]] or [x[:0]])

    def moved(comm: ThreadCommunicator) -> None:
        env = Env(comm, tensor=mesh.places(comm.rank, ("o", "i")))
        cut = (("i",), outer, 0, 2, size, 2, parts)
        together, piece = owned(above, comm.rank).requires_grad_(), owned(layout, comm.rank)
        mine = collectives.shard(env, together, cut)
        assert torch.equal(mine, piece)
        assert torch.equal(collectives.gather(env, piece, cut), together)
        assert torch.equal(collectives.scatter(env, together * (comm.rank % 3), cut), 3 * piece)
        (gradient,) = torch.autograd.grad(mine, together, piece * 2)
        assert torch.equal(gradient, together * 2)

    run_ranks(mesh, moved, timeout=60)
