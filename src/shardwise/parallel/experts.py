"""Shard the experts of a model over mesh axes: expert parallelism.

Ranks of the axis ``ep`` share the rows of a batch, as those of ``dp`` do, and each has some of the experts of every
layer; all other parameters are whole.  The rows of a token go to the ranks that have the experts which it chooses, and
what these give comes back: four all-to-alls a layer, two in forward and two in backward.  For k experts a token and
b·s·h activations a rank sends at most 4·k·b·s·h·(ep-1)/ep elements, b·s being its own tokens, and in addition the
number of rows for each expert.  Gradients of experts are summed over the axes of the batch alone, once a step; those of
other parameters over ``ep`` too.

The design is that of GShard (Lepikhin et al., arXiv 2006.16668, section 3.2) without a limit of rows per expert, as in
MegaBlocks (Gale et al., arXiv 2211.15841, section 2): no token is dropped, whatever the experts are.
"""

from __future__ import annotations

from shardwise.core.errors import check_count
from shardwise.core.plan import Plan
from shardwise.core.tensor_options import EXPERTS, with_outer_axis


def expert_parallel(plan: Plan, size: int) -> Plan:
    """Return ``plan`` with the experts of each layer sharded over ``size`` ranks.

    The axis lies outside those that share a row's sequence or a layer, whose ranks communicate more often, and inside
    all others.
    """
    check_count("ep", size)
    return plan.replace(mesh=with_outer_axis(plan.mesh, EXPERTS, size))
