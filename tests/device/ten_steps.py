"""Ten steps of a small model on one device, whose losses it prints bit by bit: ``python ten_steps.py TYPE``."""

from __future__ import annotations

import sys

import torch

from shardwise.backend import Backend
from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import Batch
from shardwise.lower.compiled import Compiled
from shardwise.models.llama import Llama
from shardwise.runtime.connect import connect
from shardwise.train.trainer import Trainer

ROWS, LENGTH, VOCABULARY = 8, 64, 256


def batch(step: int, microbatches: int, device: torch.device) -> Batch:
    """As a loader gives it: on the host, in page-locked memory where that means something."""
    torch.manual_seed(step)
    fields = {name: torch.randint(0, VOCABULARY, (ROWS, LENGTH)) for name in ("input_ids", "labels")}
    if Backend.of(device).pins:
        fields = {name: value.pin_memory() for name, value in fields.items()}
    spans = rank_rows(ROWS, microbatches, 1, 0)
    return Batch(fields, ROWS, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def trainer(device: torch.device, **changes: object) -> Trainer:
    """A small Llama in bf16."""
    torch.manual_seed(0)
    module = Llama(vocabulary=VOCABULARY, width=64, layers=2, heads=4, kv_heads=2, context=LENGTH)
    plan = Plan.of(microbatches=2, precision="bf16").replace(**changes)
    example = batch(0, plan.microbatches, device).fields
    compiled = Compiled(module, plan, example, device=device)
    comm = connect(plan.mesh, device)
    return Trainer(compiled, OptimizerChoice("adamw", lr=1e-3), plan, example, comm=comm, clip_norm=1.0)


def main(kind: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = Backend(kind).device(0)
    with trainer(device) as one:
        losses = [one.step(batch(step, one.plan.microbatches, device)).loss for step in range(10)]
        print(*(float(loss).hex() for loss in losses))


if __name__ == "__main__":
    main(sys.argv[1])
