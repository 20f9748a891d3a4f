"""Trials of a model that was not captured: forwards of an example batch show what a graph would say.

They leave nothing behind: each runs on a new copy of the module and of its tensors, and the generators of Python and
numpy are put back. Varied batches run on the CPU, for on an accelerator a wrong index ends the process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.capture.state import PythonState, generators_kept
from shardwise.capture.wrapped import LossFunction, WithLoss
from shardwise.core.errors import ConfigError
from shardwise.units.loss_weight import TRIED_ROWS, LossWeight, Probe, found_weight
from shardwise.units.opaque import call_of, first_run, opaque_unit
from shardwise.units.trace import Unit
from shardwise.units.varied_batches import Compared, Fields, diverse, repeated, rows_of
from shardwise.units.written_buffers import Written, found_written

CPU = torch.device("cpu")
WIDE_PARAMETERS = 1 << 27  # the most parameters of which a trial has a copy in fp64, of 1 GiB
AGREES = 1e-5  # relative; kernels that add in another order each time round differently


class Outcome(NamedTuple):
    """The loss of a forward, and the values that it leaves in the buffers, by name."""

    loss: float
    buffers: Mapping[str, Tensor]

    def differs(self, other: Outcome) -> bool:
        """Whether they differ by more than rounding."""
        pairs = [(torch.tensor(self.loss), torch.tensor(other.loss))]
        pairs += [(value, other.buffers[name]) for name, value in self.buffers.items()]
        return not all(_alike(one, another) for one, another in pairs)


class Elsewhere(NamedTuple):
    """How varied batches run on a CPU: the precision is the widest that the model takes, its parameters are ``shaken``
    if it takes that, and ``numbers`` are those that its forward compares with."""

    unit: Unit
    precision: str
    shaken: bool
    numbers: set[float]


class Kept(NamedTuple):
    """What forward keeps in Python: the attributes that it ``changes`` and on which its results ``depend``, or those
    that it changes each time, and the generators that have ``drawn``."""

    changes: tuple[str, ...]
    depend: bool
    drawn: tuple[str, ...]

    @property
    def once(self) -> tuple[str, ...]:
        """What lets a forward run but once a batch, on one rank."""
        return (*(self.changes if self.depend else ()), *(f"the generator of {name}" for name in self.drawn))

    @property
    def outside(self) -> str:
        """What copies of a module may have in common, in words."""
        return f"{', '.join(self.changes)}, outside of the module (a global, a clock)"

    def notes(self) -> list[str]:
        """Say what forward changes."""
        if self.once:
            return [
                f"its loss or buffers depend on {', '.join(self.once)}, which forward changes, as on one device; no "
                "checkpoint has it"
            ]
        if self.changes:
            return [
                f"forward changes {', '.join(self.changes)} on each rank and for each microbatch: a second forward "
                "gives what the first gives"
            ]
        return []


NOTHING_KEPT = Kept((), False, ())


@dataclass
class Trials:
    """Forwards of the rows of an example batch, in the mode of ``training``."""

    module: nn.Module
    batch: Fields
    loss: LossFunction | None
    precision: str
    device: torch.device
    training: bool
    known: dict[tuple[int, int], Outcome] = field(default_factory=dict)

    @cached_property
    def unit(self) -> Unit:
        """The model in the mode of the trials; BatchNorm lets no rows meet."""
        return self.unit_in(self.training, self.precision)

    def unit_in(self, training: bool, precision: str) -> Unit:
        """Return the model in a mode and a precision."""
        return opaque_unit(self.module, tuple(self.batch), self.loss, precision, training, trial=True)

    @cached_property
    def few(self) -> Fields:
        """A few rows of the example."""
        return repeated(self.batch, TRIED_ROWS)

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """How varied batches run."""
        small = sum(p.numel() for p in self.module.parameters()) <= WIDE_PARAMETERS
        precisions = dict.fromkeys(("fp64", self.precision) if small else (self.precision,))
        for precision, shaken in itertools.product(precisions, (True, False)):
            unit, compared = self.unit_in(self.training, precision), Compared()
            found = Elsewhere(unit, precision, shaken, compared.numbers)
            with suppress(ConfigError), compared:
                if math.isfinite(self._varied(found, self.few, 0).loss):
                    return found
        return found

    def _varied(self, how: Elsewhere, rows: Fields, first: int) -> Outcome:
        loss, *values = first_run(how.unit, self.module, rows, how.precision, CPU, first, shaken=how.shaken)
        return _outcome(how.unit, loss, values)

    def on_cpu(self, rows: Fields, first: int) -> Outcome:
        """Return what a forward of varied rows makes."""
        return self._varied(self.elsewhere, rows, first)

    def example(self, rows: Fields, first: int) -> Outcome:
        """Return what a forward of some rows of the example makes; it runs once."""
        key = (first, rows_of(rows))
        if key not in self.known:
            loss, *values = first_run(self.unit, self.module, rows, self.precision, self.device, first)
            self.known[key] = _outcome(self.unit, loss, values)
        return self.known[key]

    def weight(self) -> tuple[LossWeight | None, str]:
        """Return what the loss is of its rows, None where nobody knows, and why a trial failed."""
        example, there = (
            Probe(_losses(self.example), self.precision),
            Probe(_losses(self.on_cpu), self.elsewhere.precision),
        )
        return found_weight(example, there, self._two, frozenset(self.elsewhere.numbers))

    def written(self) -> tuple[dict[str, Written | None], str]:
        """Return what forward writes to the buffers, None where nobody knows, and why a trial failed."""
        if not any(True for _ in self.module.buffers()):
            return {}, ""
        trials = [(_buffers(self.example), self._two), (_buffers(self.on_cpu), diverse(self.few))]
        return found_written(self.module, trials, self.training)

    @property
    def _two(self) -> Fields:
        return self.batch if rows_of(self.batch) > 1 else repeated(self.batch, 2)

    def kept(self) -> Kept:
        """Return what forward keeps in Python; raise :class:`ConfigError` where it keeps that outside of the module,
        which the trials have changed, and without ``training`` where evaluation and training would change each other,
        for each has a module of its own."""
        found = self._after(self.unit, self.unit)
        if not self.training:
            learning = self.unit_in(True, self.precision)
            for one, then in ((learning, self.unit), (self.unit, learning)):
                carried = NOTHING_KEPT
                with suppress(ConfigError):  # a model may have no loss in the other mode
                    carried = self._after(one, then)
                if carried.depend:
                    wrong = f"not captured, and evaluation and training both depend on {', '.join(carried.changes)}"
                    wrong += ", which forward changes, but each has a copy of its own"
                    raise ConfigError.on("model", wrong, "buffers (self.register_buffer) in place of attributes")
        return found

    def _after(self, one: Unit, then: Unit) -> Kept:
        """Compare a forward of ``then`` after one of ``one``, on the same copy, with one on a new copy."""
        rows, fresh = self._runnable(then)
        copy, seen, outcomes = call_of(one).copied(), [], list[Outcome]()
        for unit in (one, then):
            for mine, like in zip(copy.modules(), call_of(unit).wrapped.modules(), strict=False):
                mine.training = like.training
            with generators_kept():
                state = PythonState(copy.module)
                outcomes.append(self._forward(unit, rows, copy))
                seen.append((*_changed(state), state.drawn()))
        (numbers, others, drawn), (again, _, _) = seen
        if not outcomes[1].differs(fresh):
            return Kept(tuple(again), False, tuple(drawn))
        found = Kept(tuple(numbers + others) or ("what it keeps in Python",), True, tuple(drawn))
        if one is then and outcomes[0].differs(fresh):
            wrong = f"not captured, and two copies of it compute different things: they depend on {found.outside}"
            raise ConfigError.on("model", wrong, "buffers (self.register_buffer), or attributes of the module")
        return found

    def _runnable(self, unit: Unit) -> tuple[Fields, Outcome]:
        """Return a few rows, or all where a model takes no others, and what a forward of them makes."""
        with suppress(ConfigError):
            return self.few, self._forward(unit, self.few)
        return self.batch, self._forward(unit, self.batch)

    def _forward(self, unit: Unit, rows: Fields, on: WithLoss | None = None) -> Outcome:
        loss, *values = first_run(unit, self.module, rows, self.precision, self.device, on=on)
        return _outcome(unit, loss, values)


def _changed(state: PythonState) -> tuple[list[str], list[str]]:
    """Return the attributes that have changed: the numbers and lists, and those that hold tensors."""
    changes = state.changes()
    return [str(one) for one in changes if not one.of_tensors], [str(one) for one in changes if one.of_tensors]


def _outcome(unit: Unit, loss: Tensor, values: Sequence[Tensor]) -> Outcome:
    return Outcome(float(loss.detach()), {n: v.detach() for n, v in zip(unit.updates, values, strict=True)})


def _losses(run: Callable[[Fields, int], Outcome]) -> Callable[[Fields, int], float]:
    return lambda rows, first: run(rows, first).loss


def _buffers(run: Callable[[Fields, int], Outcome]) -> Callable[[Fields, int], Mapping[str, Tensor]]:
    return lambda rows, first: run(rows, first).buffers


def _alike(one: Tensor, other: Tensor) -> bool:
    near = AGREES * float(one.abs().nan_to_num(0.0, 0.0).max()) if one.numel() and one.is_floating_point() else 0.0
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=near, equal_nan=True)
