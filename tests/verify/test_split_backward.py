"""BACKWARD in two parts: the same gradients as in one, wherever the second part comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import CASES
from shardwise.core.instruction import Op
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime import computing, interpreter
from shardwise.units.trace import Trace
from shardwise.verify.verify import OPTIMIZER, VerifiedStep, run_steps, run_threads
from split import ORDERS, split

TRACES: dict[str, Any] = {}
NAMES = ["gpt", "conv", "mixtral", "gpt2", "llama", "mlp"]
TIED = ("gpt", "gpt2", "mlp")


def steps(name: str, plan: Plan, order: str | None, ranks: int = 1, zero: int = 0) -> list[VerifiedStep]:
    """Two steps of a model, traced once."""
    if name not in TRACES:
        torch.manual_seed(3)
        module, make, loss = CASES[name]()
        TRACES[name] = module.train(), [make(7) for _ in range(2)], loss, {}
    module, batches, loss, traces = TRACES[name]
    known: dict[tuple[tuple[str, ...], int | None], Trace] = traces.setdefault(plan.numeric.precision, {})
    compiled = Compiled(module, data_parallel(plan, ranks, zero), batches[0], loss, _traces=known)

    def run() -> list[VerifiedStep]:
        scale = ScaleChoice.fixed(1024.0) if plan.numeric.precision == "fp16" else None  # no step overflows
        found = run_threads(compiled, lambda comm: run_steps(compiled, comm, batches, OPTIMIZER, 1.0, 0, scale))[0]
        (program,) = compiled.programs(compiled.general, plan.microbatches)
        ops = {one.op for one in program.instructions}
        assert (Op.BACKWARD_WEIGHT in ops) == (order is not None)
        return found

    if order is None:
        return run()
    with split(order):
        return run()


def difference(mine: list[VerifiedStep], right: list[VerifiedStep]) -> float:
    """The largest difference of gradients, each against its tensor's size; 0 if all bits agree, inf if one lacks."""
    worst = 0.0
    for a, b in zip(mine, right, strict=True):
        assert a.gradients.keys() == b.gradients.keys() and a.gradients
        pairs = [(g, b.gradients[n]) for n, g in a.gradients.items()]
        pairs += [(g, b.buffers[n]) for n, g in a.buffers.items()]
        for x, y in pairs:
            if not torch.equal(x, y):
                size = max(float(y.double().norm()), 1e-6 * max(float(g.double().norm()) for g in b.gradients.values()))
                off = float((x.double() - y.double()).norm()) / size
                worst = max(worst, off if off == off else float("inf"))
    return worst


CASES_OF_PLANS = [
    (1, "none", 1, 0), (3, "none", 1, 0), (3, "full", 1, 0), (3, "selective", 1, 0), (1, "selective", 1, 0),
    (3, "none", 2, 3), (3, "full", 2, 3), (3, "selective", 2, 3), (3, "none", 2, 2), (2, "selective", 3, 1),
]  # fmt: skip


def cases() -> Iterator[Any]:
    """All plans with all models; without ``full`` every plan with two of them."""
    for (i, name), (j, plan) in itertools.product(enumerate(NAMES), enumerate(CASES_OF_PLANS)):
        chosen = (i + j) % (len(NAMES) // 2) == 0
        yield pytest.param(name, *plan, marks=() if chosen else pytest.mark.full)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "microbatches", "recompute", "ranks", "zero"), list(cases()))
def test_the_parts_are_the_whole(name: str, microbatches: int, recompute: Any, ranks: int, zero: int) -> None:
    """Bit for bit where no sum changes its order, else to rounding."""
    plan = Plan.of(microbatches=microbatches, recompute=recompute, precision="fp64")
    truth = steps(name, plan, None, ranks, zero)
    for order in ORDERS:
        found = difference(steps(name, plan, order, ranks, zero), truth)
        assert found <= 1e-12, order
        if order == "at once" and name not in TIED:  # what both parts add to one weight takes turns
            assert found == 0


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt", "conv", "mixtral", "gpt2"])
def test_in_every_precision(name: str, precision: Any) -> None:
    """Each weight's gradients are added in the order of microbatches: the bits are the same."""
    plan = Plan.of(microbatches=2, precision=precision, recompute="selective")
    truth = steps(name, plan, None, 2, 3)
    if name not in TIED or precision == "fp32":
        assert difference(steps(name, plan, "at once", 2, 3), truth) <= (1e-6 if name in TIED else 0)
    if name not in TIED:
        assert difference(steps(name, plan, "at the end", 2, 1), steps(name, plan, None, 2, 1)) == 0


@pytest.mark.parametrize("reduced", ["microbatch", "step"])
@pytest.mark.parametrize("summed", ["auto", "bf16"])
def test_slots_that_both_parts_write(reduced: Any, summed: Any) -> None:
    plan = Plan.of(microbatches=3, precision="fp32", reduced=reduced, reduce=summed)
    truth = steps("conv", plan, None, 2, 2)
    assert difference(steps("conv", plan, "at once", 2, 2), truth) <= (0 if summed == "auto" else 1e-2)


# ---- negative controls -----------------------------------------------------------------------------------------------


def test_a_parameter_that_is_kept_for_the_second_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is filled with NaN, or holds another bucket, by the time that it is multiplied."""

    class Square(nn.Module):
        """A product of two parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])
            self.other = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer, other in zip(self.layers, self.other, strict=True):
                x = torch.tanh(x @ layer(other))
            return x.square().mean()

    torch.manual_seed(0)
    TRACES["square"] = Square(), [{"x": torch.randn(5, 6)}] * 2, None, {}
    plan = Plan.of(microbatches=2, precision="fp64", prefetch=0)
    truth = steps("square", plan, None, 2, 3)
    assert difference(steps("square", plan, "at the end", 2, 3), truth) <= 1e-12
    monkeypatch.setattr(interpreter.Gathered, "own", lambda self, value, update=False: value)
    assert not difference(steps("square", plan, "at the end", 2, 3), truth) <= 1e-3


def test_a_lost_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.of(microbatches=1, precision="fp64")
    truth = steps("gpt", plan, None)
    original = computing.Computing.backward_weight

    def careless(self: Any, one: Any) -> None:
        self.deferred[one.unit, one.microbatch].popleft()
        original(self, one)

    monkeypatch.setattr(
        computing.Computing,
        "backward_weight",
        lambda self, one: careless(self, one) if self.deferred[one.unit, one.microbatch] else None,
    )
    assert difference(steps("gpt", plan, "at once"), truth) > 1e-3


@pytest.mark.slow
def test_what_is_not_a_product_stays_with_autograd() -> None:
    steps("mixtral", Plan.of(precision="fp64"), None)
    units = next(iter(TRACES["mixtral"][3]["fp64"].values())).units
    block = next(u for u in units if "experts" in " ".join(u.parameters))
    assert {n.partition("layers.0.")[2] for n in block.products} == {
        *(f"self_attn.{k}_proj.weight" for k in "qkvo"), "mlp.gate.weight", "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }  # fmt: skip
    assert all("norm" in n for n in block.inside)
    assert not set(block.inside) & set(block.products)
