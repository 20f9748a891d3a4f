"""Capture a model whose batches vary in shape: once with symbolic dims where it allows that, else once a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.capture.coins import Drawing
from shardwise.capture.forms import Dims, Form, form_of
from shardwise.capture.known import Known
from shardwise.capture.seen_calls import OpenSize
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.specialised import specialised, symbolic_dims


@dataclass
class Varying:
    """The ``dims`` of fields whose sizes vary, as far as they are known, and the captures in which some are symbolic,
    and what is ``known`` of its forward, by all that a capture depends on besides the form; all forms of the batches of
    one computation share it.  ``sampled`` says where random numbers have their samples (``shard/context.py``).
    ``drawing`` keys the random numbers by which forward decides; None: before the first step."""

    dims: dict[str, frozenset[int]] = field(default_factory=dict)
    captures: dict[Any, list[Captured]] = field(default_factory=dict)
    asked: set[tuple[Any, Form]] = field(default_factory=set)  # for which a capture with symbolic dims was made
    closed: set[Any] = field(default_factory=set)  # for which none can be made, whatever the form
    known: dict[Any, Known] = field(default_factory=dict)
    sampled: dict[tuple[int, str, int], int | None] = field(default_factory=dict)
    drawing: Drawing | None = None

    def again(self) -> Varying:
        """Return it for another computation on batches like these."""
        return Varying(dict(self.dims))

    def another_way(self, drawing: Drawing | None) -> Varying:
        """Return it for batches by whose values, and the random numbers of a step, forward decides in another way."""
        return Varying(known=self.known, sampled=self.sampled, drawing=drawing)

    def add(self, dims: Dims) -> None:
        """Note dims that vary."""
        for name, ones in dims.items():
            self.dims[name] = self.dims.get(name, frozenset()) | ones

    def captured(self, key: Any, batch: Mapping[str, Tensor], capture: Callable[[Dims], Captured]) -> Captured:
        """Return the capture for batches of the form of ``batch``: made of one with symbolic dims, or by
        ``capture(dims)``, which captures with ``dims`` symbolic.  Raises :class:`Uncapturable`."""
        form = form_of(batch)
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        for one in self.captures.get(key, ()):
            if (found := specialised(one, shapes)) is not None:
                return found
        dims = {name: ones for name, ones in self.dims.items() if name in batch}
        if dims and (key, form) not in self.asked and key not in self.closed:
            self.asked.add((key, form))
            try:
                symbolic = capture(dims)
            except OpenSize:
                self.closed.add(key)
                return capture({})
            except Uncapturable:
                return capture({})  # the reason may be the symbols
            if symbolic_dims(symbolic):
                if (found := specialised(symbolic, shapes)) is not None:
                    self.captures.setdefault(key, []).append(symbolic)
                    return found
            else:
                return symbolic
        return capture({})
