"""Weight gradients of matrices in bf16 and fp16 that are summed in fp32 without being rounded, where a device has the
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import OptimizerChoice, Plan
from shardwise.backend import Backend
from shardwise.lower.compiled import Compiled
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.measure.unit_memory import profile
from shardwise.ops.weight_gradients import GradientFactors, Kernels, accumulate
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.engine import Engine
from shardwise.wide import WideProduct, multiplies_wide

NARROW = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def reference(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    """What the kernels of a GPU do, by those of a CPU."""
    product = left.float() @ right.float()
    goal.add_(product) if add else goal.copy_(product)


def rounding(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    product = left @ right
    goal.add_(product) if add else goal.copy_(product)


def missing(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    raise NotImplementedError("Could not run 'aten::mm.dtype_out'")


def overwriting(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    reference(goal, left, right, False)


def only_matrices(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    if goal.dim() > 2:
        raise RuntimeError("no batches")
    reference(goal, left, right, add)


PLAIN, WIDE = Kernels("cpu"), Kernels("cpu", reference)

# kind, dims, shape of the weight, and (dY, X, rest)
CASES: dict[str,
tuple[str, tuple[int, ...] | None, tuple[int, ...], Callable[[], tuple[Tensor, Tensor, tuple[Any, ...]]]]] = {
    "linear": ("linear", None, (5, 4), lambda: (torch.randn(7, 3, 5), torch.randn(7, 3, 4), ())),
    "linear, transposed": ("linear", (1, 0), (4, 5), lambda: (torch.randn(7, 3, 5), torch.randn(7, 3, 4), ())),
    "right": ("right", None, (4, 5), lambda: (torch.randn(21, 5), torch.randn(21, 4), ())),
    "batched": ("batched", None, (3, 4, 5), lambda: (torch.randn(3, 9, 5), torch.randn(3, 9, 4), ())),
    "batched, transposed": ("batched", (0, 2, 1), (3, 5, 4), lambda: (torch.randn(3, 9, 5), torch.randn(3, 9, 4), ())),
    "batched, neither dim last": ("batched", (2, 0, 1), (4, 5, 3),
    lambda: (torch.randn(3, 9, 5), torch.randn(3, 9, 4), ())),
    "in turn": ("in turn", None, (3, 4, 5), lambda: (torch.randn(9, 5), torch.randn(9, 4), (torch.tensor([2, 2, 9]),))),
    "no rows": ("linear", None, (5, 4), lambda: (torch.randn(0, 5), torch.randn(0, 4), ())),
}  # fmt: skip


def gradient(case: str, dtype: torch.dtype, kernels: Kernels, microbatches: int = 8) -> tuple[Tensor, Tensor]:
    """The sum over microbatches in fp32, and the true one of the same rounded factors."""
    kind, dims, shape, make = CASES[case]
    torch.manual_seed(1)
    goal, truth = torch.full(shape, torch.nan), torch.zeros(shape, dtype=torch.float64)
    for m in range(microbatches):
        dy, x, rest = make()
        dy, x = dy.to(dtype), x.to(dtype)
        accumulate(goal, GradientFactors("w", dy, kind, x, dims, rest), m > 0, kernels)
        accumulate(truth, GradientFactors("w", dy.double(), kind, x.double(), dims, rest), True, PLAIN)
    return goal, truth


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_are_not_rounded(case: str, dtype: torch.dtype) -> None:
    wide, truth = gradient(case, dtype, WIDE)
    plain, _ = gradient(case, dtype, PLAIN)
    off, before = (float((found.double() - truth).norm() / (truth.norm() or 1)) for found in (wide, plain))
    if case == "batched, neither dim last":  # no kernel writes such a matrix: as without
        assert torch.equal(wide, plain)
    else:
        assert off <= 1e-6
    if case != "no rows":
        assert before > 1e-5  # which this test could not tell apart from the other otherwise


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_without_such_kernels_a_product_is_rounded_and_then_added(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, x, goal = torch.randn(21, 5).to(dtype), torch.randn(21, 4).to(dtype), torch.randn(5, 4)
    expected = goal + (dy.t() @ x)
    accumulate(goal, GradientFactors("w", dy, "linear", x, None, ()), True, PLAIN)
    assert torch.equal(goal, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_of_the_goal_s_own_dtype_go_straight_to_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dy, x = torch.randn(21, 5).to(dtype), torch.randn(21, 4).to(dtype)
    goals = [torch.zeros(5, 4, dtype=dtype) for _ in range(2)]
    for goal, kernels in zip(goals, (PLAIN, Kernels("cpu", missing)), strict=True):
        accumulate(goal, GradientFactors("w", dy, "linear", x, None, ()), True, kernels)
    assert torch.equal(*goals)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_device_is_asked_by_products_that_need_more_digits(dtype: torch.dtype) -> None:
    assert multiplies_wide(reference, CPU, dtype)
    for bad in (rounding, missing, overwriting, only_matrices):
        assert not multiplies_wide(bad, CPU, dtype)


def test_what_has_them() -> None:
    assert all(Backend("cpu").wide_product(dtype) is None for dtype in (*NARROW, torch.float32, None))
    assert Backend("cuda").wide_product(torch.float32) is None and Backend("cuda").wide_product(None) is None
    assert Backend.of_kind("cpu").type == "cpu" and Backend.of_kind("gpu").kind == "gpu"
    if not torch.accelerator.is_available():
        assert (
            Backend("cuda").wide_product(torch.bfloat16) is not None
            and Backend("xpu").wide_product(torch.bfloat16) is None
        )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 256, bias=False), nn.Linear(256, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def gradients_of(precision: str, product: WideProduct | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of one step of 16 microbatches."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(64, 32)}
    plan = Plan.of(microbatches=16, precision=precision)
    compiled = Compiled(Net(), plan, batch)
    asked: list[torch.dtype | None] = []

    def wide_product(self: Backend, dtype: torch.dtype | None) -> WideProduct | None:
        asked.append(dtype)
        return product

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "wide_product", wide_product)
        engine = Engine(compiled, AloneCommunicator(plan.mesh, 0, CPU), OptimizerChoice("sgd", lr=0.0))
        kept: list[dict[str, Tensor]] = []
        engine.interpreter.keep_gradients = kept
        for _ in range(3):
            engine.step(batch, 64)
    assert asked == [torch.bfloat16]  # once, not in each step
    return kept[-1]


def test_an_engine_sums_gradients_of_microbatches_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
        calls.append(add)
        reference(goal, left, right, add)

    plain = gradients_of("bf16", None, monkeypatch)
    wide = gradients_of("bf16", counted, monkeypatch)
    assert calls == 3 * ([False] * 2 + [True] * 30)  # both layers, and all microbatches but the first add
    for name, value in wide.items():
        apart = float((value - plain[name]).norm() / value.norm())
        assert 1e-5 < apart < 2e-2, name  # the same gradient, but for bf16's rounding


def test_memory_is_predicted_without_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's gradient comes last in backward, where its rounded copy is the most that is there."""
    found = {}
    compiled = Compiled(Net(), Plan.of(precision="bf16"), {"x": torch.randn(2, 32)})
    for product in (None, reference):
        monkeypatch.setattr(Backend, "wide_product", lambda self, dtype, product=product: product)
        found[product is None] = profile(compiled.general, 2, device="gpu", split=True).units
    copy = 32 * 256 * torch.bfloat16.itemsize
    before, after = (sum(unit.none.weights for unit in found[key]) for key in (True, False))
    assert before >= copy and before - after == copy
    assert sum(unit.none.backward for unit in found[True]) > sum(unit.none.backward for unit in found[False])


def test_the_gradient_of_an_embedding_is_predicted_as_a_gpu_computes_it() -> None:
    """By way of a whole gradient in the dtype that computes."""
    goal, dy = torch.empty(1000, 8, device="meta"), torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    factors = GradientFactors("w", dy, "embedding", torch.zeros(3, dtype=torch.int64, device="meta"), None, (-1,))
    for kernels, expected in ((Kernels("gpu"), 1000 * 8 * 2), (Kernels("cpu"), 3 * 8 * 4)):
        with StorageTracker("meta") as tracker:
            accumulate(goal, factors, True, kernels)
        assert tracker.peak == expected
