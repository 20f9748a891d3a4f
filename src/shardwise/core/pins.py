"""This module reads pins, with which users say how a tensor is sharded: ``"column"``, ``"0@tp_i, 1@tp_j"``,
``"whole"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import ConfigError, did_you_mean

PLANS = ("propagate", "table")
"""These are the values of ``tensor_plan`` under which layouts follow from pins."""

LEGAL = (
    '"column" (what a product keeps of a weight), "row" (what it sums over), a dim such as "0" or "-1", "0/3" for each '
    'of 3 parts of it, "whole"; '
    'each with "@axis" on a mesh of several axes, and several with commas, such as "0@tp_i, 1@tp_j"'
)

_ONE = re.compile(r"(?:(?P<word>column|row|whole)|(?P<dim>-?\d+)(?:/(?P<parts>[1-9]\d*))?)(?:@(?P<axis>\w+))?")


@dataclass(frozen=True, slots=True)
class PinnedCut:
    """A pinned cut says how a mesh axis shards a tensor.  ``side`` is "column", "row", "whole", or "" for dim ``dim``;
    then each of ``parts`` equal parts of the dim is sharded (None: the parts follow from what the dim is made of)."""

    side: str = ""
    dim: int = 0
    parts: int | None = None


def cuts(pattern: str, text: object, axes: Sequence[str]) -> dict[str, PinnedCut]:
    """Return the cut that the pin ``pattern = text`` sets for each of the ``axes`` it covers; raise
    :class:`ConfigError` if the pin is not legal."""
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
    """Return ``name`` with its block numbers, or only the first ``count`` of them, replaced by ``*``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name, count=count)
