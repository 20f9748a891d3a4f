"""Parts of a step on a device against the CPU's: random numbers, the optimizer, checkpoints, recorded times."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from shardwise.backend import Backend
from shardwise.checkpoint.atoms import Piece
from shardwise.checkpoint.reader import Checkpoint, checkpoints
from shardwise.checkpoint.writer import CheckpointWriter
from shardwise.core.layout import Box
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.ops.cross_entropy import MEAN, cross_entropy
from shardwise.ops.env import Env
from shardwise.ops.keyed_random import keyed_mask, keyed_normal, keyed_randint, keyed_uniform, keyed_uniform_bits
from shardwise.runtime.connect import connect
from shardwise.runtime.engine import Engine
from shardwise.runtime.optimizer import FlatOptimizer, Segment
from shardwise.runtime.recorder import Recorder
from shardwise.verify.oracle import plain_optimizer
from waiting import no_waits
from zoo import Blocks

CHOICES = {
    "adamw": OptimizerChoice("adamw", lr=0.1, weight_decay=0.1, betas=(0.8, 0.95)),
    "adam": OptimizerChoice("adam", lr=0.1, weight_decay=0.1, eps=1e-6),
    "sgd": OptimizerChoice("sgd", lr=0.1, weight_decay=0.1),
    "sgd momentum": OptimizerChoice("sgd", lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": OptimizerChoice("adagrad", lr=0.1),
    "rmsprop": OptimizerChoice("rmsprop", lr=0.1, alpha=0.9, momentum=0.5),
    "nadam": OptimizerChoice("nadam", lr=0.1, momentum_decay=0.01),
    "radam": OptimizerChoice("radam", lr=0.1),
}


def test_random_numbers_are_the_cpus(device: torch.device) -> None:
    args = (1, 2, 3, (40, 3000), (0, 1), 5)
    assert torch.equal(keyed_mask(0.1, *args, device=device).cpu(), keyed_mask(0.1, *args))
    assert torch.equal(keyed_uniform(*args, device=device).cpu(), keyed_uniform(*args))
    assert torch.equal(keyed_randint(0, 1000, *args, device=device).cpu(), keyed_randint(0, 1000, *args))
    torch.testing.assert_close(keyed_normal(*args, device=device).cpu(), keyed_normal(*args))


@pytest.mark.parametrize(
    ("rows", "per_row", "first"), [(1, 1, 0), (3, 2049, 7), (40, 3, 2**31 - 10), (5, 70_001, 2**32 - 2)]
)
def test_random_words_are_the_cpus_at_any_place(rows: int, per_row: int, first: int, device: torch.device) -> None:
    columns = torch.randint(0, 1 << 30, (per_row,), generator=torch.Generator().manual_seed(0))
    args = (1, 2, 3, first, rows, per_row)
    assert torch.equal(keyed_uniform_bits(*args, device=device).cpu(), keyed_uniform_bits(*args))
    there = keyed_uniform_bits(*args, device=device, columns=columns.to(device))
    assert torch.equal(there.cpu(), keyed_uniform_bits(*args, columns=columns))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "classes"), [(5, 7), (7, 4097), (64, 32_000)])
def test_cross_entropy_is_plain_torchs(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> None:
    """With ignored targets, and classes that are masked away: in one row the first 4,096."""
    torch.manual_seed(0)
    scores, target = torch.randn(rows, classes), torch.randint(classes // 2, classes, (rows,))
    scores[2, : min(4096, classes // 2)] = scores[3, classes // 3] = -torch.inf
    target[3], target[1] = classes - 1, -100
    scores = scores.to(device, dtype).requires_grad_()
    target = target.to(device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    exact = F.cross_entropy(scores.double(), target)
    (goal,) = torch.autograd.grad(exact, scores)
    options = {"ignore_index": -100, "smoothing": 0.0, "count": rows - 1, "log_probabilities": False, "share": None}
    ours = cross_entropy(Env(), scores, target, None, reduction=MEAN, summand=True, **options)
    (found,) = torch.autograd.grad(ours, scores)
    assert ours.dtype is wide and found.dtype is dtype
    limit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=8 * torch.finfo(wide).eps, atol=0)
    torch.testing.assert_close(found, goal, rtol=8 * limit, atol=limit / rows)


@pytest.mark.parametrize("name", CHOICES)
def test_updates_are_those_of_plain_torch_and_nobody_waits(name: str, device: torch.device) -> None:
    """Two steps and a skipped one of the flat optimizer against torch's plain one on the CPU."""
    torch.manual_seed(0)
    choice, start = CHOICES[name], torch.randn(4097)
    plain = start.clone().requires_grad_()
    reference = plain_optimizer(choice)([{"params": [plain]}])
    segment = Segment(start.to(device, copy=True), torch.zeros(4097, device=device))
    optimizer = FlatOptimizer(choice, [segment])
    flags = {flag: torch.tensor(flag, device=device) for flag in (0.0, 1.0)}
    scale = torch.tensor(0.5, device=device)
    for flag in (0.0, 1.0, 0.0):
        gradient = torch.randn(4097)
        segment.grad.copy_(gradient)
        with no_waits(device):
            optimizer.step(replace(choice, lr=0.05).settings(0), scale, flags[flag])
        if not flag:
            plain.grad = gradient * 0.5
            for group in reference.param_groups:
                group["lr"] = 0.05
            reference.step()
    torch.testing.assert_close(segment.param.cpu(), plain.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [None, 1 << 18])
