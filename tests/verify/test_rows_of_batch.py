"""Where rows meet, microbatches exchange as ranks do (``rows = "batch"``): any number of them gives the step of the
whole batch, which plain PyTorch computes in one piece."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from covering import covering
from harness import TOLERANCE, Run, Subject, errors, oracle_run, plain_run, planned_run
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Op
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

ROWS = 7


class Norms(nn.Module):
    """BatchNorms in blocks, with and without weights and running statistics, over images and over features.

    No bias comes before them: its gradient would be zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4, track_running_stats=i != 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, bias=False)
            )
            for i in range(3)
        )
        self.norm, self.head = nn.BatchNorm1d(4, affine=False, momentum=0.3), nn.Linear(4, 3)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), label)


class Towers(nn.Module):
    """In-batch negatives of two towers; each has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out, self.scale = nn.Linear(4, 5), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for one in self.left:
            x = x + one(x).tanh()
        for one in self.right:
            z = z + one(z).tanh()
        scores = self.scale * F.normalize(x, dim=-1) @ F.normalize(self.out(z), dim=-1).T
        right = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class Covariance(nn.Module):
    """VICReg's terms: variance and covariance of the features of the batch, and means in a product and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.body(x).tanh())
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(x) - 1)
        off = covariance.square().sum() - covariance.diagonal().square().sum()
        spread = F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
        return off + spread + z.square().mean() * z.exp().mean() + (z.mean(0).square().sum() + 1).sqrt()


