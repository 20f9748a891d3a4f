"""One rank of a pipeline whose units do nothing but sleep: prints the seconds of its steps under each schedule, as
JSON.

Its arguments are the backend, the microbatches and the number of steps, and the schedules, of which one with
"+post-validate" goes on without a barrier; the environment says which rank it is.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.optim import OptimizerChoice
from shardwise.core.pipeline_options import Norm
from shardwise.core.plan import Plan
from shardwise.core.schedules import SCHEDULES
from shardwise.data.loader import Batch
from shardwise.ops import weight_gradients
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.connect import connect
from shardwise.train.trainer import Trainer

RANKS = 4
BLOCKS = 2 * RANKS
FORWARD, INPUT, WEIGHT = (
    0.18,
    0.15,
    0.12,
)  # seconds of a block: the rest that a rank does takes 2 to 10 ms for each
WIDTH = 8  # of the blocks' weights alone
sleeps = [time.sleep]


def parts(schedule: str) -> tuple[str, Norm]:
    """A schedule's own name, and when ranks update."""
    name, post, _ = schedule.partition("+post-validate")
    return name, "post-validate" if post else "barrier"


def microbatches(schedule: str, wanted: int) -> int:
    """As many as the schedule takes of those."""
    if schedule == "pipedream":  # whose batches are microbatches
        return 1
    return min(wanted, SCHEDULES[parts(schedule)[0]].max_microbatches or wanted)


def overlaps(schedule: str) -> bool:
    """Whether a batch begins before the last one is over."""
    name, norm = parts(schedule)
    return norm == "post-validate" or SCHEDULES[name].asynchronous


def windows(schedule: str, wanted: int, steps: int) -> list[int]:
    """Batches of each run: of PipeDream as many as make a step of ``wanted`` microbatches."""
    each = wanted if schedule == "pipedream" else 1
    return [2 * each, (2 + steps) * each] if overlaps(schedule) else [1] * steps


def stages(schedule: str) -> tuple[int, ...]:
    """Blocks of each stage."""
    number = RANKS * SCHEDULES[parts(schedule)[0]].stages_per_rank
    return (BLOCKS // number,) * number


@torch.library.custom_op("sleeping::nap", mutates_args=())
def nap(x: Tensor, forward: float, backward: float) -> Tensor:
    """A copy of ``x`` after so many seconds; its gradient's takes ``backward``."""
    sleeps[0](forward)
    return x.clone()


@nap.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[2]


nap.register_autograd(lambda ctx, grad: (nap(grad, ctx.seconds, 0.0), None, None), setup_context=_setup)


class Block(nn.Module):
    """F and I are naps, W is the gradient of a weight whose product is told to be slow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nap(self.linear(x), FORWARD, INPUT)


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h).square().mean()


def slow_weights() -> None:
    """The weight gradient of a block takes its seconds, in whatever part of a backward it is."""
    known = weight_gradients.MULTIPLY["linear"]

    def slow(goal: Tensor, *rest: Any) -> None:
        if goal.shape == (WIDTH, WIDTH):
            sleeps[0](WEIGHT)
        known(goal, *rest)

    weight_gradients.MULTIPLY["linear"] = slow  # type: ignore[index]


def seconds(comm: Any, schedule: str, wanted: int, steps: int) -> list[float]:
    """Of each step, from when all ranks are there until this one is through; where steps overlap, what so many more of
    them take.  Before them come such without sleep."""
    cut, (name, norm), m = list(stages(schedule)), parts(schedule), microbatches(schedule, wanted)
    cut[0], cut[-1] = cut[0] + 1, cut[-1] + 1  # what comes before and after the blocks takes no time
    plan = pipeline(Plan.of(microbatches=m, norm=norm), RANKS, name, stages=cut)
    batch = {"x": torch.ones(m, 3)}
    torch.manual_seed(0)
    trainer = Trainer(Sleeper(), OptimizerChoice("sgd", lr=0.1), plan, batch, comm=comm)
    given = Batch(batch, m, tuple(range(m)), (1,) * m)
    numbers, found = windows(schedule, wanted, steps), []
    for sleep, number in [(lambda _: None, n) for n in dict.fromkeys(numbers)] + [(time.sleep, n) for n in numbers]:
        sleeps[0] = sleep
        comm.barrier(what="the start of a step")
        began = time.perf_counter()
        for _ in trainer.steps(iter([given] * number), number):
            pass
        found.append(time.perf_counter() - began)
    return [(found[-1] - found[-2]) / steps] if overlaps(schedule) else found[1:]


def main() -> None:
    backend, m, steps, *schedules = sys.argv[1:]
    torch.set_num_threads(1)
    slow_weights()
    comm = connect(pipeline(Plan.of(), RANKS).mesh, backend=backend)
    print(json.dumps({one: seconds(comm, one, int(m), int(steps)) for one in schedules}), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
