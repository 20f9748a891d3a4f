"""The memory of parameter servers that are processes beside the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.units.served import served_ranges, served_share
from shardwise.units.trace import Bucket

from .memory import bucket_widths
from .states import States, bucket_states
from .tables import NUMBER


@dataclass(frozen=True)
class ServerBytes:
    """The bytes of a server: what it holds from update to update, the ``versions`` of the rows of tables, and a
    ``push`` under way, of which there may be one from each worker.  The rows of a table's gradient are not among it."""

    states: States
    versions: int
    push: int

    def total(self, workers: int) -> int:
        """Return the most bytes there are at a time."""
        return self.states.total + self.versions + workers * self.push

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name."""
        return {**asdict(self.states), "versions": self.versions, "push": self.push}


def server_bytes(buckets: Sequence[Bucket], plan: Plan, choice: OptimizerChoice) -> list[ServerBytes]:
    """Return the bytes of each server of the plan."""
    by_index, found = {bucket.index: bucket for bucket in buckets}, list[ServerBytes]()
    for ranges in served_ranges(buckets, plan, choice):
        states, versions, push = States(), 0, 0
        for index, held in ranges.items():
            bucket = by_index[index]
            states += bucket_states(served_share(bucket, held, choice), bucket_widths(choice, bucket))[0]
            versions += NUMBER * held.numel // held.row if held.row else 0
            push += 0 if held.row else held.numel * held.gradient
        found.append(ServerBytes(states, versions, push))
    return found
