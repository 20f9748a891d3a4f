"""Pipelines equal one device under every schedule, and schedules with the same order of sums equal each other."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from models import CASES, captured, deep, tokens
from shardwise.core.check import ProgramError
from shardwise.core.errors import ConfigError
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.schedules import AUTO, SCHEDULES
from shardwise.core.timetable import to_texts
from shardwise.estimate.search import auto
from shardwise.estimate.simulate import Costs
from shardwise.lower import messages as lowering_of_messages
from shardwise.lower import step as lowering
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.schedule import timetable
from shardwise.runtime.engine import Engine
from shardwise.verify.oracle import Oracle, OracleStep, plain_optimizer
from shardwise.verify.verify import OPTIMIZER, TOLERANCE, VerifiedStep, compare, run_steps, run_threads, verify
from timetables import SYNCHRONOUS, any_order

MODELS = ("gpt", "llama", "gpt2")
PP, ZERO, DP, RECOMPUTE = (2, 3, 4), (0, 1, 2, 3), (1, 2), CHOICES["recompute"]
ROWS = (19, 11)  # of the batches; 9 microbatches over 2 ranks: some have nothing
CLIP = 1.0

Case = tuple[str, str, int, int, int, int, str]


def times(schedule: str, pp: int) -> tuple[int, ...]:
    return (1,) if SCHEDULES[schedule].max_microbatches == 1 else (pp, 2 * pp, 2 * pp + 1)


SHAPES = [
    (name, schedule, pp, m, zero, dp)
    for name, schedule, pp, zero, dp in itertools.product(MODELS, SYNCHRONOUS, PP, ZERO, DP)
    for m in times(schedule, pp)
    if dp > 1 or zero == 0
]
EVERY: list[Case] = [(*shape, recompute) for shape in SHAPES for recompute in RECOMPUTE]
PRODUCT: list[Case] = [(*shape, RECOMPUTE[i % 3]) for i, shape in enumerate(SHAPES)]


def columns(case: Case) -> tuple[Any, ...]:
    """Of microbatches how many more than twice the ranks: each schedule and number of ranks has others."""
    name, schedule, pp, m, *rest = case
    return name, schedule, pp, m - 2 * pp if m > 1 else "one", *rest


@functools.cache
def subject(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], Compiled]:
    """A model of 8 units in training mode, its batches, and its capture in fp64, which serves all plans."""
    torch.manual_seed(len(name))
    module, make = deep(name, 6)
    batches = [make(rows) for rows in ROWS]
    return module.train(), batches, Compiled(module, Plan.of(precision="fp64"), batches[0])


@functools.cache
def truth(name: str, microbatches: int) -> list[OracleStep]:
    module, batches, _ = subject(name)
    oracle = Oracle(
        module,
        None,
        plain_optimizer(OPTIMIZER),
        microbatches=microbatches,
        seed=0,
        clip_norm=CLIP,
        group_of=OPTIMIZER.group_of,
    )
    return [oracle.step(batch, OPTIMIZER.learning_rate(i)) for i, batch in enumerate(batches)]


def plan_of(case: Case) -> Plan:
    _, schedule, pp, m, zero, dp, recompute = case
    base: Any = Plan.of(microbatches=m, recompute=recompute, precision="fp64")
    return pipeline(data_parallel(base, dp, zero), pp, schedule)


def steps(name: str, plan: Plan) -> list[list[VerifiedStep]]:
    _, batches, compiled = subject(name)
    mine = compiled.under(plan)
    return run_threads(mine, lambda comm: run_steps(mine, comm, batches, OPTIMIZER, CLIP, 0, only=0))


def check(case: Case) -> None:
    ours = steps(case[0], plan_of(case))
    found = compare(ours[0], truth(case[0], case[3]))
    assert len(found.differences) > 100
    assert found.passes(TOLERANCE), (found.largest, found.worst(3))
    for rank in ours[1:]:
        assert all(torch.equal(value, rank[-1].parameters[n]) for n, value in ours[0][-1].parameters.items())


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("case", list(covering(EVERY, columns)), ids=lambda case: "-".join(map(str, case)))
def test_a_pipeline_equals_one_device(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: "-".join(map(str, case)))
def test_every_pipeline_equals_one_device(case: Case) -> None:
    check(case)


def test_a_plan_takes_every_schedule() -> None:
    assert CHOICES["schedule"] == (*SCHEDULES, AUTO)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_schedules_with_the_same_order_of_sums_agree_bitwise(name: str) -> None:
    """A stage adds the gradients of microbatches in their order, whatever lies between.

    Where the first and the last stage are on one rank (a V), what both add to a tied weight takes turns as the schedule
    has it.
    """
    tied = name != "llama"
    found = {}
    for schedule in SYNCHRONOUS:
        kind = SCHEDULES[schedule]
        if kind.max_microbatches == 1 or (tied and kind.v_shaped):
            continue
        plan = Plan.of(microbatches=6, precision="fp64")
        found[schedule] = steps(name, pipeline(plan, 4 // kind.stages_per_rank, schedule, stages=(2, 2, 2, 2)))[0]
    assert len(found) >= 5
    one = found.pop("gpipe")
    for schedule, other in found.items():
        for a, b in zip(one, other, strict=True):
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm), schedule
            assert all(torch.equal(a.gradients[n], b.gradients[n]) for n in a.gradients), schedule
            assert all(torch.equal(a.parameters[n], b.parameters[n]) for n in a.parameters), schedule


# ---- what crosses the cuts -------------------------------------------------------------------------------------------


class Compares(nn.Module):
    """Another layer's output is only compared, and has no gradient from here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        return self.layer(h) * (1 + (other > 0))


