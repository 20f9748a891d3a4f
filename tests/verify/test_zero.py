"""ZeRO equals one device, and its stages equal each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from models import CASES, captured, tokens
from shardwise.core.data_options import ParameterRule
from shardwise.core.errors import ConfigError
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower import gather
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.parallel.data import data_parallel
from shardwise.runtime import gathered, gradients
from shardwise.verify.verify import OPTIMIZER, VerifiedStep, run_steps, run_threads, verify

MODELS = ("gpt", "llama", "bert", "conv")
ZERO, DP, MICROBATCHES, RECOMPUTE = (0, 1, 2, 3), (1, 2, 3, 4), (1, 3), CHOICES["recompute"]
PRODUCT = list(itertools.product(MODELS, ZERO, DP, MICROBATCHES, RECOMPUTE))


def check(name: str, plan: Plan) -> None:
    one, make, loss = captured(name)
    torch.manual_seed(len(name) + plan.mesh.size)
    report = verify(one.module, [make(rows) for rows in (13, 12, 7)], plan, loss=loss, captured=one)
    assert report.compared > 20
    assert report.passed, (report.largest, report.worst[:3], report.low_precision)
    assert report.ranks_agree


@pytest.mark.quick(1)
@pytest.mark.few(9)
@pytest.mark.parametrize(("name", "zero", "dp", "microbatches", "recompute"), list(covering(PRODUCT)))
def test_stage_equals_one_device(name: str, zero: int, dp: int, microbatches: int, recompute: Any) -> None:
    check(name, data_parallel(Plan.of(microbatches=microbatches, recompute=recompute), dp, zero))


@pytest.mark.full
@pytest.mark.parametrize(("name", "zero", "dp", "microbatches", "recompute"), PRODUCT)
def test_every_stage_equals_one_device(name: str, zero: int, dp: int, microbatches: int, recompute: Any) -> None:
    check(name, data_parallel(Plan.of(microbatches=microbatches, recompute=recompute), dp, zero))


@pytest.mark.quick(1)
@pytest.mark.few(6)
@pytest.mark.parametrize("name", ["mlp", "contrastive", "static", "own-llama", "mixtral", "vit"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_uneven_and_static_models(name: str, zero: int) -> None:
    check(name, data_parallel(Plan.of(microbatches=2), 3, zero))


class Spectral(nn.Module):
    """Filters in the frequency domain: complex weights, or pairs of real ones."""

    def __init__(self, real: bool) -> None:
        super().__init__()
        weights = [torch.randn(5, 2) for _ in range(2)]
        self.filters = nn.ParameterList([nn.Parameter(w if real else torch.view_as_complex(w)) for w in weights])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in (w if w.is_complex() else torch.view_as_complex(w) for w in self.filters):
            x = torch.tanh(torch.fft.irfft(torch.fft.rfft(x) * weight, n=8))
        return ((self.head(x) - y) ** 2).mean()


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", ZERO)
def test_complex_parameters(zero: int) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 8), "y": torch.randn(rows, 1)} for rows in (7, 6)]
    plan = data_parallel(Plan.of(microbatches=2), 3, zero)
    report = verify(Spectral(real=True), batches, plan)
    assert report.passed and report.ranks_agree and report.compared > 10
    with pytest.raises(
        ConfigError, match=r"parameter filters.0 is torch.complex64.*legal: a real one with a last dim of 2"
    ):
        verify(Spectral(real=False), batches, plan)


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(("size", "replicas"), [(4, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding(size: int, replicas: int, zero: int) -> None:
    check("gpt", data_parallel(Plan.of(microbatches=2), size, zero, replicas))


@pytest.mark.quick(1)
@pytest.mark.few(6)
@pytest.mark.parametrize("gathered", CHOICES["gathered"])
@pytest.mark.parametrize("reduced", CHOICES["reduced"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_choice_of_slots(gathered: Any, reduced: Any, prefetch: int) -> None:
    plan = Plan.of(
        microbatches=3,
        recompute="full" if prefetch == 1 else "none",
        gathered=gathered,
        reduced=reduced,
        prefetch=prefetch,
    )
    check("gpt", data_parallel(plan, 2, 3))


@pytest.mark.quick(1)
@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offload_and_bf16(offload: Any, precision: Any) -> None:
    check("gpt", data_parallel(Plan.of(microbatches=2, precision=precision, offload=offload), 2, 3))


def test_rows_of_the_table_side_by_side() -> None:
    """Parameters of one unit under different rows do not share a buffer."""
    rules = (ParameterRule("*attention*", "S", "S", "S"), ParameterRule("*mlp*", state="S"), ParameterRule("*"))
    plan = data_parallel(Plan.of(microbatches=2), 3).replace(parameters=rules)
    check("gpt", plan)


# ---- the same bits ---------------------------------------------------------------------------------------------------


def steps(plan: Plan, module: nn.Module, clip: float | None = 0.1) -> list[list[VerifiedStep]]:
    torch.manual_seed(1)
    batches = [tokens(rows) for rows in (13, 12, 7)]
    compiled = Compiled(module, plan, batches[0])
    return run_threads(compiled, lambda comm: run_steps(compiled, comm, batches, OPTIMIZER, clip, 0))


def assert_same_bits(ours: list[list[VerifiedStep]], theirs: list[list[VerifiedStep]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
            for kind in ("gradients", "parameters", "buffers"):
                first, second = getattr(a, kind), getattr(b, kind)
                assert first.keys() == second.keys()
                assert all(torch.equal(first[name], second[name]) for name in first), kind


@pytest.mark.quick(1)
@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("microbatches", "reduced"), [(1, "microbatch"), (3, "step")])
def test_stages_agree_bitwise(precision: Any, microbatches: int, reduced: Any) -> None:
    """Where the order of sums is the same, also the norm's: clipping is on in all of these steps."""
    torch.manual_seed(0)
    module = CASES["gpt"]()[0].train()
    plan = Plan.of(precision=precision, microbatches=microbatches, reduced=reduced)
    first = steps(data_parallel(plan, 3, 0), module)
    assert first[0][0].grad_norm > 0.1
    for zero in (1, 2, 3):
        assert_same_bits(steps(data_parallel(plan, 3, zero), module), first)


