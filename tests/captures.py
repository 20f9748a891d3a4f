"""Captures that tests share: ``torch.export`` of one model, loss and batch runs once in a process of tests.

A capture depends on everything that the module holds but the values of its parameters, on the loss, and on the shapes
of the batch; all of that, pickled, is its key.  Nobody changes a captured graph once it is normalised: as one serves
all plans of a model, so that it serves other tests as well.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.varying import Varying
from shardwise.graph.functional import Normal
from shardwise.units import tracing
from shardwise.units.tracing import CaptureKey, Captures

KEPT = 96
"""How many captures a process keeps, the latest that were asked for."""


class _Pickler(pickle.Pickler):
    """Writes parameters by their shapes and tensors by their values; what no name leads to, by its identity."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.alive: list[Any] = []  # an identity means something for as long as the object lives

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            return tuple, ((str(obj.dtype), str(obj.device), *obj.shape, obj.stride(), obj.requires_grad, type(obj)),)
        if isinstance(obj, Tensor):
            plain = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return tuple, ((str(obj.dtype), str(obj.device), *obj.shape, obj.stride(), obj.requires_grad, plain),)
        if isinstance(obj, ModuleType):
            return str, (obj.__name__,)
        if isinstance(obj, FunctionType | type) and not _has_a_name(obj):
            self.alive.append(obj)
            return int, (id(obj),)
        return NotImplemented


def _has_a_name(obj: FunctionType | type) -> bool:
    found: Any = sys.modules.get(obj.__module__)
    for word in obj.__qualname__.split("."):
        found = getattr(found, word, None)
    return found is obj


def _key(*parts: Any) -> tuple[bytes, list[Any]] | None:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(parts)
    except Exception:  # objects say in many ways that they cannot be pickled
        return None
    return file.getvalue(), pickler.alive


class SharedCaptures:
    """Stands for ``tracing._normal``: ``make`` is asked only for what is not here."""

    def __init__(self, make: Callable[..., Normal]) -> None:
        self.make = make
        self.found: OrderedDict[Any, tuple[Normal, list[Any]]] = OrderedDict()

    def __call__(
        self, module: nn.Module, batch: Mapping[str, Tensor], loss: Any, key: CaptureKey, captures: Captures,
        varying: Varying,
    ) -> Normal:  # fmt: skip
        # One capture serves several shapes, in ways that are tested, or the values of a batch.
        if varying.dims or varying.drawing is not None:
            return self.make(module, batch, loss, key, captures, varying)
        if key not in captures:
            captures[key] = self._shared(module, batch, loss, key, Varying(known=varying.known))
        return captures[key]

    def _shared(
        self, module: nn.Module, batch: Mapping[str, Tensor], loss: Any, key: CaptureKey, varying: Varying
    ) -> Normal:
        rows = {x.shape[0] for x in batch.values() if x.dim()}
        fields = [(name, str(x.dtype), x.dim(), *x.shape[1:]) for name, x in batch.items()]
        whole = _key(module, loss, key, fields, str(torch.get_default_dtype()))
        if whole is None:
            return self.make(module, batch, loss, key, {}, varying)
        pickled, alive = whole
        place = next((place for place in ((pickled, None), (pickled, *rows)) if place in self.found), None)
        if place is None:
            normal = self.make(module, batch, loss, key, {}, varying)
            if normal.checks is not None:  # it depends on the values of the batch
                return normal
            place = (pickled, None) if normal.captured.rows is None else (pickled, *rows)
            self.found[place] = normal, alive
            if len(self.found) > KEPT:
                self.found.popitem(last=False)
        self.found.move_to_end(place)
        return self.found[place][0]


@contextmanager
def shared() -> Iterator[None]:
    """Meanwhile traces take their captures from those that this process has made."""
    before = tracing._normal
    tracing._normal = SharedCaptures(before)
    try:
        yield
    finally:
        tracing._normal = before


@contextmanager
def apart() -> Iterator[None]:
    """Meanwhile every capture is made, for tests that count them."""
    found = tracing._normal
    tracing._normal = found.make if isinstance(found, SharedCaptures) else found
    try:
        yield
    finally:
        tracing._normal = found
