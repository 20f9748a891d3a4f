"""The volumes of the recipes of tensor parallelism: as derived by hand, as predicted from traces, and as published."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.instruction import Op
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.traffic import TrafficMoment, step_traffic
from shardwise.measure.unit_traffic import Traffic
from shardwise.models import GPT, Llama
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.trace import Trace
from shardwise.units.tracing import trace

SGD = OptimizerChoice("sgd", lr=0.0)
SHAPES = [
    ("1d", 2, 1),
    ("1d", 3, 1),
    ("1d-sp", 4, 1),
    ("2d", 2, 1),
    ("2d", 3, 1),
    ("2.5d", 2, 2),
    ("2.5d", 3, 2),
    ("3d", 2, 1),
    ("3d", 3, 1),
]
"""(recipe, q, d); 1d and 1d-sp have q ranks."""
FP32 = 4


def axes_of(kind: str, q: int, d: int) -> dict[str, int]:
    several = {
        "2d": {"tp_i": q, "tp_j": q},
        "2.5d": {"tp_d": d, "tp_i": q, "tp_j": q},
        "3d": {"tp_i": q, "tp_j": q, "tp_l": q},
    }
    return several.get(kind, {"tp": q})


def product(kind: str, q: int, d: int, x: int, w: int, y: int) -> Fraction:
    """Elements that a rank sends because of Y = XW, forward and backward; x, w and y are the elements of the wholes.

    A ring sends (q-1)/q of what it gathers or scatters.  By 1d of two products the first sums the gradient of its X,
    the second its Y: of each half is counted here, so that both together come out where the Y of the one is as large as
    the X of the other.  By the others everything that is gathered forward is scattered backward, and the other way
    round.
    """
    ring = Fraction(q - 1, q)
    if kind in ("1d", "1d-sp"):
        raise AssertionError("of two products: pair()")
    gathered = {"2d": Fraction(x + w, q), "2.5d": Fraction(x, d * q) + Fraction(w, q), "3d": Fraction(x + w + y, q * q)}
    return 2 * ring * gathered[kind]


def pair(kind: str, q: int, d: int, rows: int, width: int, hidden: int) -> Fraction:
    """Of two products after each other, [rows, width] -> [rows, hidden] -> [rows, width]."""
    if kind in ("1d", "1d-sp"):  # an all-reduce of what goes in, backward, and of what comes out, forward
        return 4 * Fraction(q - 1, q) * rows * width
    outer, inner, weight = rows * width, rows * hidden, width * hidden
    return product(kind, q, d, outer, weight, inner) + product(kind, q, d, inner, weight, outer)


# ---- products --------------------------------------------------------------------------------------------------------


class Products(nn.Module):
    """Blocks of two products each."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        sizes = ((width, hidden), (hidden, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(*itertools.chain.from_iterable((nn.Linear(*size, bias=False), nn.ReLU()) for size in sizes))
            for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


@functools.cache
def products(kind: str, q: int, d: int, rows: int, width: int, hidden: int) -> Trace:
    batch = {name: torch.zeros(rows, width) for name in ("x", "y")}
    return trace(Products(width, hidden), batch, tensor=TensorParallelSpec(axes_of(kind, q, d), kind))


def planned(kind: str, q: int, d: int, recompute: Literal["none", "full"] = "none") -> Plan:
    mesh = Mesh((Axis("dp", 1), *(Axis(name, size) for name, size in axes_of(kind, q, d).items())))
    return Plan.of(mesh, tensor=kind, recompute=recompute)


def elements(several: Sequence[Traffic], plan: Plan) -> Fraction:
    """Sent by a rank, in rings."""

    def ring(one: Traffic) -> Fraction:
        parts = plan.mesh.axis_size(one.axes)
        return Fraction((2 if one.kind == "all_reduce" else 1) * one.nbytes * (parts - 1), parts * FP32)

    return sum(map(ring, several), Fraction())


