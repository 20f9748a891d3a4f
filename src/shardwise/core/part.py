"""Which part of a step a program runs: a loop may have several backwards, and look at gradients before it updates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """By default it is all of a step.  ``adds`` says that gradients of an earlier backward are there, to which this one
    adds; ``completes`` that no backward follows, so that they are summed over ranks; ``updates`` that weights are
    updated.  Without ``computes`` there is no backward, and an earlier part has completed the gradients.  ``outer`` are
    the fragments of the parameters that islands take an outer step of, once their own weights are updated."""

    computes: bool = True
    adds: bool = False
    completes: bool = True
    updates: bool = True
    outer: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        """Return whether the step has no other part."""
        return self.computes and self.completes and self.updates and not self.adds


STEP = Part()
"""All of a step."""

UPDATE = Part(computes=False)
"""The update alone."""
