"""Model states: against what an engine's buckets really hold, and against the tables of Rajbhandari et al. (2019)."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import zoo
from shardwise.core.flat import FlatBuffer
from shardwise.core.mesh import Mesh
from shardwise.core.optim import FUSED, OptimizerChoice
from shardwise.core.plan import DATA_PARALLEL_ROWS
from shardwise.estimate.states import (
    UPDATE_TENSORS,
    ZERO,
    Widths,
    bucket_states,
    model_states,
    step_peak,
    widths,
)
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.optimizer import FlatOptimizer, Segment, torch_optimizer
from shardwise.runtime.threads import run_ranks
from shardwise.trace.trace import Bucket, trace
from shardwise.trace.tracker import StorageTracker

OPTIMIZERS = (
    OptimizerChoice("adamw"), OptimizerChoice("adam", weight_decay=0.1), OptimizerChoice("sgd"), OptimizerChoice("sgd",
    momentum=0.9), OptimizerChoice("adagrad"), OptimizerChoice("rmsprop"), OptimizerChoice("rmsprop", momentum=0.9,
    weight_decay=0.1), OptimizerChoice("nadam"), OptimizerChoice("nadam", weight_decay=0.1), OptimizerChoice("radam"),
    OptimizerChoice("radam", weight_decay=0.1),
)  # fmt: skip


def published(name: str) -> Iterator[dict[str, str]]:
    lines = (Path(__file__).parent / "published" / name).read_text().splitlines()
    return csv.DictReader(line for line in lines if not line.startswith("#"))


# ---- real buffers ------------------------------------------------------------------------------------------------------


def held(memory: BucketMemory) -> tuple[int, int, int]:
    """Bytes of storages: parameters, gradients, and masters with optimizer state."""
    state = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for ts in memory.optimizer.state_dict().values() for t in ts
    }
    master = 0 if memory.master is memory.param else memory.master.untyped_storage().nbytes()
    return memory.param.untyped_storage().nbytes(), memory.grad.untyped_storage().nbytes(), master + sum(state.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("choice", OPTIMIZERS, ids=lambda c: f"{c.name} {c.momentum} {c.weight_decay}")
def test_predicted_states_are_those_allocated(choice: OptimizerChoice, precision: str) -> None:
    model = zoo.make("own convnet")
    found = trace(model.module, model.batch, loss=model.loss, precision=precision)

    def check(bucket: Bucket, memory: BucketMemory) -> None:
        layout = bucket.layout(choice)
        assert layout == memory.layout
        each = widths(choice, bucket.dtype.itemsize, bucket.wide.itemsize)
        ours = bucket_states(layout, ZERO[0], 1, 0, each)
        assert (ours.parameters, ours.gradients, ours.optimizer) == held(memory)

    for bucket in found.buckets:
        check(bucket, run_ranks(Mesh.of(dp=1), lambda comm, b=bucket: BucketMemory.allocate(b, comm, choice), timeout=30)[0])


@pytest.mark.parametrize("stage", range(4))
def test_ranges_of_all_ranks_make_up_the_whole(stage: int) -> None:
    layout = FlatBuffer.pack([("a", (17, 3), "decay"), ("b", (5,), "plain"), ("c", (40,), "decay")], 3, 4)
    each = Widths(2, 4, 4, 8, 4)
    ranks = [bucket_states(layout, ZERO[stage], 3, i, each) for i in range(3)]
    whole = bucket_states(layout, ZERO[0], 1, 0, each)
    shares = [3 if letter == "R" or letter == "P" else 1 for letter in ZERO[stage]]
    assert sum(r.parameters for r in ranks) == whole.parameters * shares[0]
    assert sum(r.gradients for r in ranks) == whole.gradients * shares[1]
    cuts = sum(len(layout.shard(3, i).segments(layout)) for i in range(3)) if stage else 3 * len(layout.segments)
    scalars = each.scalars * (cuts - len(layout.segments) * shares[2])  # each segment of each range counts its own steps
    assert sum(r.optimizer for r in ranks) == whole.optimizer * shares[2] + scalars


# ---- the update --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1 << 12,), (1 << 12, 1 << 10), (1 << 10, 1 << 12)])
@pytest.mark.parametrize("choice", OPTIMIZERS, ids=lambda c: f"{c.name} {c.momentum} {c.weight_decay}")
def test_a_step_takes_what_is_predicted(choice: OptimizerChoice, sizes: tuple[int, ...]) -> None:
    param, grad = torch.randn(sum(sizes)), torch.randn(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    segments = [Segment(param[a : a + n], grad[a : a + n], not i, a) for i, (a, n) in enumerate(zip(starts, sizes, strict=True))]
    optimizer = FlatOptimizer(choice, segments)
    for _ in range(6):  # RAdam's first five steps take less
        tracker = StorageTracker()
        with tracker:
            optimizer.step(1e-3, torch.tensor(0.5), torch.zeros(()))
    given = 8  # the clipping factor and the flag, made under the tracker
    ours = step_peak(choice, [(not i, n) for i, n in enumerate(sizes)], widths(choice, 4, 4), 4, "cpu")
    scalars = 0 if choice.name in FUSED["cpu"] else 12  # of the update: the flag, corrections of the bias
    assert 0 <= tracker.peak - given - ours <= scalars


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", [n for n, device in UPDATE_TENSORS if device == "cuda"])
def test_updates_on_cuda_take_what_their_code_says(name: str, decay: float) -> None:
    """The branches of torch's updates that CUDA takes ("capturable"), run here."""
    parameter = torch.randn(1 << 12)
    parameter.grad = torch.randn(1 << 12)
    options = {} if name == "adagrad" else {"capturable": True}
    choice = OptimizerChoice(name, weight_decay=decay)  # type: ignore[arg-type]
    optimizer = torch_optimizer(choice, [parameter], [], foreach=False, **options)
    optimizer.step = optimizer.step.__wrapped__.__get__(optimizer) if options else optimizer.step  # type: ignore[method-assign]
    anywhere = patch("torch.compiler.is_compiling", lambda: True) if options else contextlib.nullcontext()
    with anywhere, torch.no_grad():
        for _ in range(8):
            tracker = StorageTracker()
            with tracker:
                optimizer.step()
    assert tracker.peak // parameter.nbytes == UPDATE_TENSORS[name, "cuda"][decay > 0]


