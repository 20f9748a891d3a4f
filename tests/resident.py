"""Training on a device without hardware (``card.py``): ``python resident.py CASE...`` prints as JSON what made the host
wait in each case, and the ops that are known to.

A case is MODEL:PLAN, of :data:`MODELS` and :data:`PLANS`, or MODEL:PLAN:FAULT, which plants one of :data:`FAULTS`.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import card
import zoo
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.launch.ready import Surroundings
from shardwise.launch.results import MetricsWriter
from shardwise.launch.run import Run
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.progress import Progress
from shardwise.train.trainer import Trainer

WARM, STEPS = 1, 3  # the first step makes what stays
WAITED = "resident"  # what a line of results begins with

PLANS: dict[str, Callable[[], Plan]] = {
    "fp32": lambda: Plan.of(),
    "bf16": lambda: Plan.of(microbatches=2, precision="bf16"),
    "fp16": lambda: Plan.of(precision="fp16"),
    "selective": lambda: Plan.of(precision="bf16", recompute="selective"),
    "zero3": lambda: data_parallel(Plan.of(microbatches=2, precision="bf16"), 2, 3),
    "tp": lambda: tensor_parallel(Plan.of(precision="bf16"), 2, "1d-sp"),
    "2d": lambda: tensor_parallel(Plan.of(precision="bf16"), 4, "2d"),
    "pp": lambda: pipeline(Plan.of(microbatches=2, precision="bf16"), 2, "1f1b"),
}
"""A few, each with something of its own in a step."""


class Literals(torch.nn.Module):
    """What a graph keeps as constants: a literal, a plain attribute, weights of classes, an index; and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.offset = torch.arange(8.0)
        self.classes = torch.tensor([1.0, 2.0, 0.5, 1.5])

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * torch.tensor([0.5, 1.0] * 4, device=x.device) + self.offset.to(x.device, x.dtype)
        x = x.masked_fill(x > 9, torch.tensor(9.0, dtype=x.dtype, device=x.device))
        scores = x[:, [0, 2, 4, 7]]
        return torch.nn.functional.cross_entropy(scores, label, weight=self.classes.to(x.device, x.dtype))


def model(name: str) -> zoo.Model:
    """One of the zoo, or "literals"."""
    if name != "literals":
        return zoo.make(name)
    return zoo.Model.of(Literals, {"x": torch.randn(zoo.ROWS, 8), "label": torch.randint(0, 4, (zoo.ROWS,))})


MODELS = (*zoo.NAMES, "literals")


def _read(call: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Engine, *args: Any, **more: Any) -> Any:
        float(self.memory.halted)
        return call(self, *args, **more)

    return read


def _copy(call: Callable[..., Any]) -> Callable[..., Any]:
    def copy(self: Engine, *args: Any, **more: Any) -> Any:
        self.memory.halted.to("cpu")
        return call(self, *args, **more)

    return copy


def _pageable(call: Callable[..., Any]) -> Callable[..., Any]:
    def pageable(self: Engine, *args: Any, **more: Any) -> Any:
        torch.zeros(3).to(self.comm.device, non_blocking=True)
        return call(self, *args, **more)

    return pageable


def _early(call: Callable[..., Any]) -> Callable[..., Any]:
    def early(self: MetricsWriter, step: int, rows: int, result: Any, seconds: float, *more: Any) -> None:
        result.on_host()  # the step has just been issued
        call(self, step, rows, result, seconds, *more)

    return early


FAULTS: dict[str, Any] = {
    "read": lambda: patch.object(Engine, "step", _read(Engine.step)),
    "copy": lambda: patch.object(Engine, "step", _copy(Engine.step)),
    "pageable": lambda: patch.object(Engine, "step", _pageable(Engine.step)),
    "early": lambda: patch.object(MetricsWriter, "add", _early(MetricsWriter.add)),
}


def train(one: zoo.Model, plan: Plan, device: torch.device, rank: int, compiled: Compiled) -> dict[str, int]:
    """What made the host wait in the last of a few steps of a run's own loop: loader, step, look, metrics."""
    samples = [
        {name: value[row] for name, value in one.batch.items()} for row in range(len(next(iter(one.batch.values()))))
    ]
    folder = Path(tempfile.mkdtemp())
    with card.watched() as waits:
        waits.since = WARM
        comm = AloneCommunicator(plan.mesh, rank, device)
        trainer = Trainer(
            compiled, OptimizerChoice("adamw", lr=1e-3, ema=0.9), plan, one.batch, clip_norm=1.0, comm=comm
        )
        metrics = MetricsWriter(io.StringIO(), trainer.engine.optimizer, 1, device)
        nothing: Any = None
        config: Any = SimpleNamespace(train=SimpleNamespace(expert_load_every=0))  # all that a step looks at
        run = Run(config, trainer, nothing, nothing, Surroundings(Progress(folder / "record")), nothing, metrics)
        run._clock = 0.0
        with trainer.loader(samples, zoo.ROWS) as loader:
            for step in range(STEPS):
                waits.step = step
                run._train(step, step + 1, loader, None)
        assert len(metrics.history) == STEPS - 1, "the metrics of a step are written when the next has been issued"
        return waits.found


def main(cases: Sequence[str]) -> None:
    device = card.register()
    torch.set_num_threads(1)
    known: dict[str, tuple[zoo.Model, Compiled]] = {}
    for case in cases:
        name, chosen, *fault = case.split(":")
        plan = PLANS[chosen]()
        if name not in known:
            one = model(name)
            known = {name: (one, Compiled(one.module, plan, one.batch, one.loss, device))}
        one, first = known[name]
        compiled = first.under(plan)
        assert compiled.general.opaque is None, compiled.general.opaque
        found: dict[str, int] = {}
        for rank in range(plan.mesh.axis_size("pp") if plan.mesh.size > 1 else 1):
            rank *= plan.mesh.size // plan.mesh.axis_size("pp")
            with FAULTS[fault[0]]() if fault else nullcontext():
                found |= train(one, plan, device, rank, compiled)
        print(WAITED, json.dumps({"case": case, "waits": found, "reads": compiled.general.host_reads()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
