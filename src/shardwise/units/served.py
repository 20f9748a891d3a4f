"""What parameter servers that are other processes have of the buckets: equal ranges, and what belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.core.data_options import ParameterRule
from shardwise.core.errors import ConfigError
from shardwise.core.flat import FlatShard
from shardwise.core.frames import Share as ServedRange
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.units.share import Share, updates_of
from shardwise.units.trace import Bucket

ONE = Mesh.of(dp=1)
RULE = ParameterRule("*", "S", "S", "S")


def served_ranges(buckets: Sequence[Bucket], plan: Plan, choice: OptimizerChoice) -> list[dict[int, ServedRange]]:
    """Return what each server of the plan has of the buckets that learn: equal ranges, of cache lines.

    Raises :class:`ConfigError` where there are more servers than lines, so that one would have nothing.
    """
    servers, learning = plan.serving.servers, [b for b in buckets if b.learns]
    layouts = {b.index: b.layout(choice, ONE, 0) for b in learning}
    found: list[dict[int, ServedRange]] = []
    for server in range(servers):
        ranges = {b.index: layouts[b.index].served(servers, server) for b in learning}
        found.append({
            b.index: ServedRange(
                held.start, held.stop, b.wide.itemsize, b.dtype.itemsize, b.width if b.table else 0
            )
            for b in learning if (held := ranges[b.index]).numel
        })  # fmt: skip
    if not all(found):
        most = max(-(-layout.numel * layout.itemsize // layout.align) for layout in layouts.values())
        wrong = f"{servers} servers for parameters of which no bucket can be cut into more than {most} ranges"
        raise ConfigError.on("server_ranks", wrong, f"1 to {most}")
    return found


def served_share(bucket: Bucket, held: ServedRange, choice: OptimizerChoice) -> Share:
    """Return the share of a server that has, and updates, this range of a bucket."""
    where = FlatShard(held.start, held.stop)
    share = Share.of(bucket, Plan(), choice, 0)
    return replace(share, rule=RULE, held=where, updates=updates_of(where, share.layout, choice), apart=True)
