"""Rows that a loop has picked from a table, as one device picks them: for which places random numbers are drawn.

A loop over experts picks the rows of tokens: ``choices, tokens = torch.where(mask)`` of a mask (choices, tokens), and
then ``x[tokens]``.  How many there are depends on values, but each is that of a token, and so of a sample.  A random
number that is drawn for a row is that of its token and choice; what the turns of a loop draw at the same place is one
draw.  Where two turns pick the same, nothing is noted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import of_library


@dataclass(eq=False)
class Loop:
    """A loop, by the call of the function in which it is; ``ordinals`` are those of its draws."""

    frame: FrameType
    taken: Tensor  # which places its turns have picked
    ordinals: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Picked:
    """The rows of a turn of a ``loop``: the ``places`` of all ``size`` that they have, and how much it has drawn."""

    loop: Loop
    places: Tensor
    size: int
    drawn: int = 0

    def ordinal(self, following: int) -> int:
        """Return the ordinal of the next draw of this turn; that of the first turn that draws as often follows."""
        ordinals, number = self.loop.ordinals, self.drawn
        self.drawn += 1
        if number == len(ordinals):
            ordinals.append(following)
        return ordinals[number]


class PickedRows:
    """It follows rows from where they are picked to what is computed of them."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[Tensor, Picked]] = {}  # an id means something as long as its tensor lives
        self._rows: dict[int, tuple[Tensor, Picked]] = {}
        self._loops: list[Loop] = []

    def of(self, tensor: Any) -> Picked | None:
        """Return where the rows of a tensor have been picked, or None."""
        known = self._rows.get(id(tensor))
        return None if known is None else known[1]

    def see(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Any) -> None:
        """Take note of a call and of what it gave."""
        if func is torch.where and len(args) == 1 or func in (torch.nonzero, Tensor.nonzero) and kwargs.get("as_tuple"):
            if len(found) == 2:
                self._pick(args[0], *found)
            return
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            known = [self._tokens[id(one)][1] for one in index if id(one) in self._tokens]
            if len(known) == 1:
                self._note(found, known[0])
            return
        if args and (picked := self.of(args[0])) is not None:
            for one in found if isinstance(found, tuple | list) else (found,):
                self._note(one, picked)

    def _note(self, found: Any, picked: Picked) -> None:
        number = len(picked.places)
        if isinstance(found, Tensor) and (tuple(found.shape[:1]) == (number,) or tuple(found.shape[:2]) == (1, number)):
            self._rows[id(found)] = found, picked

    def _pick(self, mask: Tensor, choices: Tensor, tokens: Tensor) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and of_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        loop = next((one for one in self._loops if one.frame is frame), None)
        if loop is None or len(loop.taken) != mask.numel():
            loop = Loop(frame, torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device))
            self._loops.append(loop)
        picked = Picked(loop, tokens * mask.shape[0] + choices, mask.numel())
        if not bool(loop.taken[picked.places].any()):
            self._tokens[id(tokens)] = tokens, picked
        loop.taken[picked.places] = True


__all__ = ["Picked", "PickedRows"]