# ---- published tables --------------------------------------------------------------------------------------------------


def test_rows_of_zero_are_the_plan_s() -> None:
    assert [DATA_PARALLEL_ROWS[row] for row in ZERO] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def test_table_1_of_zero() -> None:
    """All 54 cells; the paper rounds most of them and cuts off six."""
    cells = list(published("zero_table1.csv"))
    assert len(cells) == 54
    cut = 0
    for cell in cells:
        psi, dp, stage = int(cell["parameters"]), int(cell["dp"]), int(cell["zero"])
        ours = model_states(psi, stage, dp).total
        exact = {1: 4 * psi + 12 * psi / dp, 2: 2 * psi + 14 * psi / dp, 3: 16 * psi / dp}[stage]
        assert 0 <= ours - exact < 16 * 32 * dp  # padding: a range is a multiple of 64 bytes of 16-bit numbers
        digits = len(cell["gigabytes"].partition(".")[2])
        shown = float(cell["gigabytes"])
        rounded = abs(ours / 1e9 - shown) <= 0.5 * 10**-digits + 1e-6
        assert rounded or math.floor(ours / 1e9 * 10**digits) == shown * 10**digits, cell
        cut += not rounded
    assert cut == 6


def test_table_2_of_zero() -> None:
    """The largest models fill 32 GB: what is printed as 0.5T or 1T a little less."""
    for line in published("zero_table2.csv"):
        parts = int(line["model_parallel"])
        dp = int(line["gpus"]) // parts
        for stage, column in enumerate(("baseline", "zero1", "zero2", "zero3")):
            ours = model_states(int(line[column]) // parts, stage, dp).total
            assert 31.25e9 <= ours <= 32e9 + 64 * dp * 16


def test_states_of_megatron() -> None:
    """18 bytes a parameter (gradients in fp32), of 12 L h² over tensor and pipeline ranks: Korthikanti et al., figure 1."""
    for line in published("korthikanti_figure1.csv"):
        h, layers, ranks = int(line["hidden"]), int(line["layers"]), int(line["tensor"]) * int(line["pipeline"])
        ours = model_states(12 * layers * h * h // ranks, 0, 1, 2, 4, 12).total
        assert ours / 2**30 == float(line["states_gib"])
