"""The contenders on a card: turns of steps that the device itself times, and the loops that the CPU benchmarks do not
have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alternate import Step, StepMaker
from shardwise.backend import Backend
from task import Task, plain

LLAMA_1B = Task("bf16", "llama", 32000, 2048, 22, 32, 4, 5632, sequence=4096, rows=1, clip_norm=1.0)
"""A task of 1.1 B parameters, with the shape of TinyLlama."""
TINY = Task("bf16", "llama", 128, 32, 2, 2, 1, 64, sequence=32, rows=2, clip_norm=1.0)


def task_for(device: str, tiny: bool) -> Task:
    """Return the task for a type of device."""
    return replace(TINY if tiny else LLAMA_1B, device=device)


class Stamps:
    """Moments of a device's queue, or of the host's clock where the device is the host; taking one does not drain the
    queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, Backend.of(device)
        self._moments: list[Any] = []

    def now(self) -> None:
        """Take a moment, after everything issued so far."""
        asynchronous = self._backend.asynchronous
        self._moments.append(self._backend.event(self._device, timing=True) if asynchronous else time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between each two neighbouring moments; the host waits for the last moment."""
        self._backend.synchronize(self._device)
        pairs = list(zip(self._moments, self._moments[1:], strict=False))
        if self._backend.asynchronous:
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in pairs]


class Turn:
    """A turn of several steps, which counts as one: ``settle`` steps that are not timed, since they allocate again the
    memory that was given back, then ``steps`` that are.

    The loss of a turn is that of its second step.  The host issues all of a turn without waiting.  ``measured`` has for
    each turn the seconds of its timed steps, all its losses, and the most bytes that tensors took and that the
    allocator held.  After a turn the cached memory is given back for the other contenders.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device, settle: int, steps: int) -> None:
        self._step, self._device, self._settle, self._steps = step, device, settle, steps
        self.measured: list[dict[str, Any]] = []

    def __call__(self) -> float:
        backend = Backend.of(self._device)
        gpu = backend.asynchronous
        if gpu:
            backend.reset_peak(self._device)
        losses = [self._step() for _ in range(self._settle)]
        stamps = Stamps(self._device)
        stamps.now()
        for _ in range(self._steps):
            losses.append(self._step())
            stamps.now()
        seconds = stamps.seconds()
        values = [float(loss) for loss in losses]
        found: dict[str, Any] = {"seconds": seconds, "losses": values}
        if gpu:
            found |= {"peak": backend.most_allocated(self._device), "reserved": backend.reserved(self._device)}
            torch.accelerator.empty_cache()
        self.measured.append(found)
        return values[1]  # after one update, before rounding has grown


def turns(rank: int, ranks: int, *, make: StepMaker, task: Task, settle: int, steps: int) -> Step:
    """Make turns of the steps that ``make`` makes."""
    return Turn(make(rank, ranks), task.place, settle, steps)


def compiler(tiny: bool) -> str:
    """Return the backend of ``torch.compile``; at tiny size one that generates no code, which is quick."""
    return "aot_eager" if tiny else "inductor"


def compiled(rank: int, ranks: int, *, task: Task, tiny: bool = False) -> Step:
    """Make the step of the ordinary loop around the model as ``torch.compile`` compiles it."""
    model = torch.compile(task.model(), backend=compiler(tiny))
    return plain(rank, ranks, task=task, model=model)  # type: ignore[arg-type]
