"""Steps of a Trainer on all ranks of a plan, which are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, Batch
from shardwise.lower.compiled import Compiled
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks
from shardwise.train.errors import NonFiniteError
from shardwise.train.trainer import Trainer


def rows_of(comm: Communicator, plan: Plan, fields: dict[str, Tensor]) -> Batch:
    """This rank's part of a batch."""
    rows = next(iter(fields.values())).shape[0]
    ranges = rank_rows(rows, plan.microbatches, comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES))
    return Batch({n: torch.cat([v[a:b] for a, b in ranges]) for n, v in fields.items()}, rows, (), ())


def trained(
    plan: Plan,
    given: list[dict[str, Tensor]],
    module: nn.Module | Compiled,
    *,
    stop_after: int | None = None,
    ranks: Any = None,
    **options: Any,
) -> list[Any]:
    """Of each rank: the results of all steps, the error that ended them or whether it was asked to stop, and the state
    after them.

    ``ranks`` are options of the threads.  A compiled module's capture serves this plan too.
    """
    compiled = module.under(plan) if isinstance(module, Compiled) else Compiled(module, plan, given[0])

    def rank(comm: Communicator) -> Any:
        with Trainer(compiled, OptimizerChoice("adamw", lr=1e-2), plan, given[0], comm=comm, **options) as trainer:
            found = []
            try:
                for result in trainer.steps((rows_of(comm, plan, one) for one in given), len(given)):
                    found.append(result)
                    if len(found) == stop_after:
                        trainer.request_stop()
            except NonFiniteError as error:
                return found, error, trainer.state_dict()
            return found, trainer.stopping, trainer.state_dict()

    return run_ranks(plan.mesh, rank, timeout=120, **(ranks or {}))
