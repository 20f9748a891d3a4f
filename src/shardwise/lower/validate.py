"""Where ranks validate an update that each has made by its own norm (``norm = "post-validate"``).

After a batch a stage updates by the norm of its own gradients and goes on with the next batch's forwards, as Qi et al.
(Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4) do.  The norm over all stages is summed meanwhile.  Each
rank reads it before its first backward of the next batch: that follows a forward on every rank, which comes after that
rank's own part of the sum, so nobody waits. Where the update was wrong all ranks go back to before it, and run again
what came since: forwards and their messages alone.
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
    """``at[rank][batch]``: before which position of computing a rank validates its update of a batch;
    ``begin[rank][batch]``: where it begins to compute a batch."""

    versions: Versions
    begin: Sequence[Sequence[int]]
    at: Sequence[Sequence[int]]

    @staticmethod
    def of(drafts: Sequence[ProgramDraft], messages: Sequence[Message], versions: Versions) -> Validations:
        """As late as can be, so that no message from behind a validation is received before one."""
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
        """Before which position of computing its receiver may not ask for a message: in the batch before it, or before
        a validation if the message is from behind that."""
        batch = self.versions.batch(one.microbatch)
        if batch == 0 or not self.versions.validates(batch - 1):
            return 0
        begin = self.begin[one.to][batch]
        return begin if one.made < self.at[one.source][batch - 1] else max(begin, self.at[one.to][batch - 1])

    def crosses(self, one: Message, asked: int) -> bool:
        """Whether a message is sent before a validation, and asked for after that."""
        batch = self.versions.batch(one.microbatch) - 1
        if batch < 0 or not self.versions.validates(batch):
            return False
        return one.made < self.at[one.source][batch] and asked >= self.at[one.to][batch]


def _latest(drafts: Sequence[ProgramDraft], messages: Sequence[Message], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The task on each rank that has to come after the validation: the first backward of a batch, of which a rank
    computes ``spans`` from first to last, or what hears of another's; at the latest the last."""
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