@pytest.mark.slow
def test_how_long_parameters_stay_changes_no_bit() -> None:
    torch.manual_seed(0)
    module = CASES["gpt"]()[0].train()
    plan = data_parallel(Plan.of(microbatches=3), 2, 3)
    first = steps(plan, module)
    for change in (
        {"gathered": "forward"},
        {"gathered": "step"},
        {"prefetch": 0},
        {"prefetch": 3},
        {"recompute": "full"},
    ):
        assert_same_bits(steps(plan.replace(**change), module), first)


def test_sums_in_bf16_are_rounded_and_the_same_on_all_stages() -> None:
    torch.manual_seed(0)
    module = CASES["gpt"]()[0].train()
    wide, narrow = Plan.of(), Plan.of(reduce="bf16")
    truth = steps(data_parallel(wide, 2, 0), module)[0][0].gradients
    found = [steps(data_parallel(narrow, 2, zero), module) for zero in (0, 1)]
    assert_same_bits(*found)
    for zero in (0, 2, 3):
        rounded = steps(data_parallel(narrow, 2, zero), module)[0][0].gradients
        error = max(float((rounded[n] - g).norm() / g.norm()) for n, g in truth.items() if g.norm() > 1e-6)
        assert 1e-4 < error < 2e-2


# ---- parameters without a gradient -----------------------------------------------------------------------------------


