"""A model whose ops the CPU cannot compute in fp16 is refused before anything starts, and others are not."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.graph.aten_ops import named
from shardwise.lower.compiled import Compiled
from shardwise.measure import fp16_check
from shardwise.measure.fp16_check import check_kernels
from shardwise.models.gpt import GPT
from shardwise.ops import random_ops
from shardwise.ops.env import Env
from shardwise.parallel.tensor import tensor_parallel
from shardwise.units.tracing import trace
from verify.models import CASES

FP16 = Plan.of(precision="fp16")


class Block(nn.Module):
    """One layer of a model; ``op`` computes something of (rows, 6)."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.linear, self.op = nn.Linear(6, 6), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.linear(x))


class Model(nn.Module):
    def __init__(self, *ops: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(op) for op in ops)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def batch(rows: int = 3) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6)}


def gram(x: Tensor) -> Tensor:
    """A symmetric positive definite (rows, 6, 6), and its factor's sum over a dim."""
    return torch.linalg.cholesky_ex(torch.diag_embed(x * x + 1)).L.sum(-1)


def by_value(op: Any) -> Any:
    """``op`` after a branch that export cannot follow."""
    return lambda x: op(x) if bool(x.sum() < 1e4) else x


@pytest.mark.parametrize(
    ("op", "named", "kernel"),
    [
        (gram, "linalg_cholesky_ex.default", "\"cholesky_cpu\" not implemented for 'Half'"),
        (
            torch.special.i1e,
            "special_i1e.default",
            "\"i1e_backward\" not implemented for 'Half'",
        ),  # only backward lacks one
    ],
    ids=["forward", "backward"],
)
def test_op_without_a_kernel(op: Any, named: str, kernel: str) -> None:
    with pytest.raises(ConfigError) as found:
        Compiled(Model(torch.relu, op, torch.relu), FP16, batch())
    words = ('precision = "fp16"', f"{named} in layers.1", kernel, 'legal: precision = "bf16" or "fp32", or a GPU')
    assert all(word in str(found.value) for word in words), str(found.value)
    for precision in ("fp32", "fp64"):
        Compiled(Model(torch.relu, op), Plan.of(precision=precision), batch())


@pytest.mark.parametrize(
    ("op", "kernel"), [(gram, "cholesky_cpu"), (torch.special.i1e, "i1e_backward")], ids=["forward", "backward"]
)
def test_op_without_a_kernel_in_a_model_that_is_one_unit(op: Any, kernel: str) -> None:
    with pytest.raises(ConfigError) as found:
        Compiled(Model(by_value(op)), FP16, batch())
    assert kernel in str(found.value) and 'precision = "bf16" or "fp32", or a GPU' in str(found.value)
    assert trace(Model(by_value(torch.relu)), batch()).opaque is not None


def test_a_dtype_that_capture_refuses_already() -> None:
    with pytest.raises(ConfigError) as found:
        Compiled(Model(lambda x: torch.linalg.inv(torch.diag_embed(x * x + 1)).mean(-1)), FP16, batch())
    assert "Low precision dtypes not supported" in str(found.value) and 'precision = "bf16" or "fp32", or a GPU' in str(
        found.value
    )


def test_what_no_gradient_passes_needs_no_backward() -> None:
    def op(x: Tensor) -> Tensor:
        return x + torch.special.i1e(x.detach())

    Compiled(Model(op), FP16, batch())
    with torch.no_grad():
        still = Model(torch.special.i1e, torch.relu)
    still.layers[0].requires_grad_(False)
    Compiled(still, FP16, batch())


