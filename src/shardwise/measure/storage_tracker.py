"""Follow the bytes of every storage that ops make, from the op to the end of the storage, on tensors of any device.

Whole storages are counted as ops allocate them; views and in-place ops add nothing.  Temporaries inside one kernel
(the cast of an operand, a workspace), the allocator's rounding, and memory that no op made (``torch.from_numpy``) are
not seen.  While any dispatch mode is on, torch leaves out some in-place shortcuts: autograd sums two gradients of one
tensor into a third, which it otherwise sums into the first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.graph.schema import tensors_in
from shardwise.graph.torch_private import TorchDispatchMode, schema

_FRESH = ("aten::lift_fresh", "aten::lift")  # the operand has just been made, by torch.tensor, where no mode sees it


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the storages made while this mode is on; a storage leaves the count when it ends, even later.

    ``current`` is the number of bytes alive, ``peak`` the most since the last :meth:`mark`, ``peak_op`` the op that
    reached it ("" where none rose above the mark), and ``made`` the bytes alive that were made since the mark.
    ``device`` is the type of device whose storages count, by default any.  Where another mode replaces results, this
    one has to be the inner of the two.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.current = self.peak = 0
        self.peak_op = ""
        self._paused = False
        self._alive: dict[weakref.ref[Any], int] = {}
        self._young: set[weakref.ref[Any]] = set()

    @property
    def made(self) -> int:
        return sum(self._alive[one] for one in self._young)

    def mark(self) -> int:
        """Begin a new peak at the bytes that are alive now, and return them."""
        self.peak, self.peak_op = self.current, ""
        self._young.clear()
        return self.current

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the storages that are made in this context."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` is counted."""
        return weakref.ref(tensor.untyped_storage()) in self._alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self._paused:
            return results
        given: set[int] | None = None
        for tensor in tensors_in(results):
            if self.device not in (None, tensor.device.type):
                continue
            storage = tensor.untyped_storage()
            before = self._alive.get(weakref.ref(storage))
            if before is None:
                if given is None:
                    fresh = schema(func).name in _FRESH
                    given = set() if fresh else {id(t.untyped_storage()) for t in tensors_in((args, kwargs))}
                if id(storage) in given:
                    continue
            self._count(storage, before, func)
        return results

    def _count(self, storage: Any, before: int | None, func: Any) -> None:
        if before is None:
            key = weakref.ref(storage, self._end)
            self._alive[key] = storage.nbytes()
            self._young.add(key)
        elif before != storage.nbytes():  # resized; the old key stays, because its callback ends the count
            self._alive[weakref.ref(storage)] = storage.nbytes()
        self.current += storage.nbytes() - (before or 0)
        if self.current > self.peak:
            self.peak, self.peak_op = self.current, str(func)

    def _end(self, reference: weakref.ref[Any]) -> None:
        self.current -= self._alive.pop(reference)
        self._young.discard(reference)
