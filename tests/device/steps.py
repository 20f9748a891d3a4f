"""Run by a process of its own under the fake device: steps of models under plans, and what in them would make the host wait.

python steps.py MODEL:PLAN ...      prints one JSON object a line: {"case", "waits": {what: how often}, "error"}
"""

from __future__ import annotations

import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fake import GPU, fake_gpu

from shardwise import OptimizerChoice, Plan
from shardwise.data.loader import Batch, rank_rows
from shardwise.launch.results import MetricsWriter
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.compiled import Compiled
from shardwise.runtime.connect import LoneCommunicator
from shardwise.runtime.masks import all_ones
from shardwise.trainer import Trainer
from zoo import make

BF16 = Plan(microbatches=2, precision="bf16")
PLANS: Mapping[str, Callable[[], Plan]] = {
    "fp32": lambda: Plan(),
    "bf16": lambda: BF16,
    "fp16": lambda: Plan(microbatches=2, precision="fp16"),
    "selective": lambda: BF16.replace(recompute="selective"),
    "full": lambda: BF16.replace(recompute="full"),
    "dp": lambda: data_parallel(BF16, 2),
    "zero3": lambda: data_parallel(BF16, 2, zero=3),
    "tp": lambda: tensor_parallel(BF16, 2, "1d-sp"),
    "2d": lambda: tensor_parallel(Plan(), 4, "2d"),
    "pp": lambda: pipeline(BF16, 2, "zb-h1"),
}


def run(name: str, plan: Plan, plant: Callable[[Trainer], object] | None = None, steps: int = 3) -> dict[str, int]:
    """The waits of the last step, and of the gap before it, of a model under a plan on the last rank."""
    model = make(name)
    compiled = Compiled(model.module, plan, model.batch, model.loss, GPU)
    rank, rows = plan.mesh.size - 1, next(iter(model.batch.values())).shape[0]
    microbatches = min(plan.microbatches, rows)
    ranges = rank_rows(
        rows, microbatches, plan.mesh.axis_size(("dp_replicate", "dp")), plan.mesh.index(rank, ("dp_replicate", "dp"))
    )
    picked = [i for a, b in ranges for i in range(a, b)]
    own = {key: value[picked] for key, value in model.batch.items()}
    # Read in the loader's thread, where tensors are real.
    ones = all_ones(own, compiled.masks)
    begun = [0]
    with fake_gpu(lambda: begun[0]) as waits:
        comm = LoneCommunicator(plan.mesh, 0, GPU) if plan.mesh.size == 1 else AloneCommunicator(plan.mesh, rank, GPU)
        trainer = Trainer(compiled, OptimizerChoice("adamw", lr=1e-3), plan, model.batch, comm=comm, clip_norm=1.0)
        metrics = MetricsWriter(io.StringIO(), trainer.engine.optimizer, 1, GPU)
        for step in range(steps):
            waits.on = step == steps - 1
            batch = Batch({key: value.pin_memory() for key, value in own.items()}, rows, (), (), ones)
            begun[0] += 1
            result = trainer.step(batch)
            if plant is not None:
                plant(trainer)
            metrics.add(step, rows, result, 1.0)
        waits.on = False
    return dict(waits.seen)


PLANTED: Mapping[str, Callable[[Trainer], object]] = {
    "read": lambda trainer: bool(trainer.engine.memory.halted != 0),
    "copy": lambda trainer: torch.zeros(3).to(trainer.comm.device),
    "unpinned": lambda trainer: torch.zeros(3).to(trainer.comm.device, non_blocking=True),
    "early": lambda trainer: trainer._unseen and trainer._unseen[2].on_host(),
    "devices": lambda trainer: torch.zeros(3) + torch.zeros(3, device=trainer.comm.device),
}
"""Mistakes that have to be found."""


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in cases:
        name, _, words = case.partition(":")
        plan, _, planted = words.partition("+")
        found: dict[str, Any] = {"case": case, "waits": {}, "error": None}
        try:
            torch.manual_seed(0)
            found["waits"] = run(name, PLANS[plan](), PLANTED.get(planted))
        except Exception as error:  # noqa: BLE001 - told to the test
            found["error"] = "".join(traceback.format_exception(error))[-3000:]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
