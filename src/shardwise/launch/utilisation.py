"""Tell how well a run uses its devices: the FLOPs of its model a second, and their share of what the devices could do.

The peak of a GPU is that of its data sheet.  A CPU has none that holds (its clock depends on the load, and others use
its cores), so its peak is the speed of a large matrix product, which all ranks measure together before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shardwise.capture.casts import COMPUTE_DTYPE
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.runtime.communicator import host_gather
from shardwise.train.trainer import Trainer
from shardwise.units.trace import Trace

from .matmul import SQUARE
from .mfu import mfu, model_flops, peak_flops

MEASURED_SECONDS = 0.05


def utilisation(trainer: Trainer, rows: int) -> Callable[[int, float], dict[str, Any]] | None:
    """Return a function from a step's rows and seconds to its ``tflops_per_second``, of all ranks together, and
    ``mfu``.

    All ranks call it together; ``rows`` are those of a whole step.  Without an ``mfu`` no peak is known, and the result
    is None if the FLOPs of the model are not.
    """
    comm, plan = trainer.comm, trainer.plan
    flops = model_flops(_whole(trainer.compiled), rows, plan.microbatches)
    if not flops:
        return None
    peak = peak_flops(comm.device, plan.numeric.precision)
    if comm.device.type == "cpu":
        comm.barrier(what="the measurement of this host's speed")
        mine = torch.tensor([product_flops(COMPUTE_DTYPE[plan.numeric.precision])], dtype=torch.float64)
        peak = float(host_gather(comm, mine, "the speed of all ranks").mean())
    ranks = plan.mesh.size

    def of_step(taken: int, seconds: float) -> dict[str, Any]:
        done = flops * taken / rows
        found = {"tflops_per_second": done / seconds / 1e12}
        return found | ({"mfu": mfu(done, seconds, ranks, peak)} if peak else {})

    return of_step


def product_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product on this rank's CPU threads; 0 where torch has no kernel for it."""
    rows, inner, columns = SQUARE
    try:
        a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
        torch.mm(a, b)  # the first makes threads and memory ready
        best, end = float("inf"), time.perf_counter() + MEASURED_SECONDS
        while best == float("inf") or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b)
            best = min(best, time.perf_counter() - start)
    except RuntimeError:
        return 0.0
    return 2.0 * rows * inner * columns / best


def _whole(compiled: Compiled) -> Trace:
    """Return the trace of the whole model, as a single rank would compute it."""
    if not compiled.general.tensor:
        return compiled.general
    return compiled.under(Plan(numeric=compiled.plan.numeric)).general
