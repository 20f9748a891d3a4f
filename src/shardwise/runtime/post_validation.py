"""This runs programs whose stages update by their own norm and go back if that was wrong (``norm = "post-validate"``).

A stage copies what an update will change (BACKUP), updates, and goes on with the next batch.  When the norm over all
stages is known (VALIDATE) and asks for another update, each rank puts the copies back, updates again, and repeats what
it has computed of the next batch since then.  Lowering says where these instructions stand (``lower/validate.py``), and
``core/repeat.py`` what is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.core.instruction import Instruction, Op
from shardwise.core.repeat import repeated
from shardwise.runtime.interpreter import Executor, Run


@dataclass
class PostValidatedRun(Run):
    """This run can go back to before the latest update.

    ``backups`` has copies of what this update has changed, by bucket.  ``before`` and ``after`` are the values that
    forwards have given to the model's buffers before and with the batch of this update.
    """

    backups: dict[int, list[Tensor]] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    going_back: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.repeated = repeated(self.program.instructions)

    def operations(self) -> Mapping[Op, Executor]:
        return {**super().operations(), Op.BACKUP: self.backup, Op.VALIDATE: self.validate}

    def positions(self) -> Iterator[int]:
        """Yield all positions in order, and after a VALIDATE that goes back those of :func:`repeated` once more."""
        for position in super().positions():
            yield position
            if self.going_back:
                self.going_back = False
                yield from self.repeated[self.program.instructions[position].version]

    def reach_verdict(self, one: Instruction) -> None:
        """Let this stage decide alone where its update is validated later; on the last batch all decide together."""
        if one.version not in self.repeated:
            super().reach_verdict(one)
            return
        self.batches[one.version].decide_alone()
        self.after = dict(self.computing.updates)

    def backup(self, one: Instruction) -> None:
        self.backups[one.bucket] = self.memory.buckets[one.bucket].backup(self.memory.loss_scale is not None)

    def validate(self, one: Instruction) -> None:
        """If the update was wrong, go back to before it, as all ranks do: :meth:`positions` goes on there."""
        batch = self.batches[one.version]
        right = batch.validate()
        self.rescale(one)
        if not batch.skips:
            self.before = self.after
        if not right:
            self.drop(one.version + 1)
            self.computing.updates = dict(self.before)
            self.computing.starts.clear()
            for bucket, backup in self.backups.items():
                self.memory.buckets[bucket].restore(backup, self.memory.loss_scale is not None)
            self.going_back = True
        self.backups.clear()

    def drop(self, number: int) -> None:
        """Drop all that has been computed and sent for a batch; only forwards of it have been run."""
        later = self.program.instructions[self.computing.position :]
        places = [
            (one, *self.batches.place(one.microbatch))
            for one in later
            if one.crosses and self.batches.number(one.microbatch) == number
        ]
        sent = [self.messages.receive(one, batch.env(m)) for one, batch, m in places]
        self.wait_for_all()
        for handle in sent:
            handle.wait()
        self.computing.drop()
        self.batches.again(number)

    def report(self, one: Instruction) -> None:
        """Take the verdict on this batch for the buffers: batches follow each other, so that on the last one counts."""
        self.skip = self.batches[one.version].skip

    def old_buffer(self, name: str) -> Tensor:
        """Return the value that the latest batch that was not skipped has left."""
        return self.before.get(name, super().old_buffer(name))
