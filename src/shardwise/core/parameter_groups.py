"""Groups of parameters, which have hyperparameters of their own: found by name, by patterns or by layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from shardwise.core.errors import ConfigError, check_text, check_value, did_you_mean
from shardwise.core.optimizers import OPTIMIZERS, OWN

_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class ParameterGroup:
    """These are the parameters whose name ``match`` has, as it is or by a pattern with ``*``, ``?`` and ``[...]``, if
    they are in no earlier group.

    ``changes`` are the hyperparameters that differ from the optimizer's, as pairs of a field of
    :class:`~shardwise.core.optim.OptimizerChoice` and its value.  A ``weight_decay`` among them applies to all
    parameters of the group, also to norms and biases.  A ``name`` among them is that of another optimizer.
    """

    match: tuple[str, ...]
    changes: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(match: str | Iterable[str], **changes: Any) -> ParameterGroup:
        """Return the group of what ``match``, or one of several, has, with these hyperparameters of its own."""
        return ParameterGroup((match,) if isinstance(match, str) else tuple(match), tuple(changes.items()))

    def __post_init__(self) -> None:
        check_value("optimizer.groups", self.match, bool(self.match), "a pattern, or several, in match")
        for one in self.match:
            check_text("optimizer.groups.match", one)

    def check(self, optimizer: str) -> None:
        """Raise :class:`ConfigError` where this optimizer has no hyperparameter of a name."""
        own = dict(self.changes).get("name", optimizer)
        if own == OWN:  # it says itself what it has
            return
        if own not in OPTIMIZERS:
            wrong = f"name = {own!r} of {self} is not legal"
            raise ConfigError.on("optimizer.groups", wrong, f"{', '.join(OPTIMIZERS)}.", did_you_mean(own, OPTIMIZERS))
        legal = ["lr", *OPTIMIZERS[own].options]
        for name, _ in self.changes:
            if name not in legal and name != "name":
                wrong = f'{name} of {self} is not legal with "{own}"'
                raise ConfigError.on("optimizer.groups", wrong, f"{', '.join(legal)}.", did_you_mean(name, legal))

    @property
    def named(self) -> bool:
        """Whether the group says itself what its optimizer is."""
        return any(name == "name" for name, _ in self.changes)

    @property
    def decays(self) -> bool:
        """Whether the group says itself what its weight decay is."""
        return any(name == "weight_decay" for name, _ in self.changes)

    def __str__(self) -> str:
        more = f" and {len(self.match) - 1} more" if len(self.match) > 1 else ""
        return f"the group of {self.match[0]}{more}"


@dataclass(frozen=True)
class GroupsByName:
    """The search for the group of a parameter; groups are counted from 1, and 0 is that of all others."""

    groups: tuple[ParameterGroup, ...]

    @cached_property
    def _exact(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for number, group in enumerate(self.groups, 1):
            for name in group.match:
                found.setdefault(name, number)
        return found

    @cached_property
    def _patterns(self) -> Sequence[tuple[int, re.Pattern[str]]]:
        return [
            (number, re.compile(translate(pattern)))
            for number, group in enumerate(self.groups, 1) for pattern in group.match if _GLOB.search(pattern)
        ]  # fmt: skip

    def of(self, name: str) -> int:
        """Return the number of the group that a parameter is in."""
        exact = self._exact.get(name, len(self.groups) + 1)
        found = next((number for number, one in self._patterns if number < exact and one.match(name)), exact)
        return found if found <= len(self.groups) else 0

    def check(self, names: Sequence[str]) -> None:
        """Raise :class:`ConfigError` unless each pattern has one of the parameters ``names``."""
        for group in self.groups:
            for one in group.match:
                if one not in names and not any(map(re.compile(translate(one)).match, names)):
                    legal = "the name of a parameter, or a pattern such as '*.bias'"
                    wrong = f"no parameter is called {one!r}"
                    raise ConfigError.on("optimizer.groups.match", wrong, f"{legal}.", did_you_mean(one, names))


def depths(names: Iterable[str]) -> dict[str, int]:
    """Return the depth of each parameter, given in the order of the model: 0 before the first numbered module, then one
    more at each further numbered module (``layers.0``, ``layers.1``), and one more than the last behind them all.

    A numbered module inside another does not count.  This is how layer-wise learning rates count layers (Bao et al.
    2021, BEiT, arXiv 2106.08254, appendix): the embeddings have the depth 0, and the head the greatest.
    """
    ordered, blocks = list(names), dict[tuple[str, ...], int]()
    for name in ordered:
        if block := _block(name):
            blocks.setdefault(block, len(blocks) + 1)
    last = max((i for i, name in enumerate(ordered) if _block(name)), default=-1)
    found, depth = dict[str, int](), 0
    for i, name in enumerate(ordered):
        depth = blocks.get(_block(name), depth)
        found[name] = depth if i <= last else len(blocks) + 1
    return found


def in_a_block(name: str) -> bool:
    """Return whether a parameter is in a numbered module."""
    return bool(_block(name))


def _block(name: str) -> tuple[str, ...]:
    """Return the path of the outermost numbered module that a parameter is in; () if it is in none."""
    path = name.split(".")[:-1]
    number = next((i for i, one in enumerate(path) if one.isdecimal()), None)
    return () if number is None else tuple(path[: number + 1])
