"""The main test: every model under every data-parallel plan equals one device, in fp64, to 1e-10."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import CASES, ConvNet, captured, image_loss, tokens
from shardwise.core.mesh import Mesh
from shardwise.core.numeric_options import Precision
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.ops import cross_entropy, norms, random_ops
from shardwise.units import selective_recompute
from shardwise.units.trace import Trace
from shardwise.verify.verify import OPTIMIZER, VerifiedStep, run_steps, run_threads, verify

DP, MICROBATCHES, RECOMPUTE = (1, 2, 3, 4), (1, 2, 3), ("none", "selective", "full")
PLANS = list(itertools.product(DP, MICROBATCHES, RECOMPUTE))


def covering() -> Iterator[tuple[str, int, int, str]]:
    """For each model plans in which every pair of values occurs over the models, and dp > 1 with each model at least
    twice.
    """
    pairs = [(1, 1), (2, 1), (3, 2), (1, 2), (2, 3), (4, 1), (1, 3), (3, 1), (4, 3), (4, 2), (2, 2), (3, 3)]
    rows = [(dp, microbatches, RECOMPUTE[(dp + microbatches) % 3]) for dp, microbatches in pairs]
    for i, name in enumerate(CASES):
        for j in range(3):
            yield (name, *rows[(3 * i + 5 * j) % len(rows)])


def check(name: str, dp: int, microbatches: int, recompute: str, precision: str = "fp32") -> None:
    one, make, loss = captured(name)
    torch.manual_seed(len(name) + dp)
    batches = [make(rows) for rows in (13, 12, 7)]
    plan = Plan.of(Mesh.of(dp=dp), microbatches=microbatches, recompute=recompute, precision=precision)
    report = verify(one.module, batches, plan, loss=loss, captured=one)
    assert report.compared > 20
    assert report.passed, (report.largest, report.worst[:3], report.low_precision)
    assert report.ranks_agree


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "dp", "microbatches", "recompute"), list(covering()))
def test_plan_equals_one_device(name: str, dp: int, microbatches: int, recompute: str) -> None:
    check(name, dp, microbatches, recompute)


@pytest.mark.full
@pytest.mark.parametrize(("dp", "microbatches", "recompute"), PLANS)
@pytest.mark.parametrize("name", CASES)
def test_every_plan_equals_one_device(name: str, dp: int, microbatches: int, recompute: str) -> None:
    check(name, dp, microbatches, recompute)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt", "llama", "conv", "mixtral"])
def test_low_precision_is_as_near_to_the_truth_as_one_device(name: str, precision: str) -> None:
    check(name, 2, 2, "none", precision)


def test_covering_set_covers_every_pair() -> None:
    seen = list(covering())
    for a, b in itertools.combinations(range(1, 4), 2):
        values = [DP, MICROBATCHES, RECOMPUTE]
        wanted = set(itertools.product(values[a - 1], values[b - 1]))
        assert wanted <= {(case[a], case[b]) for case in seen}
    assert all(max(case[1] for case in seen if case[0] == name) > 1 for name in CASES)


class Returns(nn.Module):
    """A loss in what ``make`` returns of it and the scores."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.layer = make, nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.layer(x)
        return self.make(F.cross_entropy(scores, y), scores)


RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tuple": lambda loss, scores: (loss, scores),
    "a list of one dim": lambda loss, scores: [loss.view(1)],
    "a tuple in a dict": lambda loss, scores: {"scores": scores, "loss": (loss,)},
    "a dict": lambda loss, scores: {"loss": loss.view(1, 1)},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_is_found_where_training_finds_it(name: str) -> None:
    batch = {"x": torch.randn(5, 4), "y": torch.tensor([0, 1, -100, -100, 2])}
    report = verify(Returns(RETURNED[name]), [batch], Plan.of(Mesh.of(dp=2), microbatches=2))
    assert report.passed and report.largest < 1e-10


