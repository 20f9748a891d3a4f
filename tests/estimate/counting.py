"""What the ranks of a step hand to their communicators, instruction by instruction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from real import rows_of
from torch import Tensor

from shardwise.capture.casts import cast_field
from shardwise.core.instruction import Instruction
from shardwise.core.optim import OptimizerChoice
from shardwise.lower.compiled import Compiled
from shardwise.measure.unit_traffic import Traffic
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

Seen = tuple[Instruction, list[Traffic]]


class Counting:
    """The communicator ``one``, whose operations of several ranks and some bytes go to the last of ``seen``."""

    def __init__(self, one: ThreadCommunicator) -> None:
        self.one, self.seen = one, list[Seen]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.one, name)

    def note(self, kind: str, whole: Tensor, axes: tuple[str, ...]) -> None:
        if self.seen and axes and whole.nbytes:
            self.seen[-1][1].append(Traffic(kind, axes, whole.nbytes))

    def all_reduce(self, x: Tensor, axes: Any, **more: Any) -> Any:
        self.note("all_reduce", x, self.one.group(axes).axes)
        return self.one.all_reduce(x, axes, **more)

    def all_gather(self, out: Tensor, x: Tensor, axes: Any, **more: Any) -> Any:
        self.note("all_gather", out, self.one.group(axes).axes)
        return self.one.all_gather(out, x, axes, **more)

    def reduce_scatter(self, out: Tensor, x: Tensor, axes: Any, **more: Any) -> Any:
        self.note("reduce_scatter", x, self.one.group(axes).axes)
        return self.one.reduce_scatter(out, x, axes, **more)

    def all_to_all(self, out: Tensor, x: Tensor, axes: Any, **more: Any) -> Any:
        self.note("all_to_all", x, self.one.group(axes).axes)
        return self.one.all_to_all(out, x, axes, **more)

    def push(self, *given: Any, **more: Any) -> Any:
        return self.one.push(*given, **more)  # by threads it is an all_to_all

    def broadcast(self, x: Tensor, axes: Any, root: int = 0, **more: Any) -> Any:
        self.note("broadcast", x, self.one.group(axes).axes)
        return self.one.broadcast(x, axes, root, **more)

    def shift(self, out: Tensor, x: Tensor, axes: Any, **more: Any) -> Any:
        self.note("shift", x, self.one.group(axes).axes)
        return self.one.shift(out, x, axes, **more)

    def send(self, x: Tensor, to_rank: int, **more: Any) -> Any:
        self.note("send", x, (PIPELINE,))
        return self.one.send(x, to_rank, **more)

    def receive(self, x: Tensor, from_rank: int, **more: Any) -> Any:
        self.note("receive", x, (PIPELINE,))
        return self.one.receive(x, from_rank, **more)


def counted(subject: Compiled, batch: Mapping[str, Tensor], choice: OptimizerChoice) -> list[list[Seen]]:
    """Of each rank in a first step."""
    rows = len(next(iter(batch.values())))

    def rank(comm: ThreadCommunicator) -> list[Seen]:
        counting = Counting(comm)
        engine = Engine(subject, counting, choice)  # type: ignore[arg-type]
        engine.interpreter.progress = lambda _, one: counting.seen.append((one, []))
        own = rows_of(batch, subject.plan, comm.rank)
        engine.step({k: cast_field(v, subject.plan.numeric.precision) for k, v in own.items()}, rows)
        return counting.seen

    return run_ranks(subject.plan.mesh, rank, timeout=60)