def test_checkpoints_have_what_was_there_when_they_were_asked_for(
    tmp_path: Path, bound: int | None, device: torch.device
) -> None:
    flat = torch.empty(300_000, device=device)
    tensors = {
        "a": flat[:200_000].view(100, 2000),
        "b": flat[200_000:].view(100, 1000).t(),
        "c": torch.zeros((), device=device),
    }
    pieces = [Piece(name, tuple(one.shape), Box.whole(one.shape), one) for name, one in tensors.items()]
    writer = CheckpointWriter(tmp_path, 0, 1, staging_bytes=bound, keep_last=9, warn=pytest.fail)
    for step in range(1, 5):
        for one in tensors.values():
            one.fill_(step)
        writer.save(step, pieces, {})
        for one in tensors.values():
            one.fill_(-1)
        assert writer.staged_bytes <= (bound or 1_200_100)
    writer.close()
    assert [one.error for one in writer.poll()] == [None] * 4
    for step, path in enumerate(checkpoints(tmp_path), 1):
        opened = Checkpoint.open(path)
        opened.verify()
        opened.load(pieces)
        assert all(bool((one == step).all()) for one in tensors.values())


def test_recorded_times_are_the_streams(device: torch.device) -> None:
    torch.manual_seed(0)
    example = {"x": torch.randn(12, 6), "y": torch.randn(12, 6)}
    one = Compiled(Blocks(6), Plan.of(microbatches=2), example, device=device)
    engine = Engine(one, connect(one.plan.mesh, device=device), OptimizerChoice("adamw", lr=1e-2))
    engine.step(example, 12)
    Backend.of(device).synchronize(device)
    queued = device.type != "cpu"
    busy = torch.randn(4096 if queued else 64, 4096 if queued else 64, device=device)
    with Recorder(engine.interpreter) as recorder:
        before = time.perf_counter()
        for _ in range(100 if queued else 1):
            busy = busy @ busy
        issued = time.perf_counter() - before
        engine.step(example, 12)
    found = recorder.found(1, 0)
    program = one.programs(one.general, 2)[0].instructions
    assert [e.text for e in found.events] == [str(i) for i in program]
    if queued:
        assert found.events[0].start > issued  # behind what the stream had to do, though the host came here long before
    assert all(0 <= e.start <= e.stop <= found.seconds for e in found.events)