class NoGradient(nn.Module):
    """Whose gradients are all zero, but there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * 0).sum()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_first_gradients_may_all_be_zero(precision: Precision) -> None:
    report = verify(NoGradient(), [{"x": torch.randn(5, 4)}], Plan.of(Mesh.of(dp=2), precision=precision))
    assert report.passed and report.low_precision == {"plan": 0, "one_device": 0, "ratio": 0}


# ---- negative controls: each of these errors must be found -----------------------------------------------------------


def _gpt_report(dp: int = 2, microbatches: int = 2, recompute: str = "none", dropout: float = 0.1) -> bool:
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=16, layers=2, heads=2, context=12, dropout=dropout).train()
    batches = [{k: v % 31 if k == "input_ids" else v.clamp(max=30) for k, v in tokens(7).items()} for _ in range(2)]
    plan = Plan.of(Mesh.of(dp=dp), microbatches=microbatches, recompute=recompute)
    return verify(module, batches, plan).passed


@pytest.mark.slow
def test_control_passes() -> None:
    assert _gpt_report()


@pytest.mark.slow
def test_wrong_microbatch_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "valid_targets", lambda env, target, *_, **kw: (target == target).sum())
    assert not _gpt_report()


@pytest.mark.slow
def test_wrong_dropout_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_ops, "_row_start", lambda env, *_: env.offset)
    assert not _gpt_report()


def test_missing_reduction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.lower import reduce

    monkeypatch.setattr(reduce, "reductions", lambda plan, rule, summed: ((), ()))
    assert not _gpt_report()


def test_overwritten_instead_of_added_tied_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.runtime.gradients import Gradients

    original = Gradients._reach

    def careless(self, name):  # type: ignore[no-untyped-def]
        self._written.discard((name, -1))
        return original(self, name)

    monkeypatch.setattr(Gradients, "_reach", careless)
    assert not _gpt_report(dp=1, microbatches=1)


def test_buffers_that_differ_between_ranks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(compiled: Compiled, comm: Any, *args: Any, **options: Any) -> list[VerifiedStep]:
        steps = run_steps(compiled, comm, *args, **options)
        if comm.rank == 1:
            next(value for name, value in steps[-1].buffers.items() if name.endswith("running_mean")).add_(1)
        return steps

    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 3, 8, 8), "label": torch.randint(0, 5, (8,))}
    assert verify(ConvNet().train(), [batch], Plan.of(Mesh.of(dp=2)), loss=image_loss).passed
    monkeypatch.setattr("shardwise.verify.verify.run_steps", own)
    report = verify(ConvNet().train(), [batch], Plan.of(Mesh.of(dp=2)), loss=image_loss)
    assert not report.ranks_agree and not report.passed and report.largest < 1e-10


def test_unsynchronised_batch_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "sync_batch_norm", lambda env, *args: norms.batch_norm(*args[:7]))
    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 3, 8, 8), "label": torch.randint(0, 5, (8,))}
    module = ConvNet().train()
    assert not verify(module, [batch], Plan.of(Mesh.of(dp=2)), loss=image_loss).passed


def test_a_wrong_kept_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = selective_recompute._Kept.take
    assert _gpt_report(recompute="selective")
    monkeypatch.setattr(selective_recompute._Kept, "take", lambda self: original(self) * (1 + 1e-8))
    assert not _gpt_report(recompute="selective")


def test_a_value_that_is_not_kept_though_it_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_recompute, "_read", lambda graph, own, inner: set())
    assert not _gpt_report(recompute="selective")


def test_a_reference_to_another_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_recompute._Saver, "unpack", lambda self,
    saved: saved if isinstance(saved, Tensor) else
                        next(iter(self.inputs.values())).as_strided(saved.shape, saved.stride))  # fmt: skip
    assert not _gpt_report(recompute="selective", dropout=0.0)


# ---- recomputation changes nothing -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "own-llama", "llama", "gpt2", "bert", "conv"])
def test_recomputation_changes_no_bit(name: str, precision: str) -> None:
    torch.manual_seed(2)
    module, make, loss = CASES[name]()
    batches = [make(6) for _ in range(2)]
    plans = {r: Plan.of(recompute=r, precision=precision) for r in RECOMPUTE}
    traces: dict[tuple[tuple[str, ...], int | None], Trace] = {}
    for dp, microbatches in ((1, 1), (1, 3), (2, 1), (3, 3)):
        steps = {}
        for recompute, plan in plans.items():
            plan = plan.replace(mesh=Mesh.of(dp=dp), microbatches=microbatches)
            compiled = Compiled(module.train(), plan, batches[0], loss, _traces=traces)
            steps[recompute] = run_threads(
                compiled, lambda comm, c=compiled: run_steps(c, comm, batches, OPTIMIZER, 1.0, 0)
            )[0]  # type: ignore[misc]
        for recompute in ("selective", "full"):
            for mine, right in zip(steps[recompute], steps["none"], strict=True):
                assert mine.loss == right.loss
                assert mine.gradients.keys() == right.gradients.keys()
                assert all(torch.equal(mine.gradients[n], g) for n, g in right.gradients.items())
                assert all(torch.equal(mine.buffers[n], b) for n, b in right.buffers.items())


# ---- what the loss of a step means -----------------------------------------------------------------------------------


def test_microbatches_of_unequal_masks_equal_one() -> None:
    """The loss and gradients of m microbatches over n ranks are those of the whole batch at once."""
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=16, layers=1, heads=2, context=12).double()
    ids = torch.randint(0, 31, (6, 12))
    labels = torch.randint(0, 31, (6, 12))
    labels[:3, :11] = -100  # three targets in the first half of the rows, 36 in the other
    batch = {"input_ids": ids, "labels": labels}
    truth = module(**batch).item()
    for dp, microbatches in ((1, 1), (1, 2), (2, 1), (3, 2), (2, 6)):
        compiled = Compiled(module, Plan.of(Mesh.of(dp=dp), microbatches=microbatches, precision="fp64"), batch)
        steps = run_threads(
            compiled, lambda comm, compiled=compiled: run_steps(compiled, comm, [batch], OPTIMIZER, None, 0)
        )  # type: ignore[misc]
        assert abs(steps[0][0].loss - truth) < 1e-12


def test_targets_chosen_by_their_values_are_counted() -> None:
    """A mean over the targets that a mask selects weighs microbatches by what it selects."""

    class Selecting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            chosen = y > x
            return F.cross_entropy(self.out(self.table(x))[chosen], y[chosen])

    torch.manual_seed(0)
    x, y = torch.randint(0, 31, (7, 6)), torch.randint(0, 31, (7, 6))
    y[:3, 1:] = 0  # few in the first microbatch
    for dp, microbatches in ((1, 1), (1, 3), (2, 1), (2, 2), (3, 3)):
        report = verify(Selecting(), [{"x": x, "y": y}] * 2, Plan.of(Mesh.of(dp=dp), microbatches=microbatches))
        assert report.passed, report.summary


def test_a_loss_that_is_not_finite_on_one_device_either_is_said() -> None:
    module = CASES["mlp"]()[0]
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    report = verify(module, [CASES["mlp"]()[1](4)], Plan.of(Mesh.of(dp=2)))
    assert not report.passed
    assert any("one device's own loss is nan at step 0" in note for note in report.notes)


@pytest.mark.slow
def test_dropout_curves_are_the_same_on_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    module = GPT(vocabulary=31, width=16, layers=2, heads=2, context=12, dropout=0.3)
    batches = [{k: v.clamp(max=30) for k, v in tokens(8).items()} for _ in range(6)]
    curves = []
    for dp in (1, 2, 4):
        compiled = Compiled(module, Plan.of(Mesh.of(dp=dp), precision="fp64"), batches[0])
        steps = run_threads(
            compiled, lambda comm, compiled=compiled: run_steps(compiled, comm, batches, OPTIMIZER, None, 7)
        )  # type: ignore[misc]
        curves.append([s.loss for s in steps[0]])
    assert max(abs(a - b) for other in curves[1:] for a, b in zip(curves[0], other, strict=True)) < 1e-12
    assert len({round(v, 6) for v in curves[0]}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_in_evaluation_mode_trains_on_both_sides(precision: Precision) -> None:
    """As ``from_pretrained`` gives it."""
    torch.manual_seed(0)
    module = GPT(vocabulary=11, width=8, layers=1, heads=2, context=4, dropout=0.3).eval()
    batch = {name: torch.randint(0, 11, (5, 4)) for name in ("input_ids", "labels")}
    report = verify(module, [batch], Plan.of(Mesh.of(dp=2), precision=precision))
    assert report.passed, report.worst
    assert not module.training


@pytest.mark.slow
def test_an_overflow_of_the_plan_alone_lowers_the_scale_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16: what one device sums in larger parts may overflow there later; a run would lower its scale."""
    torch.manual_seed(0)
    module = GPT(vocabulary=11, width=8, layers=1, heads=2, context=4)
    batch = {name: torch.randint(0, 11, (5, 4)) for name in ("input_ids", "labels")}
    scales: list[float] = []

    def overflowing(compiled: Compiled, comm: Any, *given: Any, **named: Any) -> list[VerifiedStep]:
        steps = run_steps(compiled, comm, *given, **named)
        if compiled.plan.numeric.precision == "fp16":
            scales.append(named["scale"].initial)
            if scales[-1] > 2.0**12:
                steps[0].gradients = {name: value / 0 for name, value in steps[0].gradients.items()}
        return steps

    monkeypatch.setattr("shardwise.verify.verify.run_steps", overflowing)
    report = verify(module, [batch], Plan.of(precision="fp16"))
    assert report.passed and min(scales) == 2.0**12 < max(scales), scales


