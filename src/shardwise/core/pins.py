"""Where users want a tensor cut: ``"column"``, ``"0@tp_i, 1@tp_j"``, ``"whole"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import ConfigError, did_you_mean

PLANS = ("propagate", "table")
"""The words of ``tensor_plan`` under which layouts follow from pins."""

LEGAL = (
    '"column" (what a product keeps of a weight), "row" (what it sums over), a dim such as "0" or "-1", "0/3" for each '
    'of 3 parts of it, "whole"; '
    'each with "@axis" on a mesh of several axes, and several with commas, such as "0@tp_i, 1@tp_j"'
)

_ONE = re.compile(r"(?:(?P<word>column|row|whole)|(?P<dim>-?\d+)(?:/(?P<parts>[1-9]\d*))?)(?:@(?P<axis>\w+))?")


@dataclass(frozen=True, slots=True)
class PinnedCut:
    """Of a tensor on one axis: ``side`` is "column", "row" or "whole", or "" for dim ``dim``, of which each of
    ``parts`` equal parts is cut (None: as what it is made of has it)."""

    side: str = ""
    dim: int = 0
    parts: int | None = None


def cuts(pattern: str, text: object, axes: Sequence[str]) -> dict[str, PinnedCut]:
    """What the pin ``pattern = text`` says of each of ``axes`` that it is about; :class:`ConfigError` where it says
    nothing legal.
    """
    pin = f'"{pattern}" = ' + (f'"{text}"' if isinstance(text, str) else repr(text))
    found: dict[str, PinnedCut] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        one = _ONE.fullmatch(part.strip())
        if one is None:
            near = did_you_mean(part, ("column", "row", "whole"))
            raise ConfigError.on("pins", f"{pin} is not legal", f"{LEGAL}.", near)
        named, word = one["axis"], one["word"] or ""
        if named is not None and named not in axes:
            wrong = f'{pin}: there is no axis "{named}" to shard over'
            raise ConfigError.on("pins", wrong, f"{', '.join(axes)}.", did_you_mean(named, axes))
        if named is None and len(axes) > 1 and word != "whole":
            legal = " or ".join(f'"{part.strip()}@{axis}"' for axis in axes)
            raise ConfigError.on("pins", f"{pin} does not say over which axis", f"{legal}.")
        for axis in axes if named is None else (named,):
            if axis in found:
                raise ConfigError.on("pins", f"{pin} says two things of {axis}", "one for each axis.")
            found[axis] = (
                PinnedCut(word) if word else PinnedCut("", int(one["dim"]), int(one["parts"]) if one["parts"] else None)
            )
    return found


def starred(name: str, count: int = 0) -> str:
    """The pattern of a name and of those that differ only in the numbers of blocks, or in the first ``count``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name, count=count)
