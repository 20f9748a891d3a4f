"""Shard the sequence over mesh axes: context parallelism.

Every rank of the axis ``cp`` loads the same rows of a batch and has a part of each row's sequence, from the embedding
to the loss: its activations take 1/cp of the memory, and all parameters are whole.  Only attention looks at other
parts.  For b·s·h elements of queries, and as many of keys and of values, a rank sends, forward and backward:

    ==============  =====================================================  ==========================
    ``context``     how attention reaches the whole sequence               elements
    ==============  =====================================================  ==========================
    ``gathered``    keys and values are gathered, gradients scattered      4·b·s·h·(cp-1)/cp
    ``ring``        keys and values go from rank to rank, in backward      2·b·s·h·(3·cp-2)/cp
                    followed by their gradients, while ranks compute
    ``heads``       queries, keys, values and results change from parts    8·b·s·h·(cp-1)/cp²
                    of the sequence to parts of the heads, and back
    ==============  =====================================================  ==========================

Where g heads of queries share one of keys, the first two send g times less, and what the third sends of keys and values
is g times less too.  Under ``ring`` alone no rank ever has the keys and values of the whole sequence.

The sequence is shared out in zigzag order (:func:`~shardwise.core.layout.axis_ranges`), so that under a causal mask all
ranks have the same work.  ``gathered`` is what Llama 3 was trained with (Grattafiori et al., arXiv 2407.21783, section
3.3.2); ``ring`` follows Liu et al. (Ring Attention, arXiv 2310.01889, section 3), and ``heads`` Jacobs et al.
(DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1).
"""

from __future__ import annotations

from shardwise.core.errors import check_choice, check_count
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.tensor_options import CONTEXT, Context, with_outer_axis


def context_parallel(plan: Plan, size: int, kind: Context = "gathered") -> Plan:
    """Return ``plan`` with the sequence sharded over ``size`` ranks, which attention of ``kind`` joins.

    The axis lies outside those of tensor parallelism, whose ranks communicate more often, and inside all others.
    """
    check_count("cp", size)
    check_choice("context", kind, CHOICES["context"])
    return plan.replace(mesh=with_outer_axis(plan.mesh, CONTEXT, size), context=kind)
