"""Loops over experts, as transformers has them: in Python, over the experts that some token has chosen.

No graph has such a loop.  transformers computes most of these experts by grouped products too, and a config says which
way is taken (``experts_implementation``).  Of the others a capture sees what :class:`ExpertLoops` makes of a loop, and
``graph/expert_loops.py`` makes grouped products of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.capture.intercept import Proceed

NOTE = "its loops over experts are computed as grouped products, which transformers has for the same experts"
LOOPS = "its loops over the experts that some token has chosen are computed as grouped products"


def without_loops(module: nn.Module) -> bool:
    """Let a model, whose configs are changed, compute experts by grouped products where it has loops over them; return
    whether there are any."""
    configs = [one.config for one in module.modules() if hasattr(one, "_is_expert_parallel") and hasattr(one, "config")]
    looped = [config for config in configs if getattr(config, "_experts_implementation", None) == "eager"]
    for config in looped:
        config._experts_implementation = "grouped_mm"
    return bool(looped)


@dataclass(eq=False)
class _Loop:
    """A loop over the experts of a mask that ``ids`` (tokens, choices) make: ``F.one_hot(ids, experts)``, without
    choices that are ``dropped``, which have the number after the last expert."""

    ids: Tensor
    experts: int
    dropped: bool = False
    runs: bool = False  # whether it is over the experts that some token has chosen
    noise: list[Tensor] = field(default_factory=list)  # what dropout multiplies with, of all choices in their order
    drawn: dict[int, int] = field(default_factory=dict)  # how often the turn of an expert has drawn
    _sorted: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> int:
        """The number of experts that a token chooses."""
        return self.ids.shape[1]

    def order(self) -> tuple[Tensor, Tensor]:
        """Return the sorted numbers of experts, and the choice that each is."""
        if self._sorted is None:
            self._sorted = self.ids.reshape(-1).sort(stable=True)
        return self._sorted

    def own(self, expert: int) -> Tensor:
        """Return which of the sorted choices are an expert's."""
        return torch.eq(self.order()[0], expert)


class _Kind(Enum):
    """What a tensor is in a loop: the loop's values up to the numbers that it goes over, and then in a turn."""

    MASK, COUNTS, CHOSEN, NUMBERS = range(4)
    NUMBER, OWN_MASK, CHOICES, TOKENS, ROWS, ROWS_IN_ONE = range(4, 10)


@dataclass(frozen=True)
class _Part:
    """A tensor of a loop, and of the turn of an ``expert``."""

    kind: _Kind
    loop: _Loop
    expert: int = -1

    def now(self, kind: _Kind) -> _Part:
        """Return another part of the same turn."""
        return _Part(kind, self.loop, self.expert)


@dataclass(frozen=True)
class _OneHot:
    """A tensor whose last dim, of ``size`` elements, has a 1 for one of the ``experts``, or for none (``ids`` is
    None)."""

    size: int
    experts: int
    ids: Tensor | None


K = _Kind
MULTIPLIED = (Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__)
VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
ABOVE = (torch.greater, torch.gt, Tensor.greater, Tensor.gt, Tensor.__gt__)
NONZERO = (torch.nonzero, Tensor.nonzero)
ITEM = (Tensor.item, Tensor.__int__, Tensor.__index__)
COMPARED = (Tensor.__eq__, Tensor.__ne__, Tensor.__lt__, Tensor.__le__, Tensor.__gt__, Tensor.__ge__)
LARGEST = (torch.topk, Tensor.topk)
ADDED = (Tensor.index_add_, Tensor.index_add, torch.index_add)
SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
SIZES = (SHAPE, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel, Tensor.__len__)
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