class Skips(nn.Module):
    """Several tensors cross each cut: one skips stages, one needs no gradient, one is only compared, one is an integer;
    one weight is used everywhere.
    """

    def __init__(self, width: int = 10, layers: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width), *(Compares(width) for _ in range(layers - 1))])
        self.shared = nn.Linear(width, width)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        first = h = self.embedding(input_ids)
        gate = (h.detach().sum(-1, keepdim=True) > 0).to(h.dtype)
        length = (input_ids > 3).sum(1)
        second = h = torch.tanh(self.blocks[0](h) + self.shared(h)) * (1 + gate)
        for block in self.blocks[1:]:
            h = torch.tanh(block(h, second) + self.shared(h)) * (1 + gate)
        h = self.frozen(h + first) / (1 + length)[:, None, None]
        return nn.functional.cross_entropy(
            nn.functional.linear(h, self.embedding.weight).flatten(0, 1), labels.flatten()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "pp", "zero"),
    [("1f1b", 3, 0), ("zbv", 3, 3), ("interleaved", 2, 2), ("dualpipe-v", 2, 1), ("zb-h2", 5, 0)],
)
def test_tensors_that_skip_stages_and_weights_that_many_share(schedule: str, pp: int, zero: int) -> None:
    torch.manual_seed(0)
    dp = 2 if zero else 1
    plan = pipeline(data_parallel(Plan.of(microbatches=5), dp, zero), pp, schedule)
    report = verify(
        Skips(),
        [{k: v % 31 for k, v in tokens(rows).items() if k in ("input_ids", "labels")} for rows in (12, 11)],
        plan,
    )
    assert report.passed, (report.largest, report.worst[:3])
    assert report.ranks_agree


