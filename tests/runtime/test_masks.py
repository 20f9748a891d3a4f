"""Batches without padding: who decides that a rank computes them by the trace that assumes it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import Loader, one_pass
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.batch import StepResult
from shardwise.runtime.choices import Choices
from shardwise.runtime.engine import Engine
from shardwise.runtime.masks import all_ones
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

ROWS, LENGTH, WIDTH, WORDS = 6, 5, 8, 11


class Block(nn.Module):
    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.bool()[:, None, None])
        return self.norm((x + self.out(y.transpose(1, 2).flatten(2))).transpose(1, 2)).transpose(1, 2)


class Reader(nn.Module):
    """Two blocks of attention over the words that a mask shows."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(batch_norm) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(padded: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Rows of words; those that are ``padded`` end early."""
    g = torch.Generator().manual_seed(1)
    fields = {name: torch.randint(0, WORDS, (ROWS, LENGTH), generator=g) for name in ("input_ids", "labels")}
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[list(padded), 3:] = 0
    return {**fields, "attention_mask": mask}


def compiled(plan: Plan, batch_norm: bool = False) -> Compiled:
    torch.manual_seed(3)
    return Compiled(Reader(batch_norm), plan, batch((0,)))


FP64 = Plan.of(precision="fp64")


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("plan", "batch_norm", "expected"),
    [
        (FP64, True, True),  # nobody to agree with
        (data_parallel(FP64, 2, 0), False, True),
        (data_parallel(FP64.replace(microbatches=2), 2, 3), False, True),
        (data_parallel(FP64, 2, 0), True, False),
        (data_parallel(FP64, 2, 3), True, False),
        (tensor_parallel(data_parallel(FP64, 2, 2), 2, "1d"), False, True),  # units communicate, over other axes
        (tensor_parallel(FP64, 2, "1d"), True, True),
        (pipeline(data_parallel(FP64.replace(microbatches=2), 2, 1), 2, "1f1b"), False, True),
    ],
)
def test_ranks_decide_alone_where_both_traces_exchange_the_same(plan: Plan, batch_norm: bool, expected: bool) -> None:
    one = compiled(plan, batch_norm)
    assert one.masks == ("attention_mask",)

    assert one.alike_over_batch is expected


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_take_different_traces_compute_one_step(zero: int) -> None:
    """The rows of rank 0 are padded and those of rank 1 are not: each by its own trace, and both by the general one."""
    plan = data_parallel(FP64.replace(microbatches=2), 2, zero)
    one, fields = compiled(plan), batch(padded=(0, 3))
    taken: dict[int, tuple[str, ...]] = {}

    def train(alone: bool) -> list[Any]:
        def rank(comm: ThreadCommunicator) -> Any:
            engine = Engine(one, comm, OptimizerChoice("adamw", lr=0.1), clip_norm=1.0, strict=True)
            ((a, b), (c, d)) = rank_rows(ROWS, 2, 2, comm.rank)
            mine = {name: torch.cat([value[a:b], value[c:d]]) for name, value in fields.items()}
            if alone:
                taken[comm.rank] = all_ones(mine, one.masks)
            losses = [float(engine.step(mine, ROWS).loss) for _ in range(3)]
            return losses, engine.state_dict()

        own = patch.object(Choices, "agreed_ones", lambda self, *_: taken[self.comm.rank]) if alone else nullcontext()
        with own:
            return run_ranks(plan.mesh, rank, timeout=60)

    apart, together = train(True), train(False)
    assert taken == {0: (), 1: ("attention_mask",)}
    for (losses, state), (truth, weights) in zip(apart, together, strict=True):
        assert losses == pytest.approx(truth, abs=1e-12)
        assert all(float((state[name] - value).abs().max()) <= 1e-10 for name, value in weights.items())


class Rows:
    def __init__(self, padded: tuple[int, ...]) -> None:
        self.fields = batch(padded)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.fields.items()}


def test_the_loader_says_which_masks_are_all_ones_in_a_ranks_rows() -> None:
    mesh, names = Mesh.of(dp=2), ("attention_mask",)
    data = Rows(padded=(0,))
    found = [next(one_pass(data, mesh, rank, ROWS, masks=names)).ones for rank in range(2)]
    assert found == [(), names]
    with Loader(data, mesh, 0, 2, masks=names) as loader:
        for one in islice(loader, 6):
            assert one.ones == (names if bool((one.fields["attention_mask"] == 1).all()) else ())
    assert next(one_pass(data, mesh, 0, ROWS)).ones is None  # nobody has looked
    parts = [next(one_pass(data, Mesh.of(dp=4), rank, 3, masks=names)) for rank in range(4)]
    empty = [one for one in parts if not len(one.fields["labels"])]
    assert len(empty) == 1 and empty[0].ones == names  # no row says otherwise


def test_what_the_loader_says_counts() -> None:
    """On CPUs ranks agree on it: one that has padding is enough."""
    plan = data_parallel(FP64, 2, 0)
    one, fields = compiled(plan), batch()

    def rank(comm: ThreadCommunicator) -> list[bool]:
        engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
        mine = {name: value[:3] for name, value in fields.items()}
        told = [("attention_mask",), () if comm.rank == 0 else ("attention_mask",), None]
        return [engine.choose(mine, ROWS, ones=known)[0] is one.general for known in told]

    assert run_ranks(plan.mesh, rank, timeout=60) == [[False, True, False]] * 2


def test_numbers_of_a_step() -> None:
    loss, norm, skipped, halted = (torch.tensor(v) for v in (2.5, 0.1, 1.0, 1.0))
    found = StepResult(loss, norm, skipped, torch.tensor(7), torch.tensor(0.0), halted=halted).on_host()
    assert found.loss == 2.5 and found.grad_norm == float(norm) and found.weight == 7
    assert (
        found.skipped is True
        and found.stop == 0
        and found.halted is True
        and found.scale is None
        and found.overflows is None
    )
    scale, overflows = torch.tensor(1024.0), torch.tensor(3, dtype=torch.int32)
    scaled = StepResult(
        loss, norm, skipped, torch.tensor(7), torch.tensor(2.0), scale, overflows, halted=torch.tensor(0.0)
    ).on_host()
    assert (scaled.scale, scaled.overflows, scaled.stop, scaled.halted) == (1024.0, 3, 2, False)
