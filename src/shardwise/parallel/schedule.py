"""Schedules: which microbatch a stage computes next.  Generators of (kind, microbatch), F forward and B backward."""

from __future__ import annotations

from collections.abc import Iterator


def one_stage(microbatches: int) -> Iterator[tuple[str, int]]:
    """1F1B of a single stage is gradient accumulation: one microbatch's activations live at a time.

    ::

        F0 B0 F1 B1 F2 B2
    """
    for m in range(microbatches):
        yield "F", m
        yield "B", m
