"""What gradients of tables by rows take and communicate, at most: how many rows differ depends on the batch."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.instruction import Instruction, Op
from shardwise.core.layout import shard_sizes
from shardwise.core.plan import Plan
from shardwise.measure.unit_traffic import Traffic
from shardwise.parallel.data import SHARDS
from shardwise.units.share import Share, place_of
from shardwise.units.trace import Bucket, Trace

NUMBER = 8
"""The bytes of the number of a row, and of the number of rows."""

COPIES = 3
"""What comes from other ranks is put one behind the other, and then sorted: so often it is there at once."""

TABLE_UPDATE = 8
"""Of each row that is updated so many are there at once: gradients, old and new values, and old and new state."""


def looked_up(trace: Trace, plan: Plan, bucket: Bucket, rows: int) -> int:
    """Return the most rows of a table that any rank looks up in a batch of ``rows`` rows; each counts as often as it is
    looked up."""
    last = plan.mesh.size - 1  # its parts are largest
    envs = [place_of(trace, plan.mesh, last, n, rows) for n in shard_sizes(rows, min(plan.microbatches, rows))]
    (table,) = bucket.parameters
    return sum(trace.units[unit].looked_up(table.name, env) for unit in bucket.units for env in envs)


def row_bytes(bucket: Bucket) -> int:
    """Return the bytes of a row of the gradient, with its number."""
    return bucket.width * bucket.wide.itemsize + NUMBER


def held_rows(bucket: Bucket, mine: int, ranks: int) -> int:
    """Return the most rows of the sum over ``ranks``, of which each looks up ``mine``."""
    return max(mine, min(ranks * mine, bucket.parameters[0].shape[0]))


def table_traffic(one: Instruction, bucket: Bucket, share: Share, mine: int, plan: Plan) -> Sequence[Traffic]:
    """Return what an instruction communicates of a table of which every rank looks up ``mine`` rows; those that are
    updated are taken to be spread evenly over the ranks that update."""
    axes = (SHARDS,) if one.op is not Op.REDUCE or one.scatters else one.axes
    ranks, owners = plan.mesh.axis_size(axes), share.rule.servers or plan.mesh.axis_size(SHARDS)
    counts = Traffic("all_gather", axes, ranks * NUMBER)
    sent = bucket.width * bucket.dtype.itemsize + NUMBER
    if one.op is Op.PUSH or one.scatters:
        return [
            Traffic("all_gather", axes, ranks * ranks * NUMBER), Traffic("all_to_all", axes, mine * row_bytes(bucket))
        ]  # fmt: skip
    if one.op is Op.REDUCE:
        if share.rule.state != "R":  # each has the rows that it updates
            mine = -(-held_rows(bucket, mine, plan.mesh.axis_size(SHARDS)) // owners)
        return [counts, Traffic("all_gather", axes, ranks * mine * row_bytes(bucket))]
    updated = -(-held_rows(bucket, mine, ranks) // owners)
    if owners < ranks:
        return [counts, *(Traffic("broadcast", axes, updated * sent) for _ in range(owners))]
    return [counts, Traffic("all_gather", axes, ranks * updated * sent)]
