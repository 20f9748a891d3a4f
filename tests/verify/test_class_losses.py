"""Losses of scores in pieces of their classes equal one device, and no rank ever has all the scores of a row."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import classes
from shardwise.core.tensor_options import Tensor as Kind
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.ops.env import Env
from shardwise.parallel.tensor import tensor_parallel
from shardwise.shard.sizes import local_shape
from shardwise.units.trace import Trace
from shardwise.verify.oracle import OracleStep
from verify.test_tensor import ALONE, PLAIN, check, oracle
from verify.test_tensor_auto import FAST

SIZES = ((64, 2), (31, 2), (31, 3))
FEW = ("plain", "all but mean", "dims, all", "probabilities, all", "nll, none", "masked classes")
CASES = [
    pytest.param(name, *SIZES[i % 3], marks=() if name in FEW else pytest.mark.full)
    for i, name in enumerate(classes.HOW)
]


@functools.cache
def subject(name: str, count: int) -> tuple[Compiled, list[dict[str, Tensor]], list[OracleStep]]:
    module, batch = classes.made(name, count)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    batches = [wide, {k: v[:2] for k, v in wide.items()}]
    module = copy.deepcopy(module).double()
    return Compiled(module, ALONE, batches[0]), batches, oracle(module, None, batches, PLAIN, 1)


def scores_of(trace: Trace, count: int, rows: int, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The nodes that carry a gradient and have as many as ``count`` in a dim on some rank, but for those of one dim."""
    for unit in trace.units:
        for node in unit.graph.nodes if unit.graph is not None else ():
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or not node.meta.get("grad") or value.dim() < 2:
                continue
            for rank in range(tp):
                shape = local_shape(value, node.meta["layout"], Env(rows=rows, tensor={"tp": (tp, rank)}))
                if count in shape:
                    yield str(node), shape


def every_way(name: str, count: int, tp: int, kind: str) -> None:
    one, batches, truth = subject(name, count)
    compiled = one.under(tensor_parallel(ALONE, tp, kind))
    assert list(scores_of(compiled.general, count, len(batches[0]["ids"]), tp)) == []
    assert list(scores_of(one.general, count, len(batches[0]["ids"]), 1)) != []
    check(compiled, batches, truth, PLAIN)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "count", "tp"), CASES)
def test_a_loss(name: str, count: int, tp: int) -> None:
    every_way(name, count, tp, "1d")


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", classes.HOW)
def test_a_solved_plan(name: str, tp: int) -> None:
    """Where links are fast, and something is shared out whatever it sends."""
    one, batches, truth = subject(name, 31)
    check(replace(one, rates=FAST).under(tensor_parallel(ALONE, tp, "1d", "auto")), batches, truth, PLAIN)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tp"), [("2d", 4), ("2.5d", 8), ("3d", 8)])
@pytest.mark.parametrize("name", classes.HOW)
def test_over_several_axes(name: str, kind: Any, tp: int) -> None:
    """Some of which have pieces of rows meanwhile."""
    one, batches, truth = subject(name, 31)
    check(one.under(tensor_parallel(ALONE, tp, kind)), batches, truth, PLAIN)


@functools.cache
def gpt(name: str) -> Compiled:
    """The scores of an own GPT of 96 words, by each of the losses; 96 is no other size in it."""
    weights = SimpleNamespace(weights=torch.linspace(0.5, 2, 96))
    other = {"ids": "input_ids", "labels": "targets"}  # with labels, a GPT would return its own loss
    batch = {other.get(k, k): v for k, v in classes.batch(96).items()}

    def loss(scores: Tensor, b: dict[str, Tensor]) -> Tensor:
        return classes.HOW[name](weights, scores, {**b, "ids": b["input_ids"], "labels": b["targets"]})

    module = GPT(vocabulary=96, width=16, layers=2, heads=4, context=classes.SEQUENCE)
    return Compiled(module, ALONE.replace(precision="fp32"), batch, loss)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [
    pytest.param(n, marks=() if n in ("plain", "dims, all") else pytest.mark.full) for n in classes.HOW
])  # fmt: skip
def test_no_rank_of_a_gpt_has_all_scores(name: str) -> None:
    one = gpt(name)
    for kind, tp in (("1d", 2), ("1d-sp", 3)):
        assert list(scores_of(one.under(tensor_parallel(one.plan, tp, kind)).general, 96, 5, tp)) == []
    assert list(scores_of(one.general, 96, 5, 1)) != []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
@pytest.mark.parametrize(("count", "tp"), SIZES)
@pytest.mark.parametrize("name", classes.HOW)
def test_every_loss(name: str, count: int, tp: int, kind: str) -> None:
    every_way(name, count, tp, kind)


@pytest.mark.parametrize("name", ["plain", "nll"])
def test_a_target_that_is_no_class_is_an_error(name: str) -> None:
    """As on one device, and whichever rank would have it; nobody's class is not nothing to learn."""
    one, batches, truth = subject(name, 31)
    labels = batches[0]["labels"].clone()
    labels[0, 0] = 31
    with pytest.raises(Exception, match="out of bounds"):
        check(one.under(tensor_parallel(ALONE, 2, "1d")), [{**batches[0], "labels": labels}], truth, PLAIN)


class Grouped(nn.Module):
    """Scores that are seen in six groups of two, behind four heads of queries of which two share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.q, self.k, self.v = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.back, self.out, self.scale = nn.Linear(16, 16), nn.Linear(16, 12), nn.Parameter(torch.rand(6, 1) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(ids)
        q, k, v = (one(h).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.back(mixed.transpose(1, 2).flatten(2))
        scores = (self.out(h).unflatten(-1, (6, 2)) * self.scale).flatten(2)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
def test_groups_of_classes_that_two_axes_cut_unevenly(kind: Kind) -> None:
    """Over 2 x 2 ranks six groups are two, two, one and one; twelve classes would be three each."""
    torch.manual_seed(0)
    module = Grouped().double()
    batches = [{name: torch.randint(0, 12, (rows, 5)) for name in ("ids", "labels")} for rows in (5, 2)]
    one = Compiled(module, tensor_parallel(ALONE, 4, kind), batches[0])
    assert set(one.general.tensor) == {"tp//2", "tp%2"}
    check(one, batches, oracle(module, None, batches, PLAIN, 1), PLAIN)
