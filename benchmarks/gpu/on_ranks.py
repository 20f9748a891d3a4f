"""What the ranks of several cards run besides steps, in a module of its own, since ranks import it."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.backend import Backend
from shardwise.core.instruction import Lane
from task import Task, divided

from . import profiles


def recorded(rank: int, ranks: int, *, task: Task, zero: int) -> Callable[[], float]:
    """Make a contender whose one step is recorded instruction by instruction; ``measured`` has the hidden share of
    communication.
    """
    from shardwise.runtime.recorder import Recorder

    trainer, given = divided(rank, ranks, task=task, zero=zero)

    def run() -> float:
        for _ in range(2):
            trainer.step(given)
        with Recorder(trainer.engine.interpreter) as recorder:
            result = trainer.step(given)
        step = recorder.found(0, 0)
        by: dict[bool, list[profiles.Span]] = {True: [], False: []}
        for event in step.events:
            by[event.lane == Lane.COMPUTE].append((event.start, event.stop))
        share = profiles.hidden_share(by[False], by[True])
        seconds = profiles.length(by[False])
        run.measured.append({"hidden": share, "communication_seconds": seconds, "step_seconds": step.seconds})  # type: ignore[attr-defined]
        return float(result.loss)

    run.measured = []  # type: ignore[attr-defined]
    return run


def one_more(rank: int, ranks: int, *, device: str) -> Callable[[], float]:
    """Make a contender whose step makes a group of all ranks and uses it first; ``measured`` has the bytes of free
    memory that this takes.
    """
    import psutil
    import torch
    import torch.distributed as dist

    backend = Backend.of(device)
    place = backend.device()
    backend.select(place)
    dist.init_process_group(backend.transport or "gloo")
    large = torch.ones(2**22 if backend.asynchronous else 2**12, device=place)
    backend.synchronize(place)

    def free() -> int:
        backend.synchronize(place)
        return backend.free_and_total(place)[0] if backend.asynchronous else -int(psutil.Process().memory_info().rss)

    def run() -> float:
        before = free()
        group = dist.new_group(list(range(ranks)))
        for tensor in (large[:8], large):
            dist.all_reduce(tensor, group=group)
        run.measured.append({"bytes": before - free()})  # type: ignore[attr-defined]
        return 0.0

    run.measured = []  # type: ignore[attr-defined]
    return run
