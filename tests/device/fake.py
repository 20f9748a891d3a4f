"""A GPU that is not there: engines run on fake tensors of it, and what would make the host wait is written down.

Fake tensors have a device, a shape and a dtype, but no values.  So an op on tensors of two devices fails as it would on a GPU, and so
does reading a value of the device.  :class:`Waits` notes the copies that would block, and :class:`FakeBackend` stands in for what needs a
driver: page-locked memory, events, the sizes of memory.  It has to run with the library made of ``fake.cpp`` (:func:`environment`).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.backend import Backend
from shardwise.runtime.numbers import Numbers

aten = torch.ops.aten
SOURCE = Path(__file__).with_name("fake.cpp")
GPU = torch.device("cuda", 0)
READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default, aten.equal.default)


def environment() -> dict[str, str]:
    """Variables for a process in which fake GPU tensors can be differentiated; compiles the library once."""
    root = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"shardwise_fake_device_{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        where = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", str(SOURCE), "-o", str(part), *where]
        subprocess.run(command, check=True, timeout=240)
        part.replace(library)
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}


@dataclass
class Waits(TorchDispatchMode):
    """Counts, while it is ``on``, what makes the host wait for the device: by what and where in shardwise's code."""

    on: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    pinned: set[int] = field(default_factory=set)  # storages of page-locked tensors, by identity

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/shardwise/" in f.filename or "eval_with_key" in f.filename]
        at = f"{frames[-1].filename.split('/shardwise/')[-1]}:{frames[-1].lineno}" if frames else "a test"
        self.seen[f"{what} at {at}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on:
            found = self._wait(func, args, kwargs)
            if found is not None:
                self.note(found)
        return func(*args, **kwargs)

    def _wait(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
        tensors = [a for a in _pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if func in READS:
            return f"host read {func}" if any(t.device.type == GPU.type for t in tensors) else None
        if func is aten._to_copy.default:
            there, async_ = torch.device(kwargs.get("device") or tensors[0].device), kwargs.get("non_blocking", False)
            return self._copy(tensors[0], there, None, async_)
        if func is aten.copy_.default:
            return self._copy(
                tensors[1], tensors[0].device, tensors[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        return None

    def _copy(self, source: Tensor, there: torch.device, goal: Tensor | None, asynchronous: bool) -> str | None:
        if source.device.type == there.type:
            return None
        host = source if source.device.type == "cpu" else goal
        if asynchronous and host is not None and self.is_pinned(host):
            return None
        how = "unpinned" if asynchronous else "blocking"
        return f"{how} copy {source.device.type} -> {there.type} of {tuple(source.shape)}"

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned


class Event:
    """Of a stream of the fake device: how many steps had been begun when it was recorded."""

    def __init__(self, clock: Callable[[], int], waits: Waits) -> None:
        self._clock, self._waits, self._at = clock, waits, clock()

    def synchronize(self) -> None:
        if self._clock() <= self._at:
            self._waits.note("wait for the step that has just been issued")

    def query(self) -> bool:
        return self._clock() > self._at


@contextmanager
def fake_gpu(clock: Callable[[], int]) -> Iterator[Waits]:
    """Tensors made inside are fake; ``clock`` says how many steps have been begun."""
    waits = Waits()
    real_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return pinned(real_empty(*args, **kwargs)) if pin_memory else real_empty(*args, **kwargs)

    kept: list[Tensor] = []  # so that identities stay their own

    def pinned(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        waits.pinned.add(tensor.untyped_storage()._cdata)
        return tensor

    def read(self: Numbers) -> list[float]:
        """No step was skipped; nobody wants to stop."""
        assert self._copied is not None
        self._copied.synchronize()
        return [1.0, 1.0, 0.0, 4.0, 0.0, 0.0, *[1.0, 0.0][: len(self.tensors) - 6]]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        patch.object(Tensor, "pin_memory", lambda self: pinned(self.clone())),
        patch.object(Tensor, "is_pinned", lambda self: waits.is_pinned(self)),
        patch.object(torch, "empty", empty),
        patch.object(Backend, "event", lambda self, device, *, timing=False: Event(clock, waits)),
        patch.object(Backend, "most_allocated", lambda self, device: 0),
        patch.object(Numbers, "read", read),
        patch.object(
            Tensor, "data_ptr", lambda self: (self.untyped_storage()._cdata << 20) + self.storage_offset() * self.itemsize
        ),
        patch.object(torch.UntypedStorage, "data_ptr", lambda self: self._cdata << 20),
        mode,
        waits,
    ):
        yield waits
