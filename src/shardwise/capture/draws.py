"""What two trials with different numbers of rows show of the random calls of a forward: whose numbers each draws.

A call draws for all rows along the batch dim of what it draws, or once without one.  A line that a forward comes to
once for each row, in a loop over the rows of its batch, draws for one row at a time: the i-th call belongs to row i.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, MappingProxyType
from typing import NamedTuple

from shardwise.capture.running import place_of, running_module
from shardwise.core.errors import ConfigError, of_library
from shardwise.ops.keyed_random import Batch

LEGAL = "dropout, torch.rand and the like, of numbers with one batch dim, or once for each row in a loop over rows"


Place = tuple[int | None, ...]
"""Where in the source of a function a call stands: the first and the last line and column."""
NO_PLACE: Place = ()


class Site(NamedTuple):
    """A call in a model's code: the module that runs, the functions of the model that run, from the outermost to the
    innermost, with the place of what each calls, and that place of the innermost one apart."""

    module: str
    functions: tuple[tuple[CodeType | None, Place], ...]
    place: Place = NO_PLACE

    @property
    def any_line(self) -> Site:
        """The innermost function, whatever it calls."""
        return self._replace(place=NO_PLACE)


NOWHERE = Site("", ())


def depth() -> int:
    """Return how many frames the caller's caller has below it: those of a model's code come above."""
    frame, number = inspect.currentframe(), -2
    while frame is not None:
        frame, number = frame.f_back, number + 1
    return number


def site(above: int) -> Site:
    """Return the call that a model's code makes; its frames are ``above`` so many."""
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())][::-1][above:]
    calls = [
        (one.f_code, place_of(one.f_code, one.f_lasti)) for one in frames if not _of_library(one.f_code.co_filename)
    ]
    if not calls:
        return NOWHERE
    (code, at), outer = calls[-1], calls[:-1]
    return Site(running_module(), (*outer, (code, NO_PLACE)), at)


_of_library = cache(of_library)


@dataclass(frozen=True, slots=True)
class Draw:
    """This is one random call: the function's name, the shape of what it draws and, in a trial, where it is.

    ``joint`` says that no part of what it draws can be drawn without the rest, as of a permutation."""

    name: str
    shape: tuple[int, ...]
    place: str = ""
    site: Site = NOWHERE
    joint: bool = False


@dataclass(frozen=True)
class Keys:
    """How the random calls of a forward are keyed: for each ordinal the function's name and the batch dim; ``loops``
    are the sites of loops over rows, with the ordinal that all calls of a site have in common."""

    calls: tuple[tuple[str, Batch | None], ...] = ()
    loops: Mapping[Site, int] = field(default_factory=lambda: MappingProxyType({}))

    def loop(self, at: Site) -> int | None:
        """Return the ordinal of the loop that a call is in, if it is in one."""
        found = _within(self.loops, at)
        return None if found is None else self.loops[found]

    def assigned(self, draws: Sequence[Draw]) -> list[tuple[int, int | None]]:
        """Return of each call of a forward its ordinal, and which row it is for if it is for one."""
        loops = [self.loop(one.site) for one in draws]
        plain = iter([i for i in range(len(self.calls)) if i not in set(self.loops.values())])
        seen: Counter[int] = Counter()
        found: list[tuple[int, int | None]] = []
        for loop in loops:
            found.append((next(plain), None) if loop is None else (loop, seen[loop]))
            if loop is not None:
                seen[loop] += 1
        return found


def batch_dims(
    draws: Callable[[int], Sequence[Draw]], numbers: Sequence[int], whole: bool = False, several: bool = False
) -> Keys:
    """Return how random calls are keyed, as :func:`batch_of` finds it; ``draws(rows)`` runs a forward.

    Of ``numbers`` of rows the first is tried that the model takes, with one row more or with twice as many. A model
    that takes a last number alone is no matter if it draws nothing."""
    failed: Exception | None = None
    for few, more in ((rows, other) for rows in numbers for other in (rows + 1, 2 * rows)):
        try:
            found = draws(few), draws(more)
        except Exception as error:  # the user's code may take no such number of rows
            failed = error
            continue
        return batch_of(*found, few, more, whole, several)
    if failed is not None and draws(numbers[-1]):
        raise failed
    return Keys()


