"""What a model computes in, whatever precision it comes in, and what fp16 computes in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.core.numeric_options import LOW_PRECISIONS
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.verify.oracle import Oracle
from shardwise.verify.verify import VerifiedStep, run_steps
from total_error import total_error


class Net(nn.Module):
    """Parameters, a BatchNorm, and a buffer that is multiplied by one of them."""

    table: Tensor

    def __init__(self, branch: bool = False, running: bool = True) -> None:
        super().__init__()
        self.branch, self.norm = branch, nn.BatchNorm1d(16, track_running_stats=running)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.branch and not bool(x.isfinite().all()):  # export stops here
            raise ValueError
        h = F.gelu(self.norm(self.first(x)) @ self.table)
        return F.mse_loss(self.last(h).squeeze(-1), y)


def net(dtype: torch.dtype, branch: bool = False, frozen: bool = False) -> Net:
    torch.manual_seed(0)
    made = Net(branch).to(torch.bfloat16).to(dtype)  # the same values in each
    made.norm.requires_grad_(not frozen)
    return made


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    fields = {"x": torch.randn(6, 8, generator=generator), "y": torch.randn(6, generator=generator)}
    return {name: value.bfloat16().to(dtype) for name, value in fields.items()}


def one_step(module: nn.Module, fields: dict[str, Tensor], precision: str, dp: int = 1) -> VerifiedStep:
    plan = Plan.of(Mesh.of(dp=dp), precision=precision)
    compiled, choice = Compiled(module, plan, fields), OptimizerChoice(lr=1e-3, eps=1e-4)
    return run_ranks(
        plan.mesh, lambda comm: run_steps(compiled, comm, [fields], choice, None, 0, ScaleChoice.fixed(1.0))
    )[0][0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("branch", [False, True], ids=["captured", "one unit"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_model_in_bf16_trains_as_one_in_fp32(precision: str, branch: bool) -> None:
    wide = one_step(net(torch.float32, branch), batch(torch.float32), precision)
    low = one_step(net(torch.bfloat16, branch), batch(torch.bfloat16), precision)
    assert low.loss == wide.loss
    for ours, truth in (
        (low.gradients, wide.gradients),
        (low.parameters, wide.parameters),
        (low.buffers, wide.buffers),
    ):
        assert ours.keys() == truth.keys() and all(torch.equal(ours[n], truth[n]) for n in truth)


@pytest.mark.quick(1)
@pytest.mark.parametrize("frozen", [False, True], ids=["learning", "frozen norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", LOW_PRECISIONS)
def test_low_precision_of_a_model_in_any(precision: str, dtype: torch.dtype, frozen: bool) -> None:
    """As near to the truth as one device; BatchNorm and buffers are fp32 at least."""
    module, fields = net(dtype, frozen=frozen), batch(dtype)
    found = one_step(module, fields, precision)
    truth = Oracle(module).step(fields).gradients
    theirs = Oracle(module, precision=precision).step(fields).gradients  # type: ignore[arg-type]
    assert total_error(found.gradients, truth) <= 1.25 * total_error(theirs, truth) < 0.05
    assert all(found.buffers[n].dtype is torch.float32 for n in ("norm.running_mean", "table"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["fp64", *LOW_PRECISIONS])
def test_one_unit_with_a_norm_without_running_statistics_over_two_ranks(precision: str) -> None:
    module, fields = Net(True, running=False), batch(torch.float32)
    found = one_step(module, fields, precision, dp=2)
    truth = Oracle(module).step(fields).gradients
    theirs = Oracle(module, precision=precision).step(fields).gradients  # type: ignore[arg-type]
    assert total_error(found.gradients, truth) <= max(1.25 * total_error(theirs, truth), 1e-10) < 0.05


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w), "einsum of a list": lambda x,
    w: torch.einsum("bi,oi->bo", [x, w]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])), "mv": lambda x, w: w.mv(x[0]),
    "inner": torch.inner,
    "prelu": lambda x, w: nn.functional.prelu(x, w[0]), "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w.mT, w]),
    "addbmm": lambda x, w: torch.addbmm(x @ w.mT, x[None], w.mT[None]),
    "linalg.matmul": lambda x, w: torch.linalg.matmul(x, w),
    "convolution": lambda x, w: torch.convolution(x[:, None], w[:, None, :3], None, [1], [0], [1], False, [0], 1),
    "layer_norm": lambda x, w: torch.layer_norm(x, (8,), w[0]), "rms_norm": lambda x, w: torch.rms_norm(x, (8,), w[0]),
}  # fmt: skip


class Mixed(nn.Module):
    """A parameter, in low precision, and a buffer, which is not, as the two operands of ``op``."""

    table: Tensor

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.first, self.weight = op, nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.first(x) * self.table, self.weight).square().mean()


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", LOW_PRECISIONS)
@pytest.mark.parametrize("name", MIXED)
def test_operands_of_products_may_be_of_two_dtypes(name: str, precision: str) -> None:
    """As under torch.autocast, also where the product is not called matmul."""
    torch.manual_seed(0)
    module, fields = Mixed(MIXED[name]), {"x": torch.randn(4, 8)}
    found = one_step(module, fields, precision)
    truth = Oracle(module).step(fields).gradients
    theirs = Oracle(module, precision=precision).step(fields).gradients  # type: ignore[arg-type]
    assert total_error(found.gradients, truth) <= 1.25 * total_error(theirs, truth) < 0.05


class Range(nn.Module):
    """``op`` of values up to 1,000, brought back into the range of fp16."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.weight = op, nn.Parameter(torch.linspace(1.0, 2.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.weight * x.to(self.weight.dtype)).log().mean()


