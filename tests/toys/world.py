"""All ranks of a plan run their programs, and what they report and hold is compared with one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwise.core.instruction import Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program, class_of
from shardwise.parallel.data import batch_axes
from toys.device import Device
from toys.ranks import Exchange
from toys.units import Toy
from toys.validating import ValidatingRank


class World:
    """All ranks of a plan, and what they exchange."""

    def __init__(self, toy: Toy, plan: Plan, programs: Sequence[Program]) -> None:
        self.exchanges: dict[object, Exchange] = {}
        self.ranks = [
            ValidatingRank(self.exchanges, toy, plan, class_of(programs, plan.mesh, rank), rank)
            for rank in range(plan.mesh.size)
        ]

    def step(self) -> list[dict[int, dict[str, int]]]:
        """Run every program once; loss and norm of each batch as each rank reports them."""
        self.exchanges.clear()
        running = {rank.rank: rank.run() for rank in self.ranks}
        while running:
            before = sum(rank.done for rank in self.ranks), len(running)
            for number in list(running):
                try:
                    next(running[number])
                except StopIteration:
                    del running[number]
            after = sum(rank.done for rank in self.ranks), len(running)
            assert before != after, (
                f"nobody goes on: {[str(r.program.instructions[r.position]) for r in self.ranks if r.rank in running]}"
            )
        return [rank.reported for rank in self.ranks]


def shown(found: dict[int, dict[str, int]]) -> dict[int, dict[str, int | None]]:
    """With None for NaN, which is not equal to itself."""
    return {
        batch: {str(k): None if math.isnan(value) else value for k, value in each.items()}
        for batch, each in found.items()
    }


def differences(toy: Toy, plan: Plan, programs: Sequence[Program], steps: int = 2) -> list[str]:
    """What ranks report or hold after some steps that one device does not."""
    world = World(toy, plan, programs)
    rows = plan.mesh.axis_size(batch_axes(plan.mesh))
    device, found = Device(toy, plan, rows), []
    for number in range(steps):
        truth = dict(enumerate({"loss": loss, "norm": norm} for loss, norm in device.window(programs[0].batches)))
        for rank, reported in enumerate(world.step()):
            if shown(reported) != shown(truth):
                found.append(f"step {number}, rank {rank}: {reported}, not {truth}")
    for rank, bucket in itertools.product(world.ranks, toy.trace.buckets):
        if any(b.index == bucket.index and i.op is Op.STEP for i in rank.program.instructions for b in i.writes):
            values = rank.param[bucket.index]
            at = rank.held(bucket.index, values)
            whole = device.history[bucket.index][-1]
            part = whole[at] if len(values) == toy.numel else whole[rank.own]
            if values[at] != part:
                found.append(f"rank {rank.rank}: bucket {bucket.index} differs")
    return found
