"""What the units of a trace communicate, counted from their graphs."""

from __future__ import annotations

from collections import Counter

from shardwise.measure.unit_traffic import exchanged
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.ops.own_op import facts_of
from shardwise.units.trace import Trace

KINDS = {
    collectives.gather: "all_gather", collectives.scatter: "reduce_scatter", collectives.all_reduce: "all_reduce",
    collectives.replicate: "all_reduce in backward", collectives.shard: "slice",
}  # fmt: skip


def communicated(trace: Trace) -> Counter[tuple[str, str, str]]:
    """(kind, op that needs it, module path) of each move, and of each op that communicates by itself, once for each
    unit that has it.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for node in (n for unit in trace.units if unit.graph is not None for n in unit.graph.nodes):
        path = node.meta.get("path", "")
        if node.target in KINDS:
            found[KINDS[node.target], node.meta["cause"], path] += 1
        elif facts_of(node.target).communicates:
            env = Env(
                parts=2,
                index=1,
                rows=trace.rows or 4,
                tensor={axis: (ranks, 0) for axis, ranks in trace.tensor.items()},
            )
            for _ in exchanged(node, env):
                found["by itself", node.target.__name__, path] += 1
    return found