class ExpertLoops:
    """A layer of :class:`~shardwise.capture.intercept.Intercept` that sees loops over ``(F.one_hot(ids, experts)
    .permute(2, 1, 0).sum((-1, -2)) > 0).nonzero()``.

    Such a loop goes over all experts then.  Each computes the rows of all choices, sorted by expert, and adds those
    that are its own: if each row of a result follows from the same row alone, that is what the loop computes.  The
    graph of the capture shows whether it does.
    """

    def __init__(self) -> None:
        self.experts = 0  # the largest number of experts of a loop
        self._parts: dict[int, tuple[Tensor, _Part]] = {}  # an id means something as long as its tensor lives
        self._one_hots: dict[int, tuple[Tensor, _OneHot]] = {}
        self._bounds: dict[int, tuple[Tensor, int]] = {}  # of numbers of experts, all of which are smaller

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in LARGEST:
            return self._chosen(args, kwargs, proceed(func, args, kwargs))
        if func is F.one_hot or (args and id(args[0]) in self._one_hots):
            return self._one_hot(func, args, kwargs, proceed)
        part = self._of(args[0]) if args else None
        if func is Tensor.__getitem__:
            return self._item(part, args[0], args[1], proceed)
        if func in ADDED:
            return self._added(func, args, kwargs, proceed)
        if part is not None and part.kind in (K.CHOICES, K.TOKENS, K.ROWS) and func in SIZES:
            return self._size(part, (func, args, kwargs), proceed)
        rows = next((one for one in map(self._of, args) if one and one.kind in (K.ROWS, K.ROWS_IN_ONE)), None)
        if rows is not None and func is torch.dropout and args[2] and rows.kind is K.ROWS:
            return self._dropped(rows, *args, proceed=proceed)
        if rows is not None:
            return self._follows(proceed(func, args, kwargs), rows)
        if part is None:
            return proceed(func, args, kwargs)
        if part.kind is K.NUMBER and func in ITEM:
            return part.expert
        if part.kind is K.NUMBER and func is Tensor.__format__:
            return format(part.expert, args[1])
        if part.kind is K.NUMBER and func in COMPARED and isinstance(args[1], int):
            return getattr(part.expert, func.__name__)(args[1])
        if (
            part.kind is K.NUMBERS
            and func in (Tensor.unbind, torch.unbind)
            and [*args[1:], *kwargs.values()] in ([], [0])
        ):
            return self._numbers(part.loop, args[0])
        if part.kind is K.OWN_MASK and args[0].dim() == 2 and _finds(func, args, kwargs):
            return self._places(part)
        found, kind = proceed(func, args, kwargs), _next(part.kind, func, args[1:], kwargs)
        return found if kind is None else self._is(found, part.now(kind))

    def _of(self, value: Any) -> _Part | None:
        return self._parts[id(value)][1] if isinstance(value, Tensor) and id(value) in self._parts else None

    def _is(self, value: Tensor, part: _Part) -> Tensor:
        self._parts[id(value)] = value, part
        return value

    def _chosen(self, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> Any:
        """Return the largest elements along a dim, and their numbers, which are smaller than its size."""
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        if isinstance(size := args[0].shape[dim], int):
            self._bounds[id(found[1])] = found[1], size
        return found

    def _one_hot(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:  # fmt: skip
        """Follow ``F.one_hot(ids, experts)``, times truth values and in another shape, to its mask by expert."""
        found = proceed(func, args, kwargs)
        if func is F.one_hot:
            ids, experts = args[0], kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            below = self._bounds[id(ids)][1] if id(ids) in self._bounds else experts
            known = isinstance(experts, int) and experts > 0
            now = _OneHot(experts, min(experts, below), ids) if known else None
        else:
            one = self._one_hots[id(args[0])][1]
            if func in (Tensor.permute, torch.permute) and found.dim() == 3 and _flat(args[1:], kwargs) == [2, 1, 0]:
                return self._mask(found, args[0], one)
            times = func in MULTIPLIED and isinstance(args[1], Tensor) and args[1].dtype is torch.bool
            views = func in VIEWS and isinstance(found.shape[-1], int) and found.shape[-1] == one.size
            now = _OneHot(one.size, one.size, None) if (times and found.shape == args[0].shape) or views else None
        if now is not None:
            self._one_hots[id(found)] = found, now
        return found

    def _mask(self, mask: Tensor, source: Tensor, one: _OneHot) -> Tensor:
        ids = one.ids
        if ids is None:
            ids = torch.where(source.sum(-1) > 0, source.argmax(-1), torch.full_like(source[..., 0], one.experts))
        known = ids.dim() == 2 and isinstance(ids.shape[1], int)
        return self._is(mask, _Part(K.MASK, _Loop(ids, one.experts, one.ids is None))) if known else mask

    def _numbers(self, loop: _Loop, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return what a loop goes over: each expert."""
        loop.runs = True
        self.experts = max(self.experts, loop.experts + loop.dropped)
        every = torch.arange(loop.experts, device=numbers.device).unsqueeze(1).unbind(0)
        return tuple(self._is(one, _Part(K.NUMBER, loop, expert)) for expert, one in enumerate(every))

    def _item(self, part: _Part | None, source: Tensor, index: Any, proceed: Proceed) -> Any:
        def taken(of: Tensor, at: Any) -> Any:
            return proceed(Tensor.__getitem__, (of, at), {})

        if isinstance(index, tuple):
            return self._of_choices(source, index, taken)
        by = self._of(index)
        if part is not None and part.kind is K.NUMBER and by is None:
            return self._is(taken(source, index), part)
        if by is not None and by.kind is K.NUMBER:  # a number of an expert also takes its parameters
            at = slice(by.expert, by.expert + 1) if index.dim() else by.expert
            found = taken(source, at)
            mine = part is not None and part.kind is K.MASK and part.loop is by.loop
            return self._is(found, by.now(K.OWN_MASK)) if mine else found
        if part is not None and part.kind is K.MASK and part.loop.runs and isinstance(index, int):
            return self._is(taken(source, index), _Part(K.OWN_MASK, part.loop, index))
        found = taken(source, index)
        return self._is(found, by.now(K.ROWS)) if by is not None and by.kind is K.TOKENS else found

    def _of_choices(self, source: Tensor, index: tuple[Any, ...], taken: Callable[[Tensor, Any], Any]) -> Any:
        """Take elements of the table of all choices, ``source[tokens, choices]``, as rows of its elements."""
        tokens, choices = map(self._of, index[:2]) if len(index) > 1 else (None, None)
        if index[0] is None and len(index) == 2 and choices is not None and choices.kind is K.TOKENS:
            return self._is(taken(source, index[1]).unsqueeze(0), choices.now(K.ROWS_IN_ONE))
        if tokens is None or choices != tokens.now(K.CHOICES) or source.shape[1:] != (tokens.loop.slots,):
            return taken(source, index)
        found = taken(source.reshape(-1), tokens.loop.order()[1])
        return self._is(taken(found, (slice(None), *index[2:])) if index[2:] else found, tokens.now(K.ROWS))

    def _places(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Return the choices and the tokens of the rows of a turn."""
        order, slots = part.loop.order()[1], part.loop.slots
        return self._is(order % slots, part.now(K.CHOICES)), self._is(order // slots, part.now(K.TOKENS))

    def _follows(self, found: Any, rows: _Part) -> Any:
        """Return what was computed of rows; what has as many is rows, too."""
        number = repr(rows.loop.order()[0].shape[0])  # to compare numbers would fix them
        for one in found if isinstance(found, tuple | list) else (found,):
            sizes = [repr(size) for size in one.shape] if isinstance(one, Tensor) else []
            if sizes[:1] == [number] or sizes[:2] == ["1", number]:
                self._is(one, rows.now(K.ROWS if sizes[0] == number else K.ROWS_IN_ONE))
        return found

    def _dropped(self, rows: _Part, x: Tensor, p: float, train: bool, proceed: Proceed) -> Tensor:
        """Return dropout of rows: what multiplies them is drawn for all choices in the order of tokens, and once for
        all experts, as each choice is one expert's."""
        loop, number = rows.loop, rows.loop.drawn.get(rows.expert, 0)
        loop.drawn[rows.expert] = number + 1
        if number == len(loop.noise):
            size = (loop.ids.shape[0] * loop.slots, *x.shape[1:])
            ones = torch.ones(size, dtype=x.dtype, device=x.device)
            loop.noise.append(proceed(torch.dropout, (ones, p, train), {}))
        found = x * loop.noise[number][loop.order()[1]]
        return self._is(found, rows)

    def _size(self, part: _Part, call: Call, proceed: Proceed) -> Any:
        """Return sizes, with the number of an expert's own rows in place of that of all: a graph that computes with it
        is not taken for a loop over experts."""
        func, args, kwargs = call
        own, (_, *rest) = part.loop.own(part.expert).sum().item(), args[0].shape
        if isinstance(own, torch.SymInt):
            torch._check(own > 0)  # what has no rows adds none, whatever it does
        if func == SHAPE or (func is Tensor.size and not (args[1:] or kwargs)):
            return torch.Size((own, *rest))
        if func is Tensor.size:
            (dim,) = (*args[1:], *kwargs.values())
            return proceed(func, args, kwargs) if dim % args[0].dim() else own
        return own if func is Tensor.__len__ else own * math.prod(rest)

    def _added(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        """Add the rows that are an expert's own."""
        part = self._of(args[2]) if len(args) == 4 and not kwargs else None
        if part is None or part.kind is not K.TOKENS:
            return proceed(func, args, kwargs)
        rows = args[3]
        own = part.loop.own(part.expert).view(-1, *[1] * (rows.dim() - 1))
        return proceed(func, (*args[:3], torch.where(own, rows, torch.zeros_like(rows))), {})


def _next(kind: _Kind, func: Callable[..., Any], rest: Sequence[Any], kwargs: dict[str, Any]) -> _Kind | None:
    """Return what a function makes of a part of such a kind, given the ``rest`` of its arguments."""
    given, flat = [*rest, *kwargs.values()], _flat(rest, kwargs)
    if kind is K.MASK and func in (Tensor.sum, torch.sum):
        return K.COUNTS if len(given) == 1 and sorted(one % 3 for one in flat) == [1, 2] else None
    if kind is K.COUNTS and func in ABOVE:
        return K.CHOSEN if given == [0] else None
    if kind is K.CHOSEN and func in NONZERO:
        return K.NUMBERS if given in ([], [False]) else None
    if kind is K.OWN_MASK and func in (Tensor.squeeze, torch.squeeze):
        return K.OWN_MASK if given == [0] else None
    return None


def _flat(rest: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the numbers among arguments, one by one or in a list."""
    given = [*rest, *kwargs.values()]
    return [one for each in given for one in (each if isinstance(each, tuple | list) else (each,))]


def _finds(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives the places of what is not 0, by dim."""
    given = [*args[1:], *kwargs.values()]
    return given == [] if func is torch.where else func in NONZERO and given == [True]


__all__ = ["LOOPS", "NOTE", "ExpertLoops", "without_loops"]