def of_unit(found: Trace, plan: Plan, rows: int, name: str) -> Fraction:
    """What the last rank sends because of a unit, in a step of one microbatch."""
    index = next(u.index for u in found.units if u.name == name)
    moments: list[TrafficMoment] = step_traffic([found], plan, SGD, rows=rows, rank=plan.mesh.size - 1)
    return sum((elements(one.traffic, plan) for one in moments if one.instruction.unit == index), Fraction())


@pytest.mark.parametrize(("kind", "q", "d"), SHAPES)
def test_two_products_take_what_was_derived(kind: str, q: int, d: int) -> None:
    rows, width, hidden = 36, 36, 72
    found, plan = products(kind, q, d, rows, width, hidden), planned(kind, q, d)
    assert of_unit(found, plan, rows, "blocks.1") == pair(kind, q, d, rows, width, hidden)


def published() -> Iterator[tuple[str, str]]:
    lines = (Path(__file__).parent / "published" / "tensor_parallel.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        yield row["kind"], row["bandwidth"]


def evaluated(formula: str, **sizes: int) -> Fraction:
    """A formula whose products have no sign: ``3(q-1)(d+1)/(dq)``."""
    python = re.sub(r"(?<=[\dPdq)])(?=[Pdq(])", "*", formula.replace("^", "**"))
    numbers = re.sub(r"(?<!\*\*)\b(\d+)\b", r"Fraction(\1)", python)
    value: Fraction = eval(numbers, {"Fraction": Fraction, **sizes})  # a line of our own table
    return value


@pytest.mark.parametrize(("q", "d"), [(2, 2), (3, 2)])
def test_published_bandwidths(q: int, d: int) -> None:
    """Of Y = XW with as many elements n in X, W and Y.

    1D and 3D count n as one, and what is gathered forward is kept for backward.  2D and 2.5D count as one the n/q that
    a row or a column of ranks has together, and each of three passes (Y, dX, dW) broadcasts or reduces two operands
    anew.  Ours keeps for backward what it has gathered forward, so that two of three remain; recomputation gathers it
    once more, and takes the published volume to the element.
    """
    n, ratios = 36, dict[str, tuple[Fraction, Fraction]]()
    for kind, formula in published():
        ranks = {"1d": q * q}.get(kind, q)
        plans = [planned(kind, ranks, d, recompute) for recompute in ("none", "full")]  # type: ignore[arg-type]
        once, again = (of_unit(products(kind, ranks, d, n, n, n), plan, n, "blocks.1") / 2 / (n * n) for plan in plans)
        paper, unit = evaluated(formula, P=ranks, q=q, d=d), Fraction(1, q) if kind in ("2d", "2.5d") else Fraction(1)
        ratios[kind] = once / (paper * unit), again / (paper * unit)
    kept = {kind: one for kind, (one, _) in ratios.items()}
    assert kept == {"1d": 1, "2d": Fraction(2, 3), "2.5d": Fraction(2, 3), "3d": 1}
    assert ratios["2d"][1] == ratios["2.5d"][1] == 1


# ---- layers ----------------------------------------------------------------------------------------------------------

B, S, H = 36, 12, 144  # such that no shard of a layer is padded


@functools.cache
def model(name: str, kind: str, q: int, d: int) -> Trace:
    sizes: dict[str, int] = {"vocabulary": 72, "width": H, "layers": 2, "heads": 12, "context": S}
    module = GPT(**sizes) if name == "gpt" else Llama(**sizes, kv_heads=12, hidden=3 * H)
    batch = {name: torch.zeros(B, S, dtype=torch.int64) for name in ("input_ids", "labels")}
    return trace(module, batch, tensor=TensorParallelSpec(axes_of(kind, q, d), kind))


PRODUCTS = {"gpt": (7, 12, 9), "llama": (1 + 1 + 1 + 3, 4 + 3 * 3, 4 + 3 + 3 + 1)}
"""Of a layer, together: bsh in the X, of which q, k and v share one, and gate and up; h² in the W; bsh in the Y."""


def layers() -> Iterator[Any]:
    """Of each recipe one model on two ranks along a side, the other on three; the rest with ``full``."""
    for name, (kind, q, d) in itertools.product(PRODUCTS, SHAPES):
        chosen = kind == "1d-sp" or q == (2 if name == "gpt" else 3)
        yield pytest.param(name, kind, q, d, marks=() if chosen else pytest.mark.full)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "kind", "q", "d"), layers())