def test_uncapturable_model_says_what_it_loses() -> None:
    torch.manual_seed(0)
    module, make, _ = CASES["data-dependent"]()
    report = verify(module.train(), [make(6)], Plan.of(Mesh.of(dp=2)))
    assert report.passed
    assert any("not captured" in note for note in report.notes)
    assert any("overlap" in note and "own rows" in note for note in report.notes)


class SomeRows(nn.Module):
    """Rows of one kind alone reach the second layer: on no rank, on some, or on all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.first(x)
        if float((kind == 1).sum()) > 0 and locals():  # no part may run as written: the model is not captured
            h = h + self.second(x) * (kind == 1)[:, None]
        return h.square().mean()


@pytest.mark.parametrize("kinds", [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 6])
def test_parameters_of_an_uncaptured_model_are_updated_where_any_rank_reached_them(kinds: list[int]) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(6, 4), "kind": torch.tensor(each)} for each in (kinds, [0, 1] * 3)]
    report = verify(SomeRows(), batches, Plan.of(Mesh.of(dp=2)))
    assert report.passed, report.worst
    assert any("not captured" in note for note in report.notes)


class Rounding(nn.Module):
    """A bias right before a BatchNorm has a gradient of pure rounding, from which Adam makes steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.norm(self.conv(x)).relu().mean((2, 3))), y)


