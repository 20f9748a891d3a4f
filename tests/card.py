"""A device without hardware: engines run on it, and what would make their host wait for a real one is found.

torch takes "card" for an accelerator (an extension's device type, registered from Python), and its tensors are fake:
shapes, dtypes and devices without values.  So an op on tensors of two devices is an error, as it would be.
:class:`Waits` sees every op before that, and notes those that make the host wait: reads of a device's values, and
copies between host and device that do not go their own way. Registering lasts as long as the process: use this module
in a process of its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shardwise.backend import Backend

NAME = "card"
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
}  # fmt: skip
"""Ops whose result, or its shape, the host has to read from the device."""

LOOPS = {"transformers.grouped_mm_fallback.default"}
"""Ops of others that do so in Python, where torch does not see it without values."""

INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
}
"""Ops that take a list of indices: one on the host is copied, one of booleans is counted."""


LIFTS = {aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""Ops that take a literal's values."""


class _Module:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


class Pinned:
    """Which storages are page-locked, from whatever thread they come."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._kept: list[Tensor] = []  # so that no other storage gets the key of one

    def pin(self, x: Tensor) -> Tensor:
        if not self.has(x):
            x = x.clone()
            self.note(x)
        return x

    def note(self, x: Tensor) -> Tensor:
        self._keys.add(x.untyped_storage()._cdata)
        self._kept.append(x)
        return x

    def has(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._keys


class Event:
    """An event of the device, which knows in which step it was recorded."""

    def __init__(self, waits: Waits) -> None:
        self._waits, self._step = waits, waits.step

    def synchronize(self) -> None:
        if self._step == self._waits.step:
            self._waits.note("waits for an event of this very step")

    def wait(self, *_: Any) -> None:
        """On the device."""

    def query(self) -> bool:
        return self._step < self._waits.step


class Waits(TorchDispatchMode):
    """Notes in ``found`` what makes the host wait, by what it was and where, while ``step`` is at least ``since``.

    A read of values gives zeros, so that all goes on.
    """

    def __init__(self, pinned: Pinned, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.pinned = fake, pinned
        self.step = self.since = 0
        self.found: dict[str, int] = {}

    def note(self, what: str) -> None:
        if self.step >= self.since:
            frames = [
                f
                for f in traceback.extract_stack()[:-1]
                if "/shardwise/" in f.filename or f.filename.endswith(".py") and "<eval" in f.filename
            ]
            where = f"{frames[-1].filename.split('/shardwise/')[-1]}:{frames[-1].lineno}" if frames else "elsewhere"
            text = f"{what} at {where}"
            self.found[text] = self.found.get(text, 0) + 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten.is_pinned.default:
            return self.pinned.has(args[0])
        if func is aten._pin_memory.default:
            return self.pinned.pin(args[0])
        pin = kwargs.pop("pin_memory", False)
        if (what := self._waits(func, args, kwargs)) is not None:
            self.note(f"{func}: {what}")
        if func is aten._local_scalar_dense.default:
            return _zero(args[0].dtype)
        out = func(*args, **kwargs) if func in LIFTS else self._without_values(func, args, kwargs)
        return self.pinned.note(out) if pin else out

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What torch computes for tensors of the host whose values it knows, it would try on the device too."""
        for tensor in _tensors(args, kwargs):
            if isinstance(tensor, FakeTensor):
                tensor.constant = None
        args, kwargs = tree_map_only(
            Tensor, lambda t: t if isinstance(t, FakeTensor) else self.fake.from_tensor(t), (args, kwargs)
        )
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        there = any(t.device.type == NAME for t in _tensors(args, kwargs))
        if there and (func in READS or str(func) in LOOPS):
            return "the host reads values of the device"
        if func is aten.masked_fill.Tensor and args[2].device.type == NAME:
            return "its kernel reads the value on the host"
        if func is aten.repeat_interleave.Tensor and there and kwargs.get("output_size") is None:
            return "the host reads how many there are"
        if func in INDEXED and args[0].device.type == NAME:
            given = [i for i in args[1] if isinstance(i, Tensor)]
            if any(i.device.type != NAME for i in given):
                return "a blocking copy of an index"
            if any(i.dtype in (torch.bool, torch.uint8) for i in given):
                return "the host reads how many are true"
        return self._copies(func, args, kwargs)

    def _copies(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with a copy between host and device."""
        if func is aten._to_copy.default:
            (source,) = args
            device = torch.device(kwargs.get("device") or source.device)
            target, dtype = device.type, kwargs.get("dtype") or source.dtype
            host = source if source.device.type != NAME else None  # torch pins what it makes on the host itself
            plain = source.is_contiguous()
            free = kwargs.get("non_blocking", False)
        elif func is aten.copy_.default:
            goal, source = args[:2]
            target, dtype = goal.device.type, goal.dtype
            host = source if source.device.type != NAME else goal
            plain = source.is_contiguous() and goal.is_contiguous() and source.shape == goal.shape
            free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            return None
        if NAME not in (target, source.device.type) or target == source.device.type:
            return None
        way = f"{source.device.type} to {target}, {tuple(source.shape)}"
        if not free:
            return f"a blocking copy, {way}"
        if host is not None and not self.pinned.has(host):
            return f"a copy by way of pageable memory, {way}"
        return None if dtype == source.dtype and plain else f"a copy by way of a temporary, {way}"


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [a for a in tree_leaves((args, dict(kwargs))) if isinstance(a, Tensor)]


def _zero(dtype: torch.dtype) -> bool | int | float:
    return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0


def register() -> torch.device:
    """Make "card" a type of device of this process, and the accelerator that it has."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


@contextmanager
def watched() -> Iterator[Waits]:
    """Everything in this thread runs without values, and is watched; other threads may pin memory."""
    pinned = Pinned()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    waits = Waits(pinned, fake)
    tensor = {
        "data_ptr": lambda self: self.untyped_storage().data_ptr() + self.storage_offset() * self.itemsize,
        "pin_memory": lambda self: pinned.pin(self),
        "is_pinned": lambda self: pinned.has(self),
    }
    counted = {"most_allocated": lambda self, device: 0, "reset_peak": lambda self, device: None}
    with (
        patch.multiple(torch.Tensor, **tensor),
        patch.object(torch.UntypedStorage, "data_ptr", lambda self: self._cdata << 20),  # what tells one from another
        patch.multiple(Backend, **counted, event=lambda self, device, timing=False: Event(waits),
        synchronize=lambda self, device: waits.note("waits for the device")),
        fake,
        waits,
    ):  # fmt: skip
        yield waits


with suppress(AttributeError):  # an op of later torch
    READS |= {aten.item.default}