class TiedHeads(nn.Module):
    """Layers of the first stage are used once more by the last one, in an order of its own."""

    def __init__(self, again: tuple[int, ...]) -> None:
        super().__init__()
        tied = [nn.Linear(6, 6) for _ in again]
        every = [*tied, *(nn.Linear(6, 6) for _ in range(4)), *(tied[i] for i in again)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), one, nn.Tanh()) for one in every)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("again", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_tied_weights_whose_gradients_are_complete_in_any_order(again: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 6)} for rows in (7, 5)]
    report = verify(TiedHeads(again), batches, pipeline(Plan.of(microbatches=2), 3 if again[0] else 2))
    assert report.passed, report.worst[:3]


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["conv", "mixtral", "mlp", "bert", "vit", "llama-padded", "static"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_other_models(name: str, schedule: str) -> None:
    one, make, loss = captured(name)
    torch.manual_seed(0)
    plan = pipeline(data_parallel(Plan.of(microbatches=3), 2, 1), 2, schedule)
    report = verify(one.module, [make(rows) for rows in (13, 12, 7)], plan, loss=loss, captured=one)
    assert report.passed, (report.largest, report.worst[:3])
    assert report.ranks_agree


# ---- clipping --------------------------------------------------------------------------------------------------------

TIED: list[Case] = [
    ("gpt", "1f1b", 2, 4, 0, 1, "none"),
    ("gpt", "zb-h1", 4, 4, 1, 2, "full"),
    ("gpt2", "interleaved", 2, 5, 3, 2, "none"),
]


def norms(case: Case, clip_norm: float) -> list[list[float]]:
    """Of each rank's steps."""
    compiled = subject(case[0])[2].under(plan_of(case))
    return [
        [step.grad_norm for step in rank]
        for rank in run_threads(
            compiled, lambda comm: run_steps(compiled, comm, subject(case[0])[1], OPTIMIZER, clip_norm, 0)
        )
    ]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("case", TIED, ids=lambda case: "-".join(map(str, case)))
def test_clipping_counts_weights_that_several_stages_have_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks clip by the norm that one device has, with a limit that clips every step (so that later norms follow
    from it).
    """
    name, m = case[0], case[3]
    module, batches, _ = subject(name)
    oracle = Oracle(
        module,
        None,
        plain_optimizer(OPTIMIZER),
        microbatches=m,
        seed=0,
        clip_norm=CLIP / 20,
        group_of=OPTIMIZER.group_of,
    )
    truth = [oracle.step(batch, OPTIMIZER.learning_rate(i)).grad_norm for i, batch in enumerate(batches)]
    assert min(truth) > 2 * CLIP / 20
    for rank in norms(case, CLIP / 20):
        assert rank == pytest.approx(truth, rel=TOLERANCE, abs=0)
    monkeypatch.setattr(Engine, "counts", lambda *_: True)  # control: every stage counts what it has
    assert norms(case, CLIP / 20)[0] != pytest.approx(truth, rel=1e-4, abs=0)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused() -> None:
    module, batches, _ = subject("gpt")
    with pytest.raises(ConfigError, match=r"pp: 9 stages, but the model is cut into 8 blocks .*: at most 8"):
        Compiled(module, pipeline(Plan.of(), 9), batches[0])
    with pytest.raises(ConfigError, match=r"stages: \[3, 4\] are 7 blocks; legal: 8 in all: head, blocks.0"):
        Compiled(module, pipeline(Plan.of(), 2, stages=(3, 4)), batches[0])
    with pytest.raises(ConfigError, match=r"stages: \[8\] are 1 stages; legal: 2"):
        pipeline(Plan.of(), 2, stages=(8,))
    with pytest.raises(ConfigError, match=r'stages_per_rank: 1 is not legal with schedule "zbv"; legal: 2'):
        pipeline(Plan.of(), 2, "zbv", 1)
    with pytest.raises(ConfigError, match=r'microbatches: 2 is not legal with schedule "naive"'):
        pipeline(Plan.of(microbatches=2), 2, "naive")
    torch.manual_seed(0)
    opaque, make, loss = CASES["data-dependent"]()
    with pytest.raises(ConfigError, match=r"pp: a model that could not be captured cannot be cut into stages"):
        Compiled(opaque, pipeline(Plan.of(), 2), make(4), loss)
    captured = Compiled(module, pipeline(Plan.of(), 2), batches[0])
    beside = captured.beside(lambda output, batch: output if float(output) > 0 else -output, batches[0], backward=False)
    with pytest.raises(ConfigError, match=r"pp: a model that could not be captured cannot be cut into stages"):
        beside.stages_of(beside.general)


class Picks(nn.Module):
    """The positions that the first block picks by value are what the second works on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.blocks[0](self.embedding(input_ids)).flatten(0, 1)
        h = h[torch.nonzero(h.sum(1) > 0).squeeze(1)]
        return self.blocks[1](h).square().sum() / 100


def test_a_size_that_depends_on_data_does_not_cross() -> None:
    batch = {"input_ids": tokens(6)["input_ids"] % 31}
    assert Compiled(Picks(), Plan.of(), batch).general.opaque is None
    two = Compiled(Picks(), pipeline(Plan.of(), 2, stages=(2, 2)), batch)
    with pytest.raises(
        ConfigError, match=r"pp: the size of a tensor that .* makes and another stage reads depends on data"
    ):
        two.programs(two.general, 1)


# ---- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_of_tied_weights_that_are_not_summed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tied", "shared", "parts"):
        monkeypatch.setattr(lowering, name, lambda *args: iter(()))
    ours = steps("gpt", pipeline(Plan.of(microbatches=3, precision="fp64"), 2))
    assert not compare(ours[0], truth("gpt", 3)).passes(TOLERANCE)


@pytest.mark.slow
def test_messages_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lowering_of_messages._receive
    monkeypatch.setattr(lowering_of_messages, "_receive", lambda here, mine, *rest: original(here, mine[::-1], *rest))
    with pytest.raises(ProgramError, match="mismatched messages"):
        steps("gpt", pipeline(Plan.of(microbatches=3, precision="fp64"), 2))


# ---- orders of one's own ---------------------------------------------------------------------------------------------


HOMES = ((0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (0, 1, 1, 0), (1, 0, 1, 0), (0, 2, 1, 1, 0, 2))
"""Ranks of stages: round, in a V, and as no schedule has them."""


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(len(HOMES)))
def test_any_order_that_can_be_computed_equals_one_device(seed: int) -> None:
    """Also of a batch with fewer rows than microbatches."""
    home, m, dp = HOMES[seed], 4, 1 + seed % 2
    ranks = 1 + max(home)
    order = any_order(home, m, random.Random(seed))
    base: Any = Plan.of(microbatches=m, recompute=RECOMPUTE[seed % 3], precision="fp64")
    plan = pipeline(data_parallel(base, dp, seed % 4 if dp > 1 else 0), ranks, "auto", timetable=to_texts(order))
    plan = Plan.from_toml(plan.to_toml())
    name = MODELS[seed % 3]
    compiled = subject(name)[2]
    found = compare(steps(name, plan)[0], truth(name, m))
    assert len(found.differences) > 100
    assert found.passes(TOLERANCE), (found.largest, found.worst(3))
    few = verify(compiled.module, [tokens(3), tokens(9)], plan.replace(precision="fp32"), captured=compiled)
    assert few.passed


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "v", "m", "seed"), [(2, 1, 4, 3), (2, 2, 4, 1), (3, 1, 5, 7), (3, 2, 6, 5)])
def test_what_auto_finds_equals_one_device(pp: int, v: int, m: int, seed: int) -> None:
    """With times that no named schedule is best for."""
    draw = random.Random(seed)
    seconds = [[draw.uniform(0.5, 2) for _ in range(pp * v)] for _ in range(3)]
    order = auto(pp, m, Costs(*seconds, transfer=[0.2] * (pp * v - 1)), events=50_000).timetable
    named = [name for name in SYNCHRONOUS if SCHEDULES[name].takes(v) and SCHEDULES[name].max_microbatches is None]
    assert order not in [timetable(name, pp, m, v) for name in named]
    plan = pipeline(Plan.of(microbatches=m, precision="fp64"), pp, "auto", timetable=to_texts(order))
    found = compare(steps("gpt", plan)[0], truth("gpt", m))
    assert found.passes(TOLERANCE), (found.largest, found.worst(3))
