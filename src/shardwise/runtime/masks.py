"""This finds the masks of a batch that hide nothing: attention without a mask has a faster kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def all_ones(fields: Mapping[str, Tensor], masks: Sequence[str]) -> tuple[str, ...]:
    """Return those of the fields ``masks`` that are 1 everywhere.  The fields must be on the host, which reads them."""
    return tuple(name for name in masks if bool((fields[name] == 1).all()))
