"""Find where ranks validate an update that each has made by its own norm (``norm = "post-validate"``).

After a batch a stage updates by the norm of its own gradients and goes on with the next batch's forwards, as in Qi et
al. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4), while the norm over all stages is summed. Each rank
reads that norm before its first backward of the next batch. This backward depends on a forward of every rank, which
comes after the rank's own part of the sum, so no rank waits. If the update was wrong, all ranks go back to before it
and repeat what came since, which is only forwards and their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.instruction import OP_INFO
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.stages import Message
from shardwise.lower.versions import BACKWARD, Versions


@dataclass(frozen=True)
class Validations:
    """Before position ``at[rank][batch]`` of its compute instructions a rank validates its update of a batch; it begins
    a batch at position ``begin[rank][batch]``."""

    versions: Versions
    begin: Sequence[Sequence[int]]
    at: Sequence[Sequence[int]]

    @staticmethod
    def of(drafts: Sequence[ProgramDraft], messages: Sequence[Message], versions: Versions) -> Validations:
        """Put validations as late as possible, but so that no message sent after one is received before one."""
        each = [len(draft.tasks) // versions.batches for draft in drafts]
        begin = [[draft.tasks[k * n] for k in range(versions.batches)] for draft, n in zip(drafts, each, strict=True)]
        found: list[list[int]] = [[] for _ in drafts]
        ends = [versions.ends(draft) for draft in drafts]
        by: list[list[Message]] = [[] for _ in range(versions.batches)]
        for one in messages:
            by[versions.batch(one.microbatch)].append(one)
        for batch in range(versions.batches):
            if versions.validates(batch):
                spans = [(first[batch + 1], end[batch + 1]) for first, end in zip(begin, ends, strict=True)]
                for rank, position in enumerate(_latest(drafts, by[batch + 1], spans)):
                    found[rank].append(position)
        return Validations(versions, begin, found)

    def earliest(self, one: Message) -> int:
        """Return the first position at which its receiver may ask for a message: the start of the message's batch, or
        the receiver's validation if the message is sent after the sender's."""
        batch = self.versions.batch(one.microbatch)
        if batch == 0 or not self.versions.validates(batch - 1):
            return 0
        begin = self.begin[one.to][batch]
        return begin if one.made < self.at[one.source][batch - 1] else max(begin, self.at[one.to][batch - 1])

    def crosses(self, one: Message, asked: int) -> bool:
        """Whether a message is sent before the sender's validation, and asked for after the receiver's."""
        batch = self.versions.batch(one.microbatch) - 1
        if batch < 0 or not self.versions.validates(batch):
            return False
        return one.made < self.at[one.source][batch] and asked >= self.at[one.to][batch]


def _latest(drafts: Sequence[ProgramDraft], messages: Sequence[Message], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the start of the task on each rank that must come after the validation: the task of its first backward in
    the batch whose (begin, end) are ``spans``, or an earlier one that needs a message sent after a validation."""
    found = []
    for draft, (begin, end) in zip(drafts, spans, strict=True):
        backwards = (p for p in range(begin, end) if OP_INFO[draft.compute[p].op].task in BACKWARD)
        found.append(draft.task_of(next(backwards, end)))
    moved = True
    while moved:
        moved = False
        for one in messages:
            start = drafts[one.to].task_of(one.needed)
            if one.made >= found[one.source] and start < found[one.to]:
                found[one.to], moved = start, True
    return found