RANGE = {
    "power": lambda v: v**2,
    "method": lambda v: v.pow(2),
    "square": torch.square,
    "sum": lambda v: (v * 16).sum(-1),
    "method sum": lambda v: torch.cumsum(v * 32, 1),
    "norm": lambda v: torch.linalg.vector_norm(v * 30, dim=-1),
    "exponential": lambda v: torch.exp(v / 100),
    "variance": lambda v: torch.var(v * 30, 1),
    "reciprocal": lambda v: 1 / torch.rsqrt((v / 1e9).reciprocal()),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RANGE)
def test_fp16_computes_in_fp32_what_leaves_its_range(name: str) -> None:
    fields = {"x": torch.linspace(500.0, 900.0, 32).view(4, 8)}
    module = Range(RANGE[name])
    found = one_step(module, fields, "fp16")
    oracle = Oracle(module, precision="fp16").step(fields)
    truth = Oracle(module).step(fields)
    for low in (found, oracle):
        assert low.loss == pytest.approx(truth.loss, rel=2e-3)
        assert total_error(low.gradients, truth.gradients) < 2e-2
    assert not bool(RANGE[name](torch.linspace(500.0, 1800.0, 32).view(4, 8).half()).isfinite().all())


class Layer(nn.Module):
    """A layer, and a loss of its 4,096 rows of 64, which is ``op`` of them and of signs."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.layer = op, nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.to(self.layer.weight.dtype) * 5)
        return self.op(h, torch.ones_like(h).where(x[:, :1] > 0, -1))


MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda h, y: h.abs().mean(),
    "mean over rows": lambda h, y: (h.abs() * 20).mean(0, keepdim=True).square().mean(),
    "soft margin": F.soft_margin_loss,
    "poisson": lambda h, y: F.poisson_nll_loss(h, y.exp()),
    "hinge embedding": F.hinge_embedding_loss,
    "multilabel soft margin": lambda h, y: F.multilabel_soft_margin_loss(h, y.clamp(min=0)) * 50,
    "margin ranking": lambda h, y: F.margin_ranking_loss(h, -h, y),
    "cosine embedding": lambda h, y: F.cosine_embedding_loss(h * 30, h.roll(1, 1) * 30, y[:, 0]),
    "triplet": lambda h, y: F.triplet_margin_loss(h * 30, y, -h * 30),
    "multi margin": lambda h, y: F.multi_margin_loss(h * 30, (y[:, 0] > 0).long()),
    "multilabel margin": lambda h, y: F.multilabel_margin_loss(h * 30, (y > 0).long()),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_in_fp16_does_not_overflow_as_its_sum_would(name: str) -> None:
    fields = {"x": torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))}
    module = Layer(MEANS[name])
    found = one_step(module, fields, "fp16")
    truth = Oracle(module).step(fields)
    for low in (found, Oracle(module, precision="fp16").step(fields)):
        assert low.loss == pytest.approx(truth.loss, rel=2e-3)
        assert all(bool(g.isfinite().all()) for g in low.gradients.values())


HALVES = {"l1": F.l1_loss, "smooth l1": F.smooth_l1_loss, "mean": lambda h, y: h.abs().mean()}


@pytest.mark.parametrize("name", HALVES)
def test_a_loss_that_the_model_itself_computes_in_fp16(name: str) -> None:
    """Plain PyTorch has the same number."""
    fields = {"x": torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))}
    module = Layer(lambda h, y: HALVES[name](h.half(), y.half()))
    assert one_step(module, fields, "fp32").loss == pytest.approx(float(module(**fields).detach()), rel=2e-3)


def test_frozen_parameters_have_the_dtype_of_the_graph() -> None:
    module, fields = net(torch.float32, frozen=True), batch(torch.float32)
    compiled = Compiled(module, Plan.of(precision="bf16"), fields)
    leaves = run_ranks(Mesh.of(dp=1), lambda comm: Engine(compiled, comm, OptimizerChoice()).memory.leaves)[0]
    assert {n: leaves[n].dtype for n in ("norm.weight", "first.weight")} == {
        "norm.weight": torch.float32, "first.weight": torch.bfloat16,
    }  # fmt: skip
