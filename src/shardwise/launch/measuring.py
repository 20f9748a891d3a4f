"""Measure the memory of one step: bytes by category at every instruction, from storages on a CPU and from torch's
allocator on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.instruction import Instruction
from shardwise.data.loader import Batch
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.report.memory import MemoryProfile
from shardwise.runtime.engine import Engine

from .forecast import Forecast
from .forecast_shown import account, headline
from .results import write_json

"""The file in the run's folder that rank 0 writes the prediction and the measurement to."""


class _Source(Protocol):
    """This reads bytes: ``mark`` returns those in use, ``peak`` is the most in use since the last mark, ``made`` is
    what was made since then and is still there, and ``reserve`` is what the allocator keeps unused."""

    @property
    def peak(self) -> int: ...
    @property
    def made(self) -> int: ...
    @property
    def reserve(self) -> int: ...
    def mark(self) -> int: ...


class _Storages(StorageTracker):  # type: ignore[no-untyped-call]
    reserve = 0


class _Allocator:
    """This reads the allocator of one GPU, which follows the host's calls, so that reading it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend, self._before = device, Backend.of(device), 0

    @property
    def peak(self) -> int:
        return self._backend.most_allocated(self._device)

    @property
    def made(self) -> int:
        return max(0, self._backend.allocated(self._device) - self._before)

    @property
    def reserve(self) -> int:
        return self._backend.reserved(self._device) - self.peak

    def mark(self) -> int:
        self._backend.reset_peak(self._device)
        self._before = self._backend.allocated(self._device)
        return self._before


class StepMemory:
    """This measures the step inside of ``with`` without changing its results; :meth:`account` returns what it found.

    Memory that lives beyond its instruction counts as activations, and other memory as temporary, as does memory that
    was there before the step without being the engine's.
    """

    def __init__(self, engine: Engine, name: Callable[[Instruction], str]) -> None:
        self._engine, self._name, self._device = engine, name, engine.comm.device
        self._held = model_states(engine, self._device.type)
        self._host = 0 if self._device.type == "cpu" else sum(model_states(engine, "cpu").values())
        self._source: _Source = _Storages("cpu") if self._device.type == "cpu" else _Allocator(self._device)
        self._held["activations"] = 0
        self._instructions: list[Instruction] = []
        self._peaks: list[dict[str, int]] = []
        self._before = 0

    def __enter__(self) -> Self:
        self._undo = ExitStack()
        if isinstance(self._source, StorageTracker):
            self._undo.enter_context(self._source)
        self._begun = self._source.mark()
        # A CPU shows only what the step makes; a GPU also shows what others keep there, such as workspaces.
        self._others = 0 if self._device.type == "cpu" else max(0, self._begun - sum(self._held.values()))
        self._progress = self._engine.interpreter.progress
        self._engine.interpreter.progress = self._look
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.interpreter.progress = self._progress
        self._end()
        self._undo.__exit__(kind, error, trace)

    def taking(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, which counts as held; a GPU copies it during the step, where the allocator sees it."""
        if not isinstance(self._source, StorageTracker):
            return next(batches)
        with self._source.paused():
            batch = next(batches)
        self._held["activations"] += sum(v.nbytes for v in batch.fields.values())
        return batch

    def _look(self, position: int, one: Instruction) -> None:
        self._end()
        self._before = self._source.mark()
        self._instructions.append(one)
        if self._progress is not None:
            self._progress(position, one)

    def _end(self) -> None:
        """Record the bytes of the instruction that has just ended."""
        if not self._instructions:
            return
        source, held = self._source, self._held
        living = self._before - self._begun + source.made
        temporary = source.peak - self._begun - living + self._others
        self._peaks.append({
            **held, "activations": held["activations"] + living, "temporary": temporary, "reserve": source.reserve,
        })  # fmt: skip

    def account(self) -> MemoryProfile:
        """Return the account of the step, which is over; the peak counts used bytes without the allocator's reserve."""
        used = [sum(p.values()) - p["reserve"] for p in self._peaks]
        at = used.index(max(used))
        return MemoryProfile(
            self._engine.comm.rank, tuple(map(str, self._instructions)), tuple(self._peaks), self._held, at,
            self._name(self._instructions[at]), self._host,
        )  # fmt: skip


def model_states(engine: Engine, device: str) -> dict[str, int]:
    """Return the bytes of an engine's own buffers on one type of device, by category; shared memory counts once."""
    seen: set[tuple[str, int]] = set()
    sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for category, tensor in _buffers(engine):
        place = (tensor.device.type, tensor.data_ptr())
        if tensor.numel() and tensor.device.type == device and place not in seen:
            seen.add(place)
            sizes[category] += tensor.nbytes
    return sizes


def _buffers(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the engine's buffers with their categories, whole ones before those that may be ranges of them."""
    memory = engine.memory
    parameters = [
        *(b.held_parameters if b.common else b.param for b in memory.buckets.values()),
        *memory.slots.slots,
        *memory.stashes.slots,
        *memory.buffers.values(),
        *engine.unused.values(),
    ]
    yield from (("parameters", one) for one in parameters)
    yield from (
        ("gradients", one)
        for one in [*(b.grad for b in memory.buckets.values()), *memory.unreduced.slots]
        if one is not None
    )
    for bucket in memory.buckets.values():
        own = bucket.held_parameters
        if bucket.master.data_ptr() != own.data_ptr():
            yield "optimizer", bucket.master
        given = bucket.optimizer_gradient
        if given is not None and bucket.grad is not None and not _inside(given, bucket.grad):
            yield "gradients", given
        if bucket.local.steps and bucket.learns:
            yield from (("optimizer", one) for one in (bucket.outer.base, bucket.outer.momentum))
            yield from (("gradients", bucket.outer.difference),) if bucket.local.streams else ()
        if (average := bucket.average) is not None:
            yield from (("optimizer", one) for one in (average.average, average.count))
        for update in bucket.updates:
            yield from (("optimizer", state) for _, found in update.optimizer.states() for state in found.values())
        if bucket.whole is not None:
            yield from (("optimizer", state) for _, found in bucket.whole.states() for state in found.values())


def _inside(part: Tensor, whole: Tensor) -> bool:
    start = part.data_ptr() - whole.data_ptr()
    return part.device == whole.device and start >= 0 and start + part.nbytes <= whole.nbytes


def write_memory(path: Path, forecast: Forecast, measured: MemoryProfile | None = None) -> None:
    """Write what was predicted for rank 0, and what has been measured there so far."""
    values: dict[str, Any] = {
        "title": headline(forecast), "device": forecast.device.to_dict(), "budget_bytes": forecast.budget,
        "beside_bytes": dict(forecast.beside),
        "predicted": account(forecast.predict(forecast.plan, 0)).to_dict(),
        "measured": None if measured is None else measured.to_dict(),
    }  # fmt: skip
    write_json(path, values)