class Supervised(nn.Module):
    """Each row attracts the others of its class (Khosla et al., arXiv 2004.11362)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = F.normalize(self.body(x), dim=-1)
        logits = z @ z.T / 0.5
        alike = (label[:, None] == label[None]).to(z.dtype) - torch.eye(len(x), dtype=z.dtype)
        scores = logits - (logits.exp() * (1 - torch.eye(len(x), dtype=z.dtype))).sum(1, keepdim=True).log()
        return -((alike * scores).sum(1) / alike.sum(1).clamp(min=1)).mean()


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    fields: tuple[str, ...]
    loss: Any = None


MODELS: dict[str, Case] = {
    "norms": Case(Norms, ("image", "label")),
    "towers": Case(Towers, ("x", "z")),
    "covariance": Case(Covariance, ("x",)),
    "supervised": Case(Supervised, ("x", "label")),
    "resnet": Case(lambda: zoo.make("resnet").module, ("pixel_values", "labels")),
    "mixtral": Case(lambda: zoo.make("mixtral balanced").module, ("input_ids", "labels")),
}


def batch(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)
    every = {
        **zoo.tokens(rows=rows),
        "image": torch.randn(rows, 3, 6, 6, generator=made), "label": torch.randint(0, 3, (rows,), generator=made),
        "x": torch.randn(rows, 5, generator=made), "z": torch.randn(rows, 4, generator=made),
        "pixel_values": zoo.images(rows),
    }  # fmt: skip
    if name == "resnet":
        every["labels"] = zoo.classes(rows)
    return {field: every[field] for field in MODELS[name].fields}


def in_fp64(name: str, rows: int) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch(name, rows).items()}


@functools.cache
def subject(name: str) -> Subject:
    torch.manual_seed(3)
    return Subject(MODELS[name].make(), batch(name), MODELS[name].loss)


@functools.cache
def truth(name: str) -> Run:
    """One device; torch has no kernel for what experts multiply in fp64, which the oracle of ``verify`` stands in for."""
    return oracle_run(subject(name)) if name == "mixtral" else plain_run(subject(name))


@functools.cache
def captured(name: str) -> Compiled:
    one = subject(name)
    return Compiled(one.module, Plan.of(precision="fp64"), one.batch, one.loss)


def planned(dp: int, zero: int, microbatches: int, recompute: Any, tp: int = 1, **more: Any) -> Plan:
    plan = Plan.of(microbatches=microbatches, recompute=recompute, precision="fp64", rows="batch", **more)
    plan = data_parallel(plan, dp, zero)
    return plan.replace(mesh=Mesh((*plan.mesh.axes, Axis("tp", tp)))) if tp > 1 else plan


EVERY = [
    case
    for case in itertools.product(
        MODELS, ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3)), (2, 3, 7), CHOICES["recompute"]
    )
]


def check(name: str, plan: Plan) -> None:
    compiled = captured(name).under(plan)
    assert compiled.general.shared and not compiled.general.meets and compiled.general.cuts_batch
    found = errors(planned_run(compiled, subject(name).batch), truth(name))
    worst = max(found, key=lambda n: found[n])
    assert found[worst] <= TOLERANCE, f"{worst} is off by {found[worst]:.1e}"


@pytest.mark.few(9)
@pytest.mark.parametrize("case", list(covering(EVERY)), ids=lambda c: "-".join(map(str, c)))
def test_every_number_of_microbatches_is_the_whole_batch(case: Any) -> None:
    """Uneven microbatches on uneven ranks, some without rows."""
    name, (dp, zero), microbatches, recompute = case
    check(name, planned(dp, zero, microbatches, recompute))


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda c: "-".join(map(str, c)))
def test_every_plan(case: Any) -> None:
    name, (dp, zero), microbatches, recompute = case
    check(name, planned(dp, zero, microbatches, recompute))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "dp", "zero"), [(2, 1, 0), (2, 2, 3), (3, 2, 0)])
def test_with_tensor_parallelism(name: str, tp: int, dp: int, zero: int) -> None:
    check(name, planned(dp, zero, 2, "selective", tp))


def test_several_steps_with_adam_and_batches_of_other_sizes() -> None:
    for name in ("norms", "towers"):
        one = subject(name)
        report = verify(
            one.module, [one.batch, *(in_fp64(name, rows) for rows in (5, 2))], planned(2, 3, 3, "full"), loss=one.loss,
            optimizer=OptimizerChoice("adamw", lr=1e-3),
        )  # fmt: skip
        assert report.passed, (name, report.worst[:3])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_low_precision(precision: Any) -> None:
    one = subject("covariance")
    plan = Plan.of(Mesh.of(dp=2), microbatches=3, precision=precision, rows="batch")
    assert verify(copy.deepcopy(one.module).float(), [batch("covariance")], plan).passed


def test_buffers_are_written_once_a_batch() -> None:
    """Running statistics are those of the whole batch, and so is their count."""
    found = planned_run(captured("norms").under(planned(2, 0, 3, "none")), subject("norms").batch)
    expected = truth("norms").state
    for name in (name for name in expected if "running" in name or "tracked" in name):
        torch.testing.assert_close(found.state[name], expected[name], rtol=1e-12, atol=1e-12)


def test_the_program_says_when_rows_meet() -> None:
    """All microbatches of a phase come before the exchange, and it runs once."""
    compiled = captured("covariance").under(planned(2, 0, 3, "none"))
    (program,) = compiled.programs(compiled.general, 3)
    units = compiled.general.units
    forward = [(units[one.unit].name, one.microbatch) for one in program.instructions if one.op is Op.FORWARD]
    first, *_ = [i for i, (name, _) in enumerate(forward) if name == "exchange 1"]
    assert [m for _, m in forward[:first]] == [0, 1, 2]
    assert sum(name == "exchange 1" for name, _ in forward) == 1
    backward = [one.microbatch for one in program.instructions if one.op is Op.BACKWARD]
    assert backward[-3:] == [2, 1, 0]


def test_nothing_changes_where_rows_do_not_meet() -> None:
    torch.manual_seed(0)
    one = zoo.make("own mlp")
    plans = [Plan.of(microbatches=2, rows=rows) for rows in ("microbatch", "batch")]
    compiled = [Compiled(one.module, plan, one.batch, one.loss) for plan in plans]
    texts = [[p.text() for p in c.programs(c.general, 2)] for c in compiled]
    assert texts[0] == texts[1]


def test_one_microbatch_needs_no_exchange() -> None:
    one = subject("towers")
    assert not Compiled(one.module, Plan.of(precision="fp64", rows="batch"), one.batch).general.shared


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_pipeline_is_refused() -> None:
    one = subject("norms")
    plan = Plan.of(Mesh.of(pp=2), microbatches=2, precision="fp64", rows="batch")
    with pytest.raises(ConfigError, match=r'pp: 2 are not legal with rows = "batch"'):
        Compiled(one.module, plan, one.batch)


class Rank(nn.Module):
    """The order of all rows matters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x).squeeze(-1)
        return (scores.softmax(0) * scores).sum()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y.mean() * 2 if bool((y > 100).any()) else y.mean()


def test_a_softmax_over_rows() -> None:
    """It is either right or refused by name."""
    torch.manual_seed(0)
    one = Subject(Rank(), {"x": batch("covariance")["x"]})
    plan = Plan.of(Mesh.of(dp=2), microbatches=2, precision="fp64", rows="batch")
    try:
        compiled = Compiled(one.module, plan, one.batch)
    except ConfigError as error:
        assert "softmax" in str(error), error  # noqa: PT017 - legal too
    else:
        assert max(errors(planned_run(compiled, one.batch), plain_run(one)).values()) <= TOLERANCE


def test_a_model_that_is_not_captured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'rows: "batch" is not possible: the model could not be captured'):
        Compiled(Branching(), Plan.of(microbatches=2, rows="batch"), {"x": batch("covariance")["x"]})