def test_a_layer_takes_what_was_derived(name: str, kind: str, q: int, d: int) -> None:
    """The products, and of two norms over a width in pieces a sum for each row and statistic, forward and backward."""
    found, plan = model(name, kind, q, d), planned(kind, q, d)
    x, w, y = (n * size for n, size in zip(PRODUCTS[name], (B * S * H, H * H, B * S * H), strict=True))
    if kind in ("1d", "1d-sp"):
        expected = 8 * Fraction(q - 1, q) * B * S * H
    else:
        rows = Fraction(B * S, {"2d": q, "2.5d": d * q, "3d": q * q}[kind])
        statistics = 2 * (2 if name == "gpt" else 1)
        expected = product(kind, q, d, x, w, y) + 2 * statistics * 2 * Fraction(q - 1, q) * rows
    assert of_unit(found, plan, B, "blocks.1") == expected


@pytest.mark.parametrize(("name", "kind", "t"), [
    pytest.param(name, kind, t, marks=() if kind == "1d-sp" or t == (2 if name == "gpt" else 3) else pytest.mark.full)
    for name in PRODUCTS for kind, t, _ in SHAPES if kind in ("1d", "1d-sp")
])  # fmt: skip
def test_the_ends_of_a_model_take_what_was_derived(name: str, kind: str, t: int) -> None:
    """Embedding and output layer, whose tables are cut by rows, and the cross-entropy: the maximum, a sum and the
    target's score of each row.

    A sum may stand where it is first read: that of Llama's embedding is in the first block.
    """
    found, plan = model(name, kind, t, 1), planned(kind, t, 1)
    sent: dict[tuple[str, Op], Fraction] = {}
    for one in step_traffic([found], plan, SGD, rows=B, rank=t - 1):
        if one.instruction.unit >= 0:
            key = found.units[one.instruction.unit].name, one.instruction.op
            sent[key] = sent.get(key, Fraction()) + elements(one.traffic, plan)
    stream, scores = Fraction(B * S * H * (t - 1), t), 3 * B * S * (t - 1)
    half = kind == "1d-sp"
    embedding = stream if half else 2 * stream, stream if half else 0
    output = (stream if half else 0) + scores, stream if half else 2 * stream
    for way, op in enumerate((Op.FORWARD, Op.BACKWARD)):
        blocks = sum(unit.name.startswith("blocks.") for unit in found.units)
        assert sum(n for (_, at), n in sent.items() if at is op) == blocks * 4 * stream + embedding[way] + output[way]
        if name == "gpt":
            assert (sent["head", op], sent["tail", op]) == (embedding[way], output[way])


@pytest.mark.parametrize(("kind", "q", "d"), [shape for shape in SHAPES if shape[1] != 2])
def test_gradients_of_what_several_ranks_have_are_summed_once_a_step(kind: str, q: int, d: int) -> None:
    """Of weights over the d layers of 2.5d, and of norms and biases over all ranks that use them on their rows."""
    found, plan = model("llama", kind, q, d), planned(kind, q, d)
    block = next(u.index for u in found.units if u.name == "blocks.1")
    sums = [
        one for m in (1, 3) for one in step_traffic([found] * m, plan, SGD, rows=B, rank=0)
        if one.instruction.op is Op.REDUCE
        and one.instruction.bucket >= 0
        and block in found.buckets[one.instruction.bucket].units
    ]  # fmt: skip
    weights, norms = PRODUCTS["llama"][1] * H * H, 2 * H
    expected = {
        "1d": [], "1d-sp": [(("tp",), norms)], "2d": [(("tp_i",), norms // q)],
        "2.5d": [(("tp_d", "tp_i"), norms // q), (("tp_d",), weights // q**2)], "3d": [(("tp_i", "tp_l"), norms // q)],
    }[kind]  # fmt: skip
    once = Counter(Traffic("all_reduce", axes, FP32 * n) for axes, n in expected)
    assert Counter(t for one in sums for t in one.traffic) == once + once  # of a step of one microbatch, and of three
