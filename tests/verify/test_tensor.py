"""Tensor parallelism equals one device: of every model, and together with data parallelism, ZeRO, pipelines and
recomputation.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from communicating import communicated
from covering import covering
from models import deep
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower.compiled import Compiled
from shardwise.measure.unit_cost import cost
from shardwise.models import GPT, Llama
from shardwise.ops import collectives
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import sides, tensor_parallel
from shardwise.shard.recipe.weights import TABLE
from shardwise.verify.oracle import Oracle, OracleStep, plain_optimizer
from shardwise.verify.verify import OPTIMIZER, TOLERANCE, VerifiedStep, compare, run_steps, run_threads

SIZES = {"1d": (2, 3, 4, 8), "1d-sp": (2, 3, 4, 8), "2d": (4, 9), "2.5d": (8,), "3d": (8,)}
KINDS = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]
ROWS = (7, 5)
WORDS = 67
"""Enough for a table to be cut among 8 ranks (`shard/recipe/weights.py`, TABLE), and not a multiple."""
CLIP = 1.0
ALONE = Plan.of(precision="fp64", mesh=Mesh(()))
PLAIN = OptimizerChoice("sgd", lr=0.1)
"""For models with parameters whose gradient is zero but for rounding, which Adam would make as large as any."""

Case = tuple[str, tuple[str, int], int, int, int, str, int]


def check(
    compiled: Compiled, batches: list[dict[str, Tensor]], truth: list[OracleStep], choice: OptimizerChoice
) -> None:
    ours: list[list[VerifiedStep]] = run_threads(
        compiled, lambda comm: run_steps(compiled, comm, batches, choice, CLIP, 0, only=0)
    )
    found = compare(ours[0], truth)
    assert found.passes(TOLERANCE), (found.largest, found.worst(3))
    first, right = without_gradients(ours[0]), without_gradients(truth)
    for rank in map(without_gradients, ours[1:]):  # only the pipeline of the first rank has some
        if numbers(rank) != numbers(first) or not equal(rank[-1], first[-1]):
            found = compare(rank, right)
            assert found.passes(TOLERANCE), (found.largest, found.worst(3))


def without_gradients(steps: Any) -> Any:
    return [replace(one, gradients={}) for one in steps]


def numbers(steps: list[VerifiedStep]) -> list[tuple[float, float]]:
    return [(one.loss, one.grad_norm) for one in steps]


def equal(a: VerifiedStep, b: VerifiedStep) -> bool:
    """Whether two ranks have the same bits after a step."""
    pairs = [(a.gradients, b.gradients), (a.parameters, b.parameters), (a.buffers, b.buffers)]
    named = all(one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one) for one, other in pairs)
    return named and (a.loss, a.grad_norm) == (b.loss, b.grad_norm)


def oracle(
    module: nn.Module, loss: Any, batches: list[dict[str, Tensor]], choice: OptimizerChoice, m: int
) -> list[OracleStep]:
    one = Oracle(
        module, loss, plain_optimizer(choice), microbatches=m, seed=0, clip_norm=CLIP, group_of=choice.group_of
    )
    return [one.step(batch, choice.learning_rate(i)) for i, batch in enumerate(batches)]


# ---- every model -----------------------------------------------------------------------------------------------------


@functools.cache
def model(name: str) -> tuple[Compiled, list[dict[str, Tensor]], list[OracleStep]]:
    """A model on one device, whose capture serves all plans."""
    one = zoo.make(name, WORDS)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in one.batch.items()}
    batches = [wide, {k: v[:3] for k, v in wide.items()}]
    module = one.module.double().train()
    return Compiled(module, ALONE, batches[0], one.loss), batches, oracle(module, one.loss, batches, PLAIN, 1)


@pytest.mark.quick(1)
@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "kind", "tp"), [
    (name, *KINDS[(i + shift) % len(KINDS)]) for i, name in enumerate(zoo.NAMES) for shift in (0, 5)
])  # fmt: skip
def test_a_model(name: str, kind: str, tp: int) -> None:
    every_size(name, kind, tp)


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind", "tp"), [(name, *one) for name in zoo.NAMES for one in KINDS])
def test_every_model(name: str, kind: str, tp: int) -> None:
    every_size(name, kind, tp)


def every_size(name: str, kind: str, tp: int) -> None:
    one, batches, truth = model(name)
    compiled = one.under(tensor_parallel(ALONE, tp, kind))
    whole = {p.name: p.shape for p in compiled.general.parameters if len(p.shape) > 1 and not p.axes}
    assert not {parameter: shape for parameter, shape in whole.items() if not may_be_whole(parameter, shape, kind, tp)}
    check(compiled, batches, truth, PLAIN)


def may_be_whole(parameter: str, shape: tuple[int, ...], kind: str, tp: int) -> bool:
    """Whether a weight of the zoo may be on every rank: all others are in pieces, over any number of ranks."""
    along = max(sides(kind, tp).values())
    return (
        shape[0] < along  # fewer outputs than ranks
        or (kind in ("1d", "1d-sp") and parameter.endswith(POSITIONS))
        or (tp == 3 and parameter.endswith(("k_proj.weight", "v_proj.weight")))  # two heads
        or parameter.startswith("lstm.")
    )


POSITIONS = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight", "token_type_embeddings.weight")
"""Tables that are looked up by what does not follow from the batch."""


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "tp"), KINDS)
@pytest.mark.parametrize(("vocabulary", "width", "heads", "context"), [(16, 16, 8, 16), (64, 18, 9, 4), (23, 7, 7, 5)])
def test_sizes_that_divide_or_coincide_or_are_prime(
    kind: Any, tp: int, vocabulary: int, width: int, heads: int, context: int
) -> None:
    one, batches, truth = sized(vocabulary, width, heads, context)
    check(one.under(tensor_parallel(ALONE, tp, kind)), batches, truth, PLAIN)


@functools.cache
def sized(
    vocabulary: int, width: int, heads: int, context: int
) -> tuple[Compiled, list[dict[str, Tensor]], list[OracleStep]]:
    torch.manual_seed(1)
    module = GPT(vocabulary=vocabulary, width=width, layers=1, heads=heads, context=context, dropout=0.1).double()
    batches = [
        {name: torch.randint(0, vocabulary, (rows, context)) for name in ("input_ids", "labels")} for rows in (16, 5)
    ]
    return Compiled(module, ALONE, batches[0]), batches, oracle(module, None, batches, PLAIN, 1)


# ---- together with all else ------------------------------------------------------------------------------------------


DEEP = ("gpt", "llama", "gpt2")
EVERY: list[Case] = [
    case
    for case in itertools.product(DEEP, KINDS, (1, 2), (0, 1, 2, 3), (1, 2), CHOICES["recompute"], (1, 3))
    if (case[2] > 1 or case[3] == 0) and case[1][1] * case[2] * case[4] <= 16
]


@functools.cache
def subject(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(len(name))
    module, make = deep(name, 3)
    return module.train(), [make(rows) for rows in ROWS]


@functools.cache
def truth_of(name: str, microbatches: int) -> list[OracleStep]:
    module, batches = subject(name)
    return oracle(module, None, batches, OPTIMIZER, microbatches)


@functools.cache
def alone(name: str) -> Compiled:
    """Its capture serves all plans."""
    module, batches = subject(name)
    return Compiled(module, ALONE, batches[0])


@functools.cache
def captured(name: str, kind: str, tp: int) -> Compiled:
    """A trace serves all plans with these tensor axes."""
    return alone(name).under(tensor_parallel(ALONE, tp, kind))


def together(case: Case) -> None:
    name, (kind, tp), dp, zero, pp, recompute, m = case
    base: Any = Plan.of(microbatches=m, recompute=recompute, precision="fp64")
    plan = tensor_parallel(pipeline(data_parallel(base, dp, zero), pp, "zbv" if pp > 1 and m > 1 else "1f1b"), tp, kind)
    check(captured(name, kind, tp).under(plan), subject(name)[1], truth_of(name, m), OPTIMIZER)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("case", list(covering(EVERY)), ids=lambda case: "-".join(map(str, case)))
def test_together(case: Case) -> None:
    """All pairs of values."""
    together(case)


MANY: list[Case] = [
    ("gpt", ("2d", 9), 2, 3, 1, "none", 3),
    ("llama", ("2d", 9), 1, 0, 2, "full", 3),
    ("gpt2", ("2d", 9), 2, 1, 1, "selective", 1),
    ("llama", ("2d", 9), 2, 2, 2, "none", 3),
    ("gpt", ("2.5d", 8), 2, 3, 2, "full", 1),
    ("llama", ("2.5d", 8), 2, 1, 2, "selective", 3),
    ("gpt", ("3d", 8), 2, 2, 2, "selective", 3),
    ("gpt2", ("3d", 8), 2, 3, 2, "full", 1),
    ("llama", ("1d", 8), 2, 3, 2, "none", 3),
    ("gpt", ("1d-sp", 8), 2, 2, 2, "full", 3),
]


@pytest.mark.full
@pytest.mark.parametrize("case", MANY, ids=lambda case: "-".join(map(str, case)))
def test_more_than_16_ranks(case: Case) -> None:
    """What the products above leave out: 9 ranks or 8 beside data parallelism, ZeRO and a pipeline."""
    together(case)


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join(map(str, case)))
def test_every_combination(case: Case) -> None:
    together(case)


# ---- what is sharded -------------------------------------------------------------------------------------------------


@functools.cache
def divisible(name: str) -> Compiled:
    """A transformer all of whose sizes can be shared out among any number of ranks here."""
    sizes: dict[str, Any] = {"vocabulary": 72, "width": 144, "layers": 2, "heads": 72, "context": 24}
    module = GPT(**sizes) if name == "gpt" else Llama(**sizes, kv_heads=72, hidden=432)
    batch = {field: torch.zeros(2, 24, dtype=torch.int64) for field in ("input_ids", "labels")}
    return Compiled(module.double(), ALONE, batch)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "kind", "tp"), [
    pytest.param(name, *one, marks=() if (name, *one) in {("llama", "1d", 8), ("gpt", "2d", 9)} else pytest.mark.full)
    for name in ("gpt", "llama") for one in KINDS
])  # fmt: skip
def test_weights_and_products_are_shared_out(name: str, kind: Any, tp: int) -> None:
    """Each rank has 1/tp of every weight, and of the FLOPs of all products, forward and backward.

    But for the layers of 2.5d, of which each has all weights, and for a table of positions of less than 8 rows for each
    rank, and in 2d and 3d: the ranks along ``tp`` and ``tp_l`` have the same of it.
    """
    one, found = divisible(name).general, divisible(name).under(tensor_parallel(ALONE, tp, kind)).general
    mesh, parts = Mesh.spanned(found.tensor), tp // sides(kind, tp).get("tp_d", 1)
    for parameter in (p for p in found.parameters if len(p.shape) > 1):
        copies = (
            mesh.axis_size([axis for axis in mesh.names if axis in ("tp", "tp_l")])
            if parameter.name == "wpe.weight" and not (kind in ("1d", "1d-sp") and 24 // tp >= TABLE)
            else 1
        )
        for rank in range(tp):
            assert math.prod(parameter.local_shape(mesh, rank)) * parts == parameter.numel * copies, parameter.name
    rows = 72
    mine, whole = ([(unit.forward_flops, unit.backward_flops) for unit in cost(trace, rows)] for trace in (found, one))
    assert [(a * tp, b * tp) for a, b in mine] == whole and not found.notes_without_rule(rows)


@pytest.mark.slow
def test_megatrons_plan_comes_out_for_a_transformer() -> None:
    one = captured("gpt", "1d", 2).general
    found = {p.name.partition(".")[2]: str(p.placed) for b in one.buckets for p in b.parameters if ".1." in p.name}
    assert found["1.attention.qkv.weight"].startswith("[3*"), found
    assert (
        found["1.attention.proj.weight"].endswith("2:tp*16]")
        or ":tp" in found["1.attention.proj.weight"].partition(",")[2]
    )
    assert ":tp" in found["1.mlp.up.weight"].partition(",")[0]
    assert ":tp" in found["1.mlp.proj.weight"].partition(",")[2]
    assert ":tp" not in found["1.norm1.weight"]
    kinds = {kind for (kind, _, path) in communicated(one) if path.startswith("blocks.1")}
    assert kinds == {"all_reduce", "all_reduce in backward"}
    assert not one.replicated


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["opt", "bloom", "gpt2"])
def test_heads_stay_in_pieces(name: str) -> None:
    """Also where they are one dim with the rows of the batch (Bloom): a layer communicates as Megatron's does."""
    one = model(name)[0].under(tensor_parallel(ALONE, 2, "1d")).general
    kinds = [
        kind for (kind, _, path), n in communicated(one).items() for _ in range(n) if ".1" in path and kind != "slice"
    ]
    assert sorted(kinds) == ["all_reduce"] * 2 + ["all_reduce in backward"] * 2
    assert not one.replicated