def batch_of(
    few: Sequence[Draw], more: Sequence[Draw], rows: int, larger: int, whole: bool = False, several: bool = False
) -> Keys:
    """Return how random calls are keyed, by those with ``rows`` rows and with a ``larger`` number: the batch dim is the
    one that grew, and calls of which there are as many as rows are for one row each.

    Raises :class:`ConfigError` where the number of other calls, or more than one dim, depends on the batch. If draws
    are always for the ``whole`` batch, one whose size in one dim depends on data has no batch dim. Where ``several``
    dims may grow, the first is the batch dim.
    """
    loops: dict[Site, int] = {}
    if [d.name for d in few] != [d.name for d in more]:
        loops = dict.fromkeys(_loops(few, more, rows, larger), -1)
    calls: list[tuple[str, Batch | None]] = []
    left, more = ([one for one in draws if _within(loops, one.site) is None] for draws in (few, more))
    if [one.name for one in left] != [one.name for one in more]:
        raise _as_often(left, more)
    others = iter(more)
    for one in few:
        loop = _within(loops, one.site)
        if loop is None:
            calls.append((one.name, _batch(one, next(others), rows, larger, whole, several)))
        elif loops[loop] < 0:
            loops[loop] = len(calls)
            calls.append((one.name, None))
    return Keys(tuple(calls), loops)


def _within(loops: Mapping[Site, int], at: Site) -> Site | None:
    """Return the loop that a call is in, if it is in one."""
    return next((one for one in (at.any_line, at) if one in loops), None)


def _loops(few: Sequence[Draw], more: Sequence[Draw], rows: int, larger: int) -> list[Site]:
    """Return the sites to which a forward comes once for each row: functions, whatever their lines (a branch may draw
    in one or in another), and else single calls."""
    found: list[Site] = []
    for whole in (True, False):
        counted = [defaultdict[Site, list[Draw]](list), defaultdict[Site, list[Draw]](list)]
        for draws, count in zip((few, more), counted, strict=True):
            for one in draws:
                if one.site is not NOWHERE and one.site.any_line not in found:
                    count[one.site.any_line if whole else one.site].append(one)
        mine, theirs = counted
        found += [at for at in mine if len(mine[at]) == rows and len(theirs[at]) == larger
                  and not _of_all_rows(mine[at], theirs[at], rows, larger)]  # fmt: skip
    return found


def _of_all_rows(few: Sequence[Draw], more: Sequence[Draw], rows: int, larger: int) -> bool:
    """Whether calls draw for all rows each, so that they are as many as rows by another reason."""
    dims = range(min(len(one.shape) for one in (*few, *more)))
    return any(
        all(one.shape[d] == rows for one in few) and all(one.shape[d] == larger for one in more) for d in dims
    )  # fmt: skip


def _as_often(few: Sequence[Draw], more: Sequence[Draw]) -> ConfigError:
    numbers = [Counter(one.site for one in draws) for draws in (few, more)]
    every = [*few, *more]
    only = next((one for one in every if numbers[0][one.site] != numbers[1][one.site]), every[0])
    return ConfigError(
        f"model: which random functions forward calls depends on the number of rows: {only.name}{only.place} is called "
        "with one number of rows and not with another; legal: the same calls for every number of rows, or each once "
        "for each row, in a loop over rows"
    )


def _batch(few: Draw, more: Draw, rows: int, larger: int, whole: bool, several: bool) -> Batch | None:
    """Return the batch dim of a call that draws for all rows."""
    grown = [i for i, (m, n) in enumerate(zip(few.shape, more.shape, strict=True)) if m != n]
    if not grown:
        return None
    if few.joint:
        raise ConfigError(unkeyed(few.name, few.place))
    minor, rest = divmod(more.shape[grown[0]] - few.shape[grown[0]], larger - rows)
    if len(grown) > 1 and not several or rest or few.shape[grown[0]] != rows * minor:
        if whole and len(grown) == 1:
            return None
        raise ConfigError(
            f"model: {few.name}{few.place} draws {few.shape} for {rows} rows and {more.shape} for {larger}: it has no "
            f"one batch dim; legal: {LEGAL}"
        )
    return grown[0], minor


def unkeyed(function: object, place: str) -> str:
    """Return the message about a function whose numbers belong to no rows."""
    return (
        f"model: {function}{place} draws random numbers that cannot be keyed by sample: other devices would draw "
        f"others; legal: {LEGAL} (torch.utils.checkpoint draws again in backward: let the plan recompute instead)"
    )


def decides(draws: Sequence[Draw]) -> bool:
    """Whether a forward draws single numbers, by which it may decide what else it draws."""
    return any(math.prod(one.shape) == 1 and one.name != "randperm" for one in draws)