class Queries(nn.Module):
    """Its first layer hands on halves of a parameter, of which autograd wants to know each write to the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, 8))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, place = (one[None].expand(len(x), -1, -1) for one in self.query.split(4, 1))
        for layer in self.layers:
            h = h + torch.tanh(layer(h + place)) * x[:, None]
        return (h.mean((1, 2)) - y).square().mean()


@pytest.mark.parametrize("dp", [2, 3])
def test_views_of_a_parameter_that_other_units_read(dp: int) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 4), "y": torch.randn(rows)} for rows in (7, 5)]
    report = verify(Queries(), batches, data_parallel(Plan.of(), dp, 3))
    assert report.passed, report.worst[:3]


class Branches(nn.Module):
    """Uses one of two layers, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor, left: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        out = self.left(h) if bool(left.all()) and locals() else self.right(h)
        return ((out.squeeze(-1) - y) ** 2).mean()


@pytest.mark.quick(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 3])
def test_a_parameter_without_a_gradient_takes_no_step(zero: int, dp: int) -> None:
    """Neither decay nor momentum move it, and its count of steps stays: torch.optim skips it too."""
    torch.manual_seed(0)
    batches = [
        {"x": torch.randn(6, 6), "y": torch.randn(6), "left": torch.full((6,), side)}
        for side in (True, False, False, True, True)
    ]
    report = verify(Branches(), batches, data_parallel(Plan.of(), dp, zero))
    assert report.passed, report.worst[:3]


class Scaled(torch.autograd.Function):
    """A product whose backward reads the weight where forward has left it, without telling autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.weight, (grads[0] * ctx.x).sum(0)


class Decides(Branches):
    """Each row uses one of two layers, as what it computes says: the model cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor, y: Tensor, left: Tensor) -> Tensor:
        x = Scaled.apply(x, self.scale)
        rows = [super(Decides, self).forward(x[i : i + 1], y[i : i + 1], x[i] > 0.5) for i in range(len(x))]
        return torch.stack(rows).mean()


@pytest.mark.quick(3)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("gathered", ["use", "forward", "step"])
@pytest.mark.parametrize(("dp", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_what_is_not_captured_rests_in_shards(dp: int, replicas: int, gathered: Any, microbatches: int) -> None:
    """It is one unit, which is gathered while it runs, also for a backward that asks autograd for nothing."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(7, 6), "y": torch.randn(7), "left": torch.ones(7, dtype=torch.bool)} for _ in range(3)]
    plan = data_parallel(Plan.of(microbatches=microbatches, gathered=gathered), dp, 3, replicas)
    report = verify(Decides(), batches, plan)
    assert any("not captured" in note for note in report.notes)
    assert report.passed, report.worst[:3]


# ---- negative controls: each of these errors must be found -----------------------------------------------------------


def _passes(**changes: Any) -> bool:
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=15, layers=5, heads=3, context=12).train()
    batches = [{k: v % 31 if k == "input_ids" else v.clamp(max=30) for k, v in tokens(7).items()} for _ in range(2)]
    return verify(module, batches, data_parallel(Plan.of(microbatches=2, **changes), 2, 3)).passed


@pytest.mark.slow
def test_control_passes() -> None:
    assert _passes()
    assert _passes(prefetch=2)


@pytest.mark.slow
def test_weights_kept_by_backward_instead_of_a_reference_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gather into a slot of its own: else forward and backward may happen to use the same one."""
    monkeypatch.setattr(
        gather, "assign", lambda spans: (list(range(len(spans))), tuple((span.bucket,) for span in spans))
    )
    assert _passes()
    monkeypatch.setattr(gathered.Gathered, "keep", lambda self, value: value)
    assert not _passes()


@pytest.mark.slow
def test_stale_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.core.flat import FlatBuffer

    monkeypatch.setattr(FlatBuffer, "gaps", lambda self: [])
    assert not _passes()


@pytest.mark.slow
def test_a_shard_that_is_overwritten_instead_of_added_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    original = gradients.Gradients.add_slot
    monkeypatch.setattr(
        gradients.Gradients, "add_slot", lambda self, one: original(self, replace(one, first=(one.bucket,)))
    )
    assert not _passes()