def test_a_forgotten_reduction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "replicate", lambda env, x, axes: x)
    module, batches = subject("gpt")
    compiled = Compiled(module, tensor_parallel(ALONE, 2, "1d"), batches[0])
    with pytest.raises(AssertionError):
        check(compiled, batches, truth_of("gpt", 1), OPTIMIZER)


def test_a_model_that_is_not_captured_is_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.sum() if float(y.sum()) > 0 and locals() else y.square().sum()

    with pytest.raises(ConfigError, match="tp: the model could not be captured"):
        Compiled(Branches(), tensor_parallel(Plan.of(mesh=Mesh(())), 2, "1d"), {"x": torch.zeros(4, 4)})


@pytest.mark.parametrize(
    ("kind", "size", "legal"), [("2d", 6, "a square"), ("2.5d", 9, "d·q²"), ("3d", 4, "a cube"), ("1d", 0, "1")]
)
def test_sizes_that_make_no_mesh_are_refused(kind: Any, size: int, legal: str) -> None:
    with pytest.raises(ConfigError, match=legal):
        tensor_parallel(Plan.of(), size, kind)


@pytest.mark.slow
def test_an_axis_of_another_recipe_is_refused() -> None:
    module, batches = subject("gpt")
    with pytest.raises(ConfigError, match='"tp_i" is not one of tensor "1d"; legal: tp'):
        Compiled(module, Plan.of(Mesh.of(tp_i=2)), batches[0])
