"""A rank whose updates are validated later: it goes back where a stage has updated by its own norm and should not have.

What a VALIDATE means: the gradients of a batch are updated with as they are, unless a stage's own norm is not finite.
If the norm of all stages says otherwise, all ranks put back what the update has changed, forget what they have computed
since and what they have been sent, and go on behind their decision once more, with what that norm says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.core.instruction import Buffer, Instruction, Op
from toys.ranks import Rank
from toys.units import Values

AS_THEY_ARE = 1  # what gradients are multiplied by
KEPT = ("param", "state", "grad")  # what lives from batch to batch


class ValidatingRank(Rank):
    """One that executes BACKUP and VALIDATE too."""

    def run(self) -> Iterator[None]:
        self.unvalidated = {one.version for one in self.program.instructions if one.op is Op.VALIDATE}
        yield from super().run()

    def do_decide(self, one: Instruction) -> None:
        if one.version in self.unvalidated:
            (norm,), (place,) = one.reads, one.writes
            self.memory[place] = None if math.isnan(self.memory[norm]) else AS_THEY_ARE
        else:
            super().do_decide(one)

    def spend(self, one: Instruction) -> None:
        """Gradients stay until no other update with them can be asked for."""
        if one.version not in self.unvalidated:
            super().spend(one)

    def do_backup(self, one: Instruction) -> None:
        (place,), param = one.writes, self.param[one.bucket]
        self.memory[place] = list(param[self.held(one.bucket, param)]), list(self.state[one.bucket])

    def execute(self, position: int) -> Iterator[None]:
        one = self.program.instructions[position]
        if one.op is not Op.VALIDATE:
            yield from super().execute(position)
            return
        for at in one.waits:
            yield from self.wait(at)
        (norm,), (verdict,) = (b for b in one.reads if b.kind == "norm"), one.writes
        scale, again = self.toy.scale(self.memory[norm]), self.since(position)
        self.unvalidated.discard(one.version)
        if scale != AS_THEY_ARE:
            yield from self.forget(again, position)
            self.restore(one.reads)
        else:
            for bucket in (b.index for b in one.reads if b.kind == "grad"):
                self.grad[bucket][:] = [None] * len(self.grad[bucket])
        self.memory[verdict] = scale
        self.free(one)
        self.done += 1
        for at in again if scale != AS_THEY_ARE else ():
            yield from super().execute(at)

    def since(self, position: int) -> list[int]:
        """What has followed from the decision that the VALIDATE at a position may find wrong."""
        each, version = self.program.instructions, self.program.instructions[position].version
        (decided,) = (at for at, one in enumerate(each) if (one.op, one.version) == (Op.DECIDE, version))
        of_norm = Buffer("norm", version=version)
        return [
            at for at in range(decided + 1, position) if each[at].op is not Op.BACKUP and of_norm not in each[at].writes
        ]

    def forget(self, again: list[int], position: int) -> Iterator[None]:
        """What these have computed of the next batch; messages of it that come behind the VALIDATE come for nothing
        now.
        """
        each = self.program.instructions
        yield from self.wait_for_all()
        for at in range(position + 1, len(each)):
            if each[at].crosses and each[at].microbatch // self.plan.microbatches == each[position].version + 1:
                self.position = at
                self._message(each[at], None, lambda _: None)
        yield from self.wait_for_all()
        for place in {place for at in again for place in each[at].writes if place.kind not in KEPT}:
            self.memory.pop(place, None)

    def restore(self, places: tuple[Buffer, ...]) -> None:
        """Other ranks' shards have to be gathered again."""
        for place in places:
            if place.kind == "backup":
                values, self.state[place.index] = self.memory[place]
                param: Values = self.param[place.index]
                at = self.held(place.index, param)
                param[:] = [None] * len(param)
                param[at] = values
