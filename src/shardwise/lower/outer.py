"""Put an outer step behind the update of islands that train apart (``parallel/local.py``).

An outer step of a bucket is three instructions: DIFFER takes how far this island's masters have moved since the last
outer step, REDUCE sums that over islands, and OUTER lets the outer optimizer take its step.  Where all parameters meet
at once they stand at the end of the step, and the difference takes the place of the gradient, which is used up by then.
Where fragments stream, DIFFER and REDUCE are the first of the step, so that the sum is under way while it computes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.local_options import ISLANDS, LocalOptions, fragments_of
from shardwise.core.part import STEP, Part
from shardwise.core.plan import Plan
from shardwise.units.trace import Bucket


def fullest_step(plan: Plan) -> Part:
    """Return a step that shows all that steps do: where islands train apart, one in which they meet."""
    return replace(STEP, outer=plan.local.first_due)


BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # the first part of a parameter's name that ends in a number


def fragments(buckets: Sequence[Bucket], options: LocalOptions) -> dict[int, int]:
    """Return the fragment of each of a model's buckets that learn; :class:`ConfigError` if there are too few blocks.

    The parameters of a block stay together, and so do those outside of all blocks: so the fragment of a parameter does
    not depend on the plan, and a run can go on under another.
    """
    groups = list[tuple[set[str], list[Bucket]]]()
    for bucket in (one for one in buckets if one.learns):
        names, members = {_block(p.name) for p in bucket.parameters}, [bucket]
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, members = names | group[0], [*group[1], *members]
        groups.append((names, members))
    groups.sort(key=lambda group: min(group[0]))
    sizes = [sum(p.numel for bucket in members for p in bucket.parameters) for _, members in groups]
    places = zip(groups, fragments_of(sizes, options.fragments), strict=True)
    return {bucket.index: place for (_, members), place in places for bucket in members}


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found[0] if found else ""


def outer_step(buckets: Sequence[Bucket], streams: bool) -> tuple[list[Instruction], list[Instruction]]:
    """Return what sends the differences of ``buckets``, and the outer steps that take their sums."""
    sent, taken = list[Instruction](), list[Instruction]()
    for bucket in buckets:
        index = bucket.index
        where = difference(index, streams)
        state, param, outer = (
            kind.of(index) for kind in (BufferKind.STATE, BufferKind.PARAM, BufferKind.OUTER)
        )  # fmt: skip
        sent += [
            Instruction(Op.DIFFER, bucket=index, reads=(param, state, outer), writes=(where,)),
            Instruction(
                Op.REDUCE, bucket=index, axes=(ISLANDS,), lane=Lane.REDUCE, reads=(where,), writes=(where,)
            ),
        ]  # fmt: skip
        taken.append(Instruction(Op.OUTER, bucket=index, reads=(where, outer), writes=(param, state, outer, where)))
    return sent, taken


def difference(bucket: int, streams: bool) -> Buffer:
    """Return the buffer in which a bucket's difference is summed over islands."""
    return (BufferKind.DIFFERENCE if streams else BufferKind.GRAD).of(bucket)
