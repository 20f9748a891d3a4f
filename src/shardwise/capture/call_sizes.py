"""The sizes of what a call takes and returns, as several runs of it show them: constants, or such that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Line(NamedTuple):
    """A size that is ``factor`` times that of a ``dim`` of a ``tensor`` that is taken, by number, and a ``rest``."""

    tensor: int
    dim: int
    factor: int
    rest: int


Size = int | Line
Sizes = tuple[int, ...]
"""A size in each of several runs, of other rows and other forms."""


def in_runs(runs: Sequence[Sequence[Any]]) -> list[tuple[Sizes, ...]]:
    """Return the sizes of the tensors among the arguments or results of a call, in each of several runs."""
    tensors = [[one.shape for one in each if isinstance(one, Tensor)] for each in runs]
    return [tuple(zip(*shapes, strict=True)) for shapes in zip(*tensors, strict=True)]


def following(sizes: Sizes, taken: Sequence[Sequence[Sizes]]) -> Size | None:
    """Return how a size of a result follows from those of what is ``taken``, with as small a rest as there is; None if
    it does not."""
    if len({*sizes}) == 1:
        return sizes[0]
    found = [
        Line(tensor, dim, *line) for tensor, shape in enumerate(taken) for dim, own in enumerate(shape)
        if (line := _line(own, sizes)) is not None
    ]  # fmt: skip
    return min(found, key=lambda one: abs(one.rest), default=None)


def _line(given: Sizes, found: Sizes) -> tuple[int, int] | None:
    """Return the factor and the rest by which one size follows from another in all runs; None where it does not."""
    for a, b in zip(given[1:], found[1:], strict=True):
        if a != given[0]:
            factor = (b - found[0]) // (a - given[0])
            rest = found[0] - factor * given[0]
            same = factor and all(factor * x + rest == y for x, y in zip(given, found, strict=True))
            return (factor, rest) if same else None
    return None


def evaluated(size: Size, tensors: Sequence[Tensor]) -> Any:
    """Return a size for these tensors."""
    if isinstance(size, int):
        return size
    return tensors[size.tensor].shape[size.dim] * size.factor + size.rest


__all__ = ["Size", "Sizes", "evaluated", "following", "in_runs"]