def test_products_that_are_not_tried_have_kernels() -> None:
    def x(*shape: int) -> Tensor:
        return torch.randn(shape).half().requires_grad_()

    aten, env = torch.ops.aten, Env(rows=2)
    heads, grouped = (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8)), (x(2, 4, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.linear, (x(2, 3, 4), x(5, 4), x(5)), {}), (aten.linear, (x(4), x(5, 4)), {}),
        (aten.matmul, (x(2, 3, 4), x(4)), {}),
        (aten.matmul, (x(2, 3, 4), x(2, 4, 5)), {}), (aten.mm, (x(3, 4), x(4, 5)), {}),
        (aten.bmm, (x(2, 3, 4), x(2, 4, 5)), {}),
        (aten.addmm, (x(5), x(3, 4), x(4, 5)), {}), (aten.baddbmm, (x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)), {}),
        (aten.addbmm, (x(3, 5), x(2, 3, 4), x(2, 4, 5)), {}), (aten.tensordot, (x(2, 3, 4), x(4, 5), [2], [0]), {}),
        (aten.bilinear, (x(2, 3), x(2, 4), x(5, 3, 4), x(5)), {}), (aten.inner, (x(2, 4), x(3, 4)), {}),
        (aten.linalg_matmul, (x(2, 3, 4), x(4, 5)), {}), (aten.linalg_multi_dot, ([x(2, 3), x(3, 4), x(4, 5)],), {}),
        (aten.chain_matmul, ([x(2, 3), x(3, 4), x(4, 5)],), {}),
        (aten.convolution, (x(2, 4, 7), x(6, 4, 3), x(6), [1], [0], [1], False, [0], 1), {}),
        (aten.einsum, ("bij,bjk->bik", [x(2, 3, 4), x(2, 4, 5)]), {}),
        *((getattr(aten, f"conv{d}d"), (x(2, 4, *[7] * d), x(6, 2, *[3] * d), x(6), [2] * d, [1] * d, [1] * d, 2),
        {}) for d in (1, 2, 3)),
        (aten.conv_transpose1d, (x(2, 3, 7), x(3, 4, 3), x(4)), {}),
        (aten.conv_transpose2d, (x(2, 3, 5, 5), x(3, 4, 3, 3), x(4)), {}),
        (aten.conv_transpose3d, (x(2, 3, 5, 5, 5), x(3, 4, 3, 3, 3), x(4)), {}),
        (aten.scaled_dot_product_attention, heads, {"is_causal": True}),
        (aten.scaled_dot_product_attention, (*heads, mask), {}),
        (aten.scaled_dot_product_attention, grouped, {"enable_gqa": True}),
        (random_ops.attention, (env, *heads, None, 0.1, True, 0, (0, 1), ()), {}),
    ]  # fmt: skip
    for op, args, kwargs in calls:
        op(*args, **kwargs).sum().backward()
    ops = {op for op, _, _ in calls} - {random_ops.attention}
    assert {op.__name__ for op in ops} == named(fp16_check.PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "conv"])
def test_ordinary_models_have_all_kernels(name: str) -> None:
    torch.manual_seed(0)
    module, make, loss = CASES[name]()
    module.train()
    assert Compiled(module, FP16, make(4), loss).general.opaque is None


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "tensor", "tp"), [
    ("gpt", "1d", 2), ("llama", "1d", 2), ("gpt", "1d-sp", 3), ("llama", "1d-sp", 3),
    ("own-llama", "2.5d", 8), pytest.param("gpt", "3d", 8, marks=pytest.mark.full),
    pytest.param("llama", "2d", 9, marks=pytest.mark.full),
])  # fmt: skip
def test_pieces_of_layers_are_tried(name: str, tensor: Any, tp: int) -> None:
    """Also where the rows are shared out among more ranks than are tried."""
    torch.manual_seed(0)
    module, make, loss = CASES[name]()
    found = Compiled(module.train(), tensor_parallel(FP16, tp, tensor), make(4), loss).general
    assert math.prod(found.tensor.values()) == tp and found.opaque is None


def test_op_without_a_kernel_on_a_piece() -> None:
    with pytest.raises(ConfigError, match=r"special_i1e.default in layers.0"):
        Compiled(Model(torch.special.i1e, torch.relu), tensor_parallel(FP16, 2), batch())


@pytest.mark.slow
def test_equal_blocks_run_once_and_one_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 equal blocks one is run, and no two units' parameters are there together."""
    module = GPT(vocabulary=32, width=16, layers=8, heads=2, context=8)
    fields = {n: torch.randint(0, 32, (2, 8)) for n in ("input_ids", "labels")}
    found = trace(module, fields, precision="fp16")
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, ran = [0], []
    make, run = fp16_check._parameter, fp16_check._Nodes.run

    class Held:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

    def parameter(*args: Any) -> Tensor:
        value = make(*args)
        value.held = Held(value.nbytes)  # type: ignore[attr-defined]
        alive.add(value.held)  # type: ignore[attr-defined]
        most[0] = max(most[0], sum(one.nbytes for one in alive))
        return value

    def nodes(self: Any, *args: Any) -> Any:
        ran.append(self.unit.name)
        return run(self, *args)

    monkeypatch.setattr(fp16_check, "_parameter", parameter)
    monkeypatch.setattr(fp16_check._Nodes, "run", nodes)
    check_kernels(found, module, fields)
    assert [name for name in ran if "blocks" in name] == ["blocks.0"]
    sizes = {n: p.numel() * 2 for n, p in module.named_parameters()}
    units = [sum(sizes[n] for n in unit.parameters) for unit in found.units]
    assert most[0] == max(units) < sum(sizes.values())


def test_losses_are_computed_in_fp32() -> None:
    """A loss that shardwise casts needs no kernel; one that it does not know is refused like any op."""

    class Loss(nn.Module):
        def __init__(self, loss: Any) -> None:
            super().__init__()
            self.linear, self.loss = nn.Linear(6, 4), loss

        def forward(self, x: Tensor) -> Tensor:
            return self.loss(self.linear(x))

    Compiled(Loss(lambda y: F.binary_cross_entropy(y.sigmoid(), (y.detach() > 0).to(y.dtype))), FP16, batch())
    Compiled(Loss(lambda y: F.multi_margin_loss(y, (y[:, 0] > 0).long())), FP16, batch())
    with pytest.raises(ConfigError, match="pdist"):
        Compiled(Loss(lambda y: F.pdist(y).mean()), FP16, batch())
