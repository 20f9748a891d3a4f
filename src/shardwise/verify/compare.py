"""Measure how far two runs of the same training differ, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

NOISE_FLOOR = 1e-5
"""A tensor's error is relative to at least this share of the norm of all tensors: some gradients are pure rounding,
such as that of an attention key's bias, or of a bias before a BatchNorm.  At the tolerance of 1e-10 the floor is 1e-15
of the whole, five times what fp64 resolves.
"""


NOISE_FACTOR = 20.0
LARGEST_LIMIT = 1e-6
"""Where one device by itself, with the rows in another order, comes out with a tensor that differs by e, a plan may
differ by 20 e, but never by more than 1e-6."""


@dataclass(frozen=True, slots=True)
class Difference:
    """This is the relative error of one tensor after one step.

    ``what`` is "loss", "grad_norm", "gradient", "parameter" or "buffer".  ``noise`` is what one device by itself
    differs by in this tensor, and ``limit`` what a plan may differ by for that; both are 0 where it was not measured,
    or where the noise is none."""

    name: str
    step: int
    what: str
    error: float
    limit: float = 0.0
    noise: float = 0.0

    def within(self, tolerance: float) -> bool:
        """Return whether the error is no larger than ``tolerance``, or than the tensor's own limit."""
        return self.error <= max(tolerance, self.limit)

    def multiplied(self, tolerance: float) -> bool:
        """Return whether the error is larger than that, where one device by itself comes to differ as much."""
        return not self.within(tolerance) and math.isfinite(self.noise) and self.error <= NOISE_FACTOR * self.noise


def relative_error(ours: Tensor, truth: Tensor, floor: float = 0.0, equal_infinities: bool = False) -> float:
    """Return ||ours - truth|| / max(||truth||, floor), in fp64, of two tensors of any shape.

    It is infinite if their shapes differ or if either holds a NaN or an infinity.  ``equal_infinities`` forgives
    infinities that both hold in the same place (a mask kept in a buffer)."""
    if ours.shape != truth.shape:
        return math.inf
    a, b = (t.detach().to("cpu", torch.complex128 if t.is_complex() else torch.float64) for t in (ours, truth))
    if equal_infinities:
        same = a.isinf() & (a == b)
        a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return math.inf
    difference, size = float(torch.linalg.vector_norm(a - b)), max(float(torch.linalg.vector_norm(b)), floor)
    if not math.isfinite(difference):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm of all finite elements of all floating-point and complex tensors together."""
    parts = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors.values() if _rounded(t))
    finite = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in parts)
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in finite))


def _rounded(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def relative_errors(
    ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], equal_infinities: bool = False, scale: float = 0.0
) -> dict[str, float]:
    """Return the error of every tensor by name, against the larger of its own norm and NOISE_FLOOR of the norm of all.

    Where all are exactly zero, ``scale`` stands for that norm.  A name that only one side has gets an infinite error.
    Integer and boolean tensors have no rounding, so no floor.
    """
    floor = NOISE_FLOOR * (total_norm(truth) or scale)
    errors = dict.fromkeys(ours.keys() ^ truth.keys(), math.inf)
    for name in truth:
        if name in ours:
            own_floor = floor if _rounded(truth[name]) else 0.0
            errors[name] = relative_error(ours[name], truth[name], own_floor, equal_infinities)
    return errors


@dataclass
class Comparison:
    """This collects differences; the largest decides."""

    differences: list[Difference] = field(default_factory=list)

    def add(
        self, step: int, what: str, ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], scale: float = 0.0
    ) -> None:
        """Compare tensors by name; infinities are forgiven in buffers where both sides have them."""
        errors = relative_errors(ours, truth, equal_infinities=what == "buffer", scale=scale)
        self.differences += [Difference(name, step, what, error) for name, error in errors.items()]

    def add_number(self, step: int, what: str, ours: float, truth: float, scale: float = 0.0) -> None:
        """Compare a number of the step: its loss or gradient norm, one that is exactly zero with ``scale``."""
        mine, right = (torch.tensor(value, dtype=torch.float64) for value in (ours, truth))
        error = relative_error(mine, right, 0.0 if truth else NOISE_FLOOR * scale)
        self.differences.append(Difference(what, step, what, error))

    @property
    def largest(self) -> float:
        """Return the largest error; it is infinite if nothing was compared."""
        return max((d.error for d in self.differences), default=math.inf)

    def passes(self, tolerance: float = 1e-10) -> bool:
        """Return whether something was compared and no error is above ``tolerance``, or above its own limit."""
        return bool(self.differences) and all(d.within(tolerance) for d in self.differences)

    def limited(self, noise: Comparison) -> Comparison:
        """Return the same differences with limits from those of one device with itself, or with what they have."""
        own: dict[tuple[str, int, str], float] = {}
        for d in noise.differences:  # islands have the same names
            key = (d.name, d.step, d.what)
            own[key] = max(own.get(key, 0.0), d.error)
        found = []
        for d in self.differences:
            most = max(d.noise, own.get((d.name, d.step, d.what), 0.0))
            found.append(replace(d, noise=most, limit=min(NOISE_FACTOR * most, LARGEST_LIMIT)))
        return Comparison(found)

    def notes(self, tolerance: float) -> list[str]:
        """Return what a reader should know of errors above ``tolerance`` that one device by itself has as well."""
        notes, factor = [], round(NOISE_FACTOR)
        if raised := sum(d.error > tolerance and d.within(tolerance) for d in self.differences):
            notes.append(
                f"{raised} of the differences are above {tolerance:.0e} and within {factor} times what one device "
                "differs from itself with the rows in another order: these tensors are rounding (a bias before a "
                "BatchNorm)"
            )
        if multiplied := [d for d in self.differences if d.multiplied(tolerance)]:
            beyond, most = sum(not d.within(tolerance) for d in self.differences), max(d.noise for d in multiplied)
            notes.append(
                f"{len(multiplied)} of the {beyond} differences that are too large are within {factor} times what one "
                f"device differs from itself with the rows in another order, up to {most:.0e}: "
                "the model multiplies rounding, and nobody can tell by these whether the plan is right (a BatchNorm "
                "whose input hardly varies, a choice between equal values)"
            )
        return notes

    def worst(self, count: int = 10) -> list[Difference]:
        """Return the ``count`` largest errors, those beyond their own limits first; among equals the earlier step."""
        return sorted(self.differences, key=lambda d: (d.error <= d.limit, -d.error, d.step, d.what, d.name))[:count]

    def summary(self) -> dict[str, float]:
        """Return the largest error of each kind of thing compared, by :attr:`Difference.what`."""
        largest: dict[str, float] = {}
        for d in self.differences:
            largest[d.what] = max(largest.get(d.what, 0.0), d.error)
        return largest
