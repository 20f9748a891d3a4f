"""Every instruction of real steps on the CPU: bytes before it and at its peak are, to the byte, what was predicted on
meta.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real import compiled, differences, measured, predicted
from torch import Tensor, nn

import zoo
from covering import covering
from shardwise.core.instruction import Buffer, Category
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.estimate.timeline import total
from shardwise.lower import messages
from shardwise.lower.compiled import Compiled
from shardwise.measure.unit_memory import profile
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from split import ORDERS, split

TRACED = ("precision", "tensor", "tp")  # what a trace depends on
HALTED = 4  # bytes of the flag that is there before the first step
KNOWN = [n for n in zoo.NAMES if n != "own tagger"]  # an LSTM is composed otherwise on meta, and said to be unknown
ONE: list[dict[str, Any]] = [
    {"precision": "fp32", "recompute": "none"}, {"precision": "fp32", "recompute": "full", "microbatches": 2},
    {"precision": "bf16", "recompute": "none", "microbatches": 2},
    {"precision": "bf16", "recompute": "full", "microbatches": 3},
    {"precision": "fp64", "recompute": "full"}, {"precision": "fp32", "recompute": "selective", "microbatches": 2},
    {"precision": "bf16", "recompute": "selective"}, {"precision": "fp16", "recompute": "selective", "zero": 3},
]  # fmt: skip
SEVERAL: list[dict[str, Any]] = [
    {"ranks": 2, "zero": 3, "recompute": "selective", "microbatches": 2, "precision": "bf16"},
    {"ranks": 3, "zero": 2, "recompute": "full", "microbatches": 2, "reduce": "bf16", "reduced": "step"},
    {"ranks": 3, "zero": 1, "precision": "fp64", "offload": "optimizer"},
    {"ranks": 4, "zero": 3, "replicas": 2, "gathered": "step", "prefetch": 0, "recompute": "selective"},
    {
        "ranks": 2,
        "zero": 3,
        "gathered": "forward",
        "prefetch": 3,
        "precision": "fp16",
        "microbatches": 3,
        "offload": "optimizer",
    },
    {"ranks": 2, "zero": 0, "precision": "bf16", "reduce": "bf16"},
]
FEW = [
    "own gpt",
    "own llama",
    "own mlp",
    "own convnet",
    "own pairs",
    "bert",
    "mixtral balanced",
    "resnet",
    "vit",
    "mixtral",
]


def case(one: dict[str, Any]) -> str:
    return " ".join(str(value) if isinstance(value, str) else f"{key}={value}" for key, value in one.items())


def made(name: str, one: dict[str, Any]) -> tuple[Compiled, dict[str, Tensor]]:
    """A model under a plan, with a batch in its precision: each rank has a row of each microbatch, some have two."""
    subject = traced(name, planned({k: v for k, v in one.items() if k in TRACED})).under(planned(one))
    return subject, dict(subject.example)


@functools.cache
def alone(name: str, precision: Any) -> Compiled:
    """Its capture serves all plans of this precision."""
    model = zoo.make(name)
    batch = {k: v.double() if precision == "fp64" and v.is_floating_point() else v for k, v in model.batch.items()}
    return Compiled(model.module, planned({"precision": precision}), batch, model.loss)


@functools.cache
def traced(name: str, plan: Plan) -> Compiled:
    """A trace serves all plans with these tensor axes."""
    return alone(name, plan.numeric.precision).under(plan)


def planned(one: dict[str, Any]) -> Plan:
    fields = {k: v for k, v in one.items() if k not in ("ranks", "zero", "replicas", "pp", "schedule", "tp")}
    plan = data_parallel(Plan.of(**fields), one.get("ranks", 1), one.get("zero", 0), one.get("replicas", 1))
    if "pp" in one:
        plan = pipeline(plan, one["pp"], one["schedule"])
    sizes = one.get("tp", {})
    axes = {"tp": sizes} if isinstance(sizes, int) else sizes
    return plan.replace(mesh=Mesh((*plan.mesh.axes, *(Axis(name, size) for name, size in axes.items()))))


def cases() -> Iterator[Any]:
    """All plans with all models; without ``full`` every plan with two of the few, each of them with several plans."""
    for i, (name, one) in enumerate(itertools.product(KNOWN, [*ONE, *SEVERAL])):
        chosen = name in FEW and (FEW.index(name) + i) % 4 == 0
        yield pytest.param(name, one, id=f"{name} {case(one)}", marks=() if chosen else pytest.mark.full)


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "one"), cases())
def test_every_instruction(name: str, one: dict[str, Any]) -> None:
    """On every rank, with model states and slots."""
    subject, batch = made(name, one)
    assert subject.general.opaque is None
    assert differences(subject, batch) == []


Sharded = tuple[str, str, int, int, int, int, str, int]
SHARDED: list[Sharded] = [
    (name, kind, tp, ranks, zero, pp, recompute, m)
    for name, kind, tp, (ranks, zero), pp, recompute, m in itertools.product(
        ("own gpt", "own llama", "bert", "own mlp", "gpt2"), ("1d", "1d-sp"), (2, 3), ((1, 0), (2, 0), (2, 3)), (1, 2),
        CHOICES["recompute"], (1, 2),
    )
    if name != "own mlp" or pp == 1
]  # fmt: skip


def sharded(one: Sharded) -> None:
    name, kind, tp, ranks, zero, pp, recompute, m = one
    fields = {"pp": pp, "schedule": "1f1b", "recompute": recompute, "microbatches": m}
    subject, batch = made(name, {"tensor": kind, "tp": tp, "ranks": ranks, "zero": zero, **fields})
    assert differences(subject, batch) == []


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize("one", list(covering(SHARDED)), ids=lambda one: "-".join(map(str, one)))
def test_every_instruction_under_tensor_parallelism(one: Sharded) -> None:
    """Shards of parameters and activations, even and uneven, and what collectives copy on their way."""
    sharded(one)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), pytest.param(2, 3, marks=pytest.mark.full)])
def test_every_instruction_with_shared_heads(ranks: int, zero: int) -> None:
    """Two heads of keys and values over four ranks."""
    sharded(("own llama", "1d-sp", 4, ranks, zero, 1, "selective", 2))


@pytest.mark.slow
def test_every_instruction_with_parts_cut_each_by_itself() -> None:
    sharded(("own fused", "1d", 2, 2, 3, 1, "selective", 2))


def test_the_rank_that_is_named_holds_most() -> None:
    """Of three ranks the last has two of four heads, and eleven of 31 words."""
    subject, batch = made("own gpt", {"tensor": "1d", "tp": 3})
    real = [one.peak for one in measured(subject, batch)]
    named = predicted(subject, batch, rank=None)
    assert named.rank == 2 and named.peak_bytes == real[2] == max(real) > 1.2 * min(real)


@pytest.mark.full
@pytest.mark.parametrize("one", SHARDED, ids=lambda one: "-".join(map(str, one)))
def test_every_instruction_of_every_tensor_plan(one: Sharded) -> None:
    sharded(one)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("own gpt", {"tensor": "2d", "tp": {"tp_i": 2, "tp_j": 2}, "recompute": "full", "microbatches": 2}),
        ("own llama", {"tensor": "2.5d", "tp": {"tp_d": 2, "tp_i": 2, "tp_j": 2}, "recompute": "none"}),
        ("own gpt", {"tensor": "3d", "tp": {"tp_i": 2, "tp_j": 2, "tp_l": 2}, "recompute": "selective"}),
        ("own llama", {"tensor": "2d", "tp": {"tp_i": 2, "tp_j": 2}, "ranks": 2, "zero": 3, "recompute": "none"}),
        ("own mlp", {"tensor": "3d", "tp": {"tp_i": 2, "tp_j": 2, "tp_l": 2}, "recompute": "full", "microbatches": 2}),
        ("own llama", {"tensor": "2d", "tp": {"tp_i": 3, "tp_j": 3}, "recompute": "selective"}),
    ],
    ids=lambda one: one if isinstance(one, str) else case(one),
)
def test_every_instruction_over_several_axes(name: str, one: dict[str, Any]) -> None:
    subject, batch = made(name, one)
    assert differences(subject, batch) == []


@pytest.mark.full
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    "one",
    [
        {"tp": 3, "tensor": "1d-sp", "recompute": "selective", "precision": "bf16"},
        {"tp": 2, "tensor": "1d", "ranks": 2, "zero": 3, "recompute": "full", "microbatches": 2},
        {"tp": 4, "tensor": "1d-sp", "precision": "fp64"},
    ],
    ids=case,
)
def test_every_instruction_of_every_model_under_tensor_parallelism(name: str, one: dict[str, Any]) -> None:
    subject, batch = made(name, one)
    assert differences(subject, batch) == []


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_product_of_inputs_is_not_held_until_backward(recompute: Any) -> None:
    batch = {"x": torch.randn(5, 8)}
    subject = compiled(zoo.Chain(), batch, None, "fp32", 1, recompute)
    assert differences(subject, batch) == []
    first, middle, *_ = profile(subject.general, 5).units
    assert first.none.kept == middle.none.kept == 0  # relu keeps its result, which the next one takes


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.0), ("fp32", 0.1), ("bf16", 0.0)])
def test_torch_s_own_allocator_agrees(precision: str, dropout: float, tmp_path: Path) -> None:
    """Temporaries inside kernels, which the tracker cannot see, are nothing at the peak of a GPT: torch's profiler sees
    all.
    """
    torch.manual_seed(0)
    # Large enough that scores and masks are worked on in several pieces, of which the prediction walks the first two.
    module = GPT(vocabulary=8192, width=64, layers=2, heads=4, context=192, dropout=dropout)
    batch = {n: torch.randint(0, 8192, (4, 192)) for n in ("input_ids", "labels")}
    subject = compiled(module, batch, None, precision)

    def rank(comm: Any) -> int:
        engine = Engine(subject, comm, OptimizerChoice("adamw", lr=0.0))
        engine.step(batch, 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            engine.step(batch, 4)
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
        return max(itertools.accumulate(size for _, size in sorted(changes, key=lambda c: c[0])))

    real = run_ranks(subject.plan.mesh, rank, timeout=60)[0]
    assert (
        abs(predicted(subject, batch).timeline.peak_bytes - held_before(subject, batch) - real) <= 64
    )  # the step's scalars


def held_before(subject: Compiled, batch: dict[str, Tensor]) -> int:
    """What is there before the step, its scalars left out."""
    return sum(n for b, n in predicted(subject, batch).persistent.items() if b.kind != "scalar")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    [OptimizerChoice("adamw"), OptimizerChoice("adamw", ema=0.9), OptimizerChoice("nadam", weight_decay=0.1)],
    ids=["adamw", "adamw with an average", "nadam"],
)
def test_a_whole_step_with_model_states(optimizer: OptimizerChoice, precision: str) -> None:
    """From before the engine is made: AdamW's peak is in backward, NAdam's in the update, which copies what it may
    undo.
    """
    torch.manual_seed(0)
    module = GPT(vocabulary=512, width=64, layers=2, heads=4, context=32)
    batch = {n: torch.randint(0, 512, (4, 32)) for n in ("input_ids", "labels")}
    subject = compiled(module, batch, None, precision, 1, "full")
    ours, (real,) = predicted(subject, batch, optimizer), measured(subject, batch, optimizer)
    assert ("updating" in ours.at) == (optimizer.name == "nadam")
    assert real.made == sum(n for b, n in ours.persistent.items() if b.kind not in ("batch", "scalar")) + HALTED
    assert 0 <= real.peak - ours.peak_bytes <= (16 if optimizer.name == "nadam" else 0)  # scalars of NAdam's update


@pytest.mark.slow
def test_an_op_that_meta_composes_otherwise_is_named() -> None:
    model = zoo.make("own tagger")
    subject = compiled(model.module, model.batch, model.loss)
    assert profile(subject.general, 7).units[0].unknown == ("aten.lstm.input",)
    assert differences(subject, model.batch)


@pytest.mark.slow
def test_recomputation_microbatches_and_stages_show_in_the_peak() -> None:
    """Not only do both sides agree: less is held where less is to be held."""
    peaks = {}
    for recompute, microbatches in (("none", 1), ("none", 2), ("selective", 1), ("full", 1)):
        subject, batch = made("own gpt", {"recompute": recompute, "microbatches": microbatches})
        ours, (truth,) = predicted(subject, batch), measured(subject, batch)
        assert ours.peak_bytes == truth.peak
        peaks[recompute, microbatches] = ours.peak[Category.ACTIVATIONS] + ours.peak[Category.TEMPORARY]
    assert peaks["full", 1] < 0.9 * peaks["selective", 1] < 0.8 * peaks["none", 1]
    assert peaks["none", 2] < 0.7 * peaks["none", 1]
    states = [total(predicted(made("own gpt", {"ranks": 4, "zero": zero})[0], batch).states) for zero in range(3)]
    assert states[1] < 0.75 * states[0]


def cases_in_two_parts() -> Iterator[Any]:
    """Every order of the parts with every model; without ``full`` each model in one order."""
    names = ["own gpt", "own llama", "own mlp", "own convnet", "gpt2", "mixtral"]
    for (i, name), (j, order) in itertools.product(enumerate(names), enumerate(ORDERS)):
        plan = [*ONE, *SEVERAL][(i + 3 * j) % len([*ONE, *SEVERAL])]
        yield pytest.param(
            name, order, plan, id=f"{name} {order}", marks=() if i % len(ORDERS) == j else pytest.mark.full
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "order", "one"), cases_in_two_parts())
def test_every_instruction_of_backwards_in_two_parts(name: str, order: str, one: dict[str, Any]) -> None:
    for plan in (one, {"precision": "bf16", "microbatches": 3}):
        with split(order):
            subject, batch = made(name, plan)
            assert differences(subject, batch) == [], plan


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe-v")


def pipelines() -> Iterator[Any]:
    """Every schedule with every way to recompute, with and without ZeRO-3, on tied and untied models; few of them
    without ``full``.
    """
    few = {
        ("own gpt", "1f1b", "none", 1),
        ("own llama", "1f1b", "selective", 2),
        ("own llama", "interleaved", "full", 1),
    }
    few |= {("own gpt", "zb-h1", "full", 1), ("own gpt", "zbv", "selective", 1), ("own llama", "zbv", "none", 2)}
    for name, schedule, recompute, ranks in itertools.product(
        ("own gpt", "own llama"), SCHEDULES, ("none", "selective", "full"), (1, 2)
    ):
        one: dict[str, Any] = {"pp": 2, "schedule": schedule, "recompute": recompute, "microbatches": 3}
        one |= {"ranks": 2, "zero": 3} if ranks > 1 else {}
        chosen = (name, schedule, recompute, ranks) in few
        yield pytest.param(name, one, id=f"{name} {case(one)}", marks=() if chosen else pytest.mark.full)
    for name, one in (
        ("own gpt", {"pp": 3, "schedule": "1f1b", "microbatches": 7, "precision": "bf16"}),
        ("own llama", {"pp": 2, "schedule": "zbv", "microbatches": 3, "ranks": 2, "zero": 1, "precision": "bf16"}),
        ("own gpt", {"pp": 2, "schedule": "zb-h1", "microbatches": 3, "ranks": 2, "zero": 2, "recompute": "full"}),
        ("mixtral", {"pp": 2, "schedule": "1f1b", "microbatches": 3, "precision": "fp16", "ranks": 2, "zero": 3}),
    ):
        yield pytest.param(name, one, id=f"{name} {case(one)}", marks=pytest.mark.full)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "one"), pipelines())
def test_every_instruction_of_a_pipeline(name: str, one: dict[str, Any]) -> None:
    """On every rank of every stage: also what is received, and what is sent until it is known to have arrived."""
    subject, batch = made(name, one)
    assert differences(subject, batch) == []


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("own llama", {"pp": 2, "schedule": "pipedream", "microbatches": 1}),
        ("own llama", {"pp": 3, "schedule": "pipedream-2bw", "microbatches": 3, "recompute": "full"}),
        ("own llama",
        {"pp": 2, "schedule": "zbv", "microbatches": 3, "ranks": 2, "zero": 1, "precision": "bf16",
        "norm": "post-validate"}),
        ("own gpt", {"pp": 3, "schedule": "zb-h2", "microbatches": 5, "ranks": 2, "zero": 3, "norm": "post-validate"}),
        ("own mlp", {"pp": 2, "schedule": "1f1b", "microbatches": 3, "norm": "post-validate"}),
    ],
)  # fmt: skip
def test_every_instruction_of_batches_that_overlap(name: str, one: dict[str, Any]) -> None:
    """Old weights, backups, rows of several batches; but for what a verdict is made of, which depends on whether a run
    clips.
    """
    subject, batch = made(name, one)
    assert differences(subject, batch, scalars=6) == []


@pytest.mark.slow
def test_going_back_takes_nothing_more() -> None:
    """All that forwards have left which are run again ends with them, also what an op of autograd keeps of its own
    result.
    """
    for name, recompute in (("own gpt", "none"), ("own llama", "selective")):
        one = {"pp": 2, "schedule": "1f1b", "microbatches": 3, "norm": "post-validate", "recompute": recompute}
        subject, batch = made(name, one)
        expected = [predicted(subject, batch, rank=rank).timeline.peak_bytes for rank in range(2)]
        for rank, real in enumerate(measured(subject, batch, clip_norm=1e-6)):
            assert len(real.seen) > len(predicted(subject, batch, rank=rank).program.instructions)
            assert real.peak <= expected[rank] + 64


def held_by_the_last_stage(microbatches: int) -> int:
    """Bytes beside model states and batch at the peak, where each microbatch is a row."""
    subject, batch = made("own mlp", {"pp": 2, "schedule": "1f1b", "microbatches": microbatches, "recompute": "full"})
    found = predicted(subject, {n: v[:1].repeat(microbatches, *[1] * (v.dim() - 1)) for n, v in batch.items()}, rank=1)
    return found.peak[Category.ACTIVATIONS] - found.persistent[Buffer("batch")]


@pytest.mark.slow
def test_a_stage_does_not_hold_what_others_have_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that a stage has sent end while the step goes on: however many microbatches there are, as many are
    held.
    """
    assert held_by_the_last_stage(4) == held_by_the_last_stage(7)
    monkeypatch.setattr(messages._Arrived, "known", lambda *_: messages.NEVER)
    assert held_by_the_last_stage(4) < held_by_the_last_stage(7)


class Scaled(nn.Module):
    """A cross-entropy whose gradient is not that of the loss: backward multiplies all of its scores' gradients."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.table, self.head = scale, nn.Embedding(16, 8), nn.Linear(8, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.table(ids)), labels)
        return loss if self.scale == 1 else loss * self.scale


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_loss_that_is_scaled_takes_a_copy_of_the_gradients_of_scores(scale: float) -> None:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 16, (32,)), "labels": torch.randint(0, 64, (32,))}
    subject = compiled(Scaled(scale), batch)
    assert differences(subject, batch) == []
