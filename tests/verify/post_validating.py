"""One rank of a pipeline whose updates are validated: prints what its steps gave, as JSON.

Its argument is the backend; the environment says which rank it is.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor
from training import rows_of

from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import connect
from shardwise.train.trainer import Trainer

ONE = Plan.of(microbatches=3, precision="fp64", norm="post-validate")
PLANS = {"gloo": pipeline(ONE, 3, "zb-h2"), "shared": pipeline(data_parallel(ONE, 2, 3), 2, "zb-h2")}
"""By backend; the second has its parameters in memory that replicas have in common."""
ROWS, STEPS = 6, 6
CLIP = 3.0


def batches() -> list[dict[str, Tensor]]:
    """Of every other one the gradient is much larger."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 11, (ROWS, 9), generator=generator) for _ in range(STEPS)]
    found = [{"input_ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()} for x in ids]
    for one in found[1::2]:
        one["labels"].fill_(3)
    return found


def compiled(plan: Plan) -> Compiled:
    torch.manual_seed(0)
    return Compiled(GPT(vocabulary=11, width=16, layers=4, heads=2, context=8), plan, batches()[0])


def steps(comm: Communicator, model: Compiled) -> list[tuple[float, float, bool | None]]:
    """Loss, norm and whether the update was made again, and last the sum of all weights."""
    given = [rows_of(comm, model.plan, one) for one in batches()]
    with Trainer(model, OptimizerChoice("adamw", lr=1e-2), model.plan, {}, clip_norm=CLIP, comm=comm) as trainer:
        found = [(float(r.loss), float(r.grad_norm), r.repeated) for r in trainer.steps(iter(given), STEPS)]
        return [*found, (float(sum(v.double().sum() for v in trainer.state_dict().values())), 0.0, None)]


def main() -> None:
    torch.set_num_threads(1)
    plan = PLANS[sys.argv[1]]
    comm = connect(plan.mesh, backend=sys.argv[1])  # type: ignore[arg-type]
    print(json.dumps(steps(comm, compiled(plan))), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
