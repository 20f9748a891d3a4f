"""Tied parameters, which several stages use: each of their ranks has them, and updates with the sum of all gradients.

Ranks send their gradients to the first one, which adds them in the order of ranks and sends the sum back, so that all
update with the same bits. This comes last: a rank that waited for the sum right after its backward would block the
ranks whose backward it needs, which is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.lower.stages import StageSplit
from shardwise.parallel.pipeline import PIPELINE
from shardwise.units.trace import Bucket


def check_tied(plan: Plan, cut: StageSplit, buckets: Sequence[Bucket]) -> None:
    """Raise :class:`ConfigError` if stages share a parameter under a schedule in which each updates by itself."""
    shared = next((b for b in buckets if b.learns and len(cut.holders(b)) > 1), None)
    if plan.stages_alone and shared is not None:
        stages = " and ".join(map(str, cut.holders(shared)))
        name = shared.parameters[0].name
        wrong = f'"{cut.schedule}" updates each stage for itself, but {name} is used by stages {stages}'
        legal = 'weights that are not tied across stages, or another schedule, such as "pipedream-2bw"'
        raise ConfigError.on("schedule", wrong, legal)


def shared(cut: StageSplit, rank: int, own: Sequence[Bucket]) -> Iterator[tuple[Bucket, tuple[int, ...]]]:
    """Yield the buckets of ``rank`` that learn and that other ranks of the pipeline have too, with all their ranks.

    They come in the order in which the ranks send them to each other, the last first, as backward comes to them."""
    for bucket in reversed(own):
        holders = cut.holders(bucket)
        if len(holders) > 1 and bucket.learns:
            yield bucket, holders


def parts(
    cut: StageSplit, rank: int, own: Sequence[Bucket], complete: Mapping[int, int]
) -> Iterator[tuple[int, Instruction]]:
    """Yield the SENDs of a rank's gradients to the first of their ranks, with the positions in the draft after which
    they come: ``complete`` has those after which each bucket's gradient is complete.  One may wait for another, since
    messages arrive in the order in which they are sent."""
    at = -1
    for bucket, (first, *_) in shared(cut, rank, own):
        if rank != first:
            at = max(at, complete[bucket.index])
            yield at, _message(Op.SEND, bucket, first - rank, reads=(BufferKind.GRAD.of(bucket.index),))


def tied(cut: StageSplit, rank: int, own: Sequence[Bucket]) -> Iterator[Instruction]:
    """Yield what ``rank`` does at the end of a batch to have the sums of the gradients of its tied buckets."""
    for bucket, (first, *others) in shared(cut, rank, own):
        grad = BufferKind.GRAD.of(bucket.index)
        if rank != first:
            yield _message(Op.RECEIVE, bucket, first - rank, writes=(grad,))
            continue
        inbox = [BufferKind.RECEIVED.of(bucket.index, version=other) for other in others]
        for other, place in zip(others, inbox, strict=True):
            yield _message(Op.RECEIVE, bucket, other - rank, writes=(place,))
        for place in inbox:
            yield Instruction(
                Op.ADD, bucket=bucket.index, version=place.version, reads=(place, grad), writes=(grad,), frees=(place,)
            )
        for other in others:
            yield _message(Op.SEND, bucket, other - rank, reads=(grad,))


def _message(
    op: Op, bucket: Bucket, offset: int, *, reads: tuple[Buffer, ...] = (), writes: tuple[Buffer, ...] = ()
) -> Instruction:
    lane = Lane.SEND if op is Op.SEND else Lane.RECEIVE
    return Instruction(op, bucket=bucket.index, peer=(PIPELINE, offset), lane=lane, reads=reads, writes=writes)