def images() -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"x": torch.randn(12, 3, 6, 6), "y": torch.randint(0, 4, (12,))}


def test_what_is_rounding_on_one_device_has_a_limit_of_its_own() -> None:
    """With a small eps of Adam the bias moves by as much as any weight, in a direction that rounding decides."""
    small = OptimizerChoice("adamw", lr=1e-3, eps=1e-12)
    for dp, microbatches in ((2, 1), (3, 2)):
        report = verify(Rounding(), [images()] * 3, Plan.of(Mesh.of(dp=dp), microbatches=microbatches), optimizer=small)
        assert report.passed and report.largest > 1e-10, report.worst[:3]
        assert all(d.limit <= 1e-6 for d in report.worst)
        assert any("within 20 times what one device differs from itself" in note for note in report.notes)


def test_rounding_has_a_limit_where_random_numbers_belong_to_rows() -> None:
    module = Rounding()
    module.out = nn.Sequential(nn.Dropout(0.5), module.out)
    small = OptimizerChoice("adamw", lr=1e-3, eps=1e-12)
    report = verify(module, [images()] * 3, Plan.of(Mesh.of(dp=2)), optimizer=small)
    assert report.passed and report.largest > 1e-10, report.worst[:3]
    assert any("with the rows in another order" in note for note in report.notes)


class Vanishing(nn.Module):
    """Inputs so small that the first norms have their eps alone to divide by: each multiplies gradients by 316."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.norms = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.norms(self.scale * x.mean((2, 3)) @ torch.eye(3, 4))), y)


def test_a_model_that_multiplies_rounding_is_named_as_such() -> None:
    plan = Plan.of(Mesh.of(dp=2))
    assert verify(Vanishing(1.0), [images()], plan).passed
    report = verify(Vanishing(1e-14), [images()], plan)
    assert not report.passed and report.largest > 1e-4
    assert any("the model multiplies rounding" in note for note in report.notes)


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_a_limit_of_its_own_hides_no_error(monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
    statistics = norms._SyncBatchNorm.forward

    def wrong(ctx: Any, env: Any, x: Tensor, *rest: Any) -> Any:
        return statistics(ctx, env, x * (1 + 1e-7), *rest)

    monkeypatch.setattr(norms._SyncBatchNorm, "forward", staticmethod(wrong))
    module = Rounding()
    module.out = nn.Sequential(nn.Dropout(chance), module.out)
    report = verify(module, [images()] * 3, Plan.of(Mesh.of(dp=2)))
    assert not report.passed and not any("multiplies rounding" in note for note in report.notes)
