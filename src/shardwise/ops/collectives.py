"""The differentiable collectives that local graphs call.

On a group of axes a value is V (sharded), P (a partial sum), I (replicated, like its gradient) or R (replicated, while
its gradient is a partial sum; an operand can be required to be R). The duals are I↔I, V↔V, R↔P, so each function names
the move of the value, and ``dual`` says whether a replicated result is I or R. Every function takes an :class:`Env`
first: ranks, microbatches and steps share the graph, but not the Env.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwise.core.layout import axis_ranges
from shardwise.ops.env import ROWS, Env, Groups
from shardwise.ops.own_op import Function, OwnOp, facts_of, own_op

Steps: TypeAlias = Generator[Any, None, Tensor]
"""A move that communicates: it posts a collective, gives its handle, goes on when that is complete, and returns."""

Way: TypeAlias = Callable[[Env, Tensor, Any], "Tensor | Steps"]
"""How a value or its gradient is moved: a function of the Env, the tensor, and the axes or the factor to move over."""

DimFactors = Sequence[tuple[int, Groups]]
"""The factors of a dim, major first: the size of each in elements, and the axes that shard it."""


class Section(NamedTuple):
    """A rank has ``size`` elements of a factor in a row: from ``start`` in its own piece, from ``at`` in the whole."""

    rank: int
    start: int
    at: int
    size: int


class ShardedFactor(NamedTuple):
    """A factor of a dim that a move gathers or shards over ``axes``; the dim is pre × factor × post elements.

    ``size`` is that of the whole factor, or ``parts`` are the sizes of the parts that it concatenates, each of which is
    sharded. The ``outer`` axes shard the factor before and after the move, and ``axes`` shard each of those pieces.
    """

    axes: tuple[str, ...]
    outer: tuple[str, ...]
    dim: int
    pre: int
    size: int
    post: int
    parts: tuple[int, ...] = ()

    def sizes(self, env: Env) -> tuple[int, ...]:
        """Return the sizes of the parts that the ranks' pieces are cut from: of rows, those of each microbatch."""
        if ROWS in (*self.outer, *self.axes) and (windows := env.windows or (env.window and (env.window,))):
            return tuple(stop - start for start, stop in windows)
        return self.parts or (self.size,)

    def sections(self, env: Env) -> tuple[Section, ...]:
        """Return the sections in which ranks have the factor, in order, counted from the first that ``outer`` gives."""
        (above, at), (ranks, _) = env.group(self.outer), env.group(self.axes)
        return _sections((*self.outer, *self.axes), self.sizes(env), above * ranks, at * ranks, ranks)

    def held(self, env: Env) -> list[int]:
        """Return how many elements of the factor each rank has."""
        found = [0] * env.group(self.axes)[0]
        for one in self.sections(env):
            found[one.rank] += one.size
        return found

    def own(self, env: Env) -> tuple[list[tuple[int, int]], int]:
        """Return the ranges (start, stop) of this rank in the whole factor, and how many elements that has."""
        sections, index = self.sections(env), env.group(self.axes)[1]
        rows = ROWS in self.axes
        before = env.window[0] if env.window is not None and rows else 0
        mine = [(before + one.at, before + one.at + one.size) for one in sections if one.rank == index]
        return mine, env.rows if rows else sum(one.size for one in sections)

    def folded(self, env: Env, shape: Sequence[int]) -> tuple[list[int], int, int, int]:
        """Return the size of each rank's piece, this rank's index, and how many elements of a tensor of ``shape`` are
        before the factor and after it."""
        outer, inner = math.prod(shape[: self.dim]) * self.pre, math.prod(shape[self.dim + 1 :]) * self.post
        return self.held(env), env.group(self.axes)[1], outer, inner


@functools.lru_cache(maxsize=4096)  # every layer and microbatch asks again
def _sections(axes: Sequence[str], sizes: Sequence[int], parts: int, first: int, ranks: int) -> tuple[Section, ...]:
    """Return what the ``ranks`` from the ``first`` of ``parts`` have of each of ``sizes``, side by side."""
    found: list[Section] = []
    done, held = 0, [0] * ranks
    for size in sizes:
        each = (axis_ranges(size, axes, parts, first + i) for i in range(ranks))
        for one in zip(*each, strict=True):
            for i in sorted(range(ranks), key=one.__getitem__):
                start, stop = one[i]
                found.append(Section(i, held[i], done, stop - start))
                held[i], done = held[i] + stop - start, done + stop - start
    return tuple(found)


def rows(env: Env) -> int:
    """Return the number of rows that the batch dim of the captured graph stands for."""
    return env.rows


def local_rows(env: Env) -> int:
    """Return the number of rows of the microbatch on this rank."""
    start, stop = env.range()
    return stop - start


def row_start(env: Env, axes: Groups) -> int:
    """Return the first row of this rank in the microbatch, if ``axes`` shard its rows."""
    return env.ranges(env.rows, axes)[0][0]


def local_size(env: Env, size: int | Sequence[int], axes: Groups) -> int:
    """Return the size of this rank's part of ``size`` elements, or of several sizes, that ``axes`` shard."""
    sizes = [size] if isinstance(size, int) else size
    return sum(stop - start for n in sizes for start, stop in env.ranges(n, axes))


# ---- collectives ---------------------------------------------------------------------------------------------------


def in_memory(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and without lazy flags: a conjugate may be a flag that a collective does not see."""
    return x.resolve_conj().resolve_neg().contiguous()


def all_sum(env: Env, x: Tensor, axes: Groups, what: str) -> Tensor:
    """Return the sum of ``x`` over the ranks of ``axes``, of the same shape; no gradient flows through it."""
    return Moving(env, _sum(env, x, axes, what)).result()


def gathered(env: Env, x: Tensor, axes: Groups, what: str) -> Tensor:
    """Return ``x`` of each rank of ``axes``, all of one shape, along a new first dim; no gradient flows through it."""
    return Moving(env, _together(env, x, axes, what)).result()


def _sum(env: Env, x: Tensor, axes: Groups, what: str) -> Steps:
    if env.group(axes)[0] == 1:
        return x
    own = in_memory(x)
    out = own.new_empty(own.shape)
    yield env.comm.all_reduce(own, env.real(axes), lane=env.lane, what=what, out=out)
    return out


def _together(env: Env, x: Tensor, axes: Groups, what: str) -> Steps:
    own = in_memory(x)
    out = own.new_empty((env.group(axes)[0], *own.shape))
    yield env.comm.all_gather(out.view(-1), own.view(-1), env.real(axes), lane=env.lane, what=what)
    return out


def _gather(env: Env, x: Tensor, cut: ShardedFactor) -> Steps:
    """Return the pieces of all ranks in order; uneven pieces are padded for the collective."""
    sizes, index, outer, inner = cut.folded(env, x.shape)
    if len(sizes) == 1:
        return x
    most, whole, even = max(sizes), sum(sizes), len({*sizes}) == 1
    own = x.reshape(outer, sizes[index], inner)
    if not even:
        own = x.new_zeros((outer, most, inner))
        own[:, : sizes[index]] = x.reshape(outer, sizes[index], inner)
    out = yield from _together(env, own, cut.axes, "all_gather")
    sections = cut.sections(env)
    if even and len(sections) == len(sizes):
        together = out.transpose(0, 1)
    else:
        together = torch.cat([out[one.rank, :, one.start : one.start + one.size] for one in sections], 1)
    shape = (*x.shape[: cut.dim], cut.pre * whole * cut.post, *x.shape[cut.dim + 1 :])
    return together.reshape(shape).contiguous()  # pieces 1 wide might lie apart, which not every op takes


def _filled(env: Env, x: Tensor, cut: ShardedFactor) -> Steps:
    """Return the pieces of all ranks in order, and zeros where other microbatches have theirs."""
    x = yield from _gather(env, x, cut)
    if env.window is None or ROWS not in cut.axes:
        return x
    (start, stop), outer, inner = env.window, math.prod(x.shape[: cut.dim]) * cut.pre, math.prod(x.shape[cut.dim + 1 :])
    out = x.new_zeros((outer, env.rows, inner * cut.post))
    out[:, start:stop] = x.reshape(outer, stop - start, inner * cut.post)
    return out.reshape(*x.shape[: cut.dim], cut.pre * env.rows * cut.post, *x.shape[cut.dim + 1 :])


def _own(env: Env, x: Tensor, cut: ShardedFactor) -> Tensor:
    """Return this rank's piece."""
    if not env.shares(cut.axes):
        return x
    mine, whole = cut.own(env)
    if isinstance(cut.pre, int) and cut.pre == 1 and len(mine) == 1:
        start, stop = mine[0]
        return x.narrow(cut.dim, start * cut.post, (stop - start) * cut.post)
    shape = list(x.shape)
    split = x.reshape(*shape[: cut.dim], cut.pre, whole, cut.post, *shape[cut.dim + 1 :])
    shape[cut.dim] = cut.pre * sum(stop - start for start, stop in mine) * cut.post
    pieces = [split.narrow(cut.dim + 1, start, stop - start) for start, stop in mine]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim + 1)).reshape(shape)


def _scatter(env: Env, x: Tensor, cut: ShardedFactor) -> Steps:
    """Return this rank's piece of the sum over ranks; uneven pieces are padded for the collective."""
    sizes, index, outer, inner = cut.folded(env, x.shape)
    if len(sizes) == 1:
        return x
    most, sections, shape = max(sizes), cut.sections(env), list(x.shape)
    if min(sizes) == most and len(sections) == len(sizes):
        pieces = in_memory(x.reshape(outer, len(sizes), most, inner).transpose(0, 1))
    else:
        whole = x.reshape(outer, sum(sizes), inner)
        pieces = x.new_zeros((len(sizes), outer, most, inner))
        for one in sections:
            pieces[one.rank, :, one.start : one.start + one.size] = whole[:, one.at : one.at + one.size]
    out = x.new_empty((outer, most, inner))
    axes = env.real(cut.axes)
    yield env.comm.reduce_scatter(out.view(-1), pieces.view(-1), axes, lane=env.lane, what="reduce_scatter")
    shape[cut.dim] = cut.pre * sizes[index] * cut.post
    return out[:, : sizes[index]].reshape(shape)


class Moving:
    """A move under way: its first collective is posted, and ``result`` waits, posts what follows, and returns.
    ``back`` moves the gradient of the result."""

    def __init__(self, env: Env, found: Tensor | Steps, back: Callable[[Tensor], Tensor | Steps] | None = None) -> None:
        self.env, self.back = env, back
        self._found, self._handle = found, None
        self._go_on()

    def _go_on(self) -> None:
        self._handle = None
        if not isinstance(self._found, Tensor):
            try:
                self._handle = next(self._found)
            except StopIteration as end:
                self._found = end.value

    def result(self) -> Tensor:
        """Return what is moved, when its collectives are complete."""
        while self._handle is not None:
            self.env.wait(self._handle)
            self._go_on()
        assert isinstance(self._found, Tensor)
        return self._found


class _Move(torch.autograd.Function):
    """Moves a value in forward and its gradient in backward, each by a function of (env, tensor, where)."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, where: Any, there: Any, back: Any) -> Tensor:
        ctx.env, ctx.where, ctx.back = env, where, back
        # Autograd must not see a view of x: parameters change their memory while a graph holds them.
        return Moving(env, there(env, x, where)).result().data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, Moving(ctx.env, ctx.back(ctx.env, grads[0], ctx.where)).result(), None, None, None


def moved(env: Env, x: Tensor, where: Any, there: Way, back: Way) -> Any:
    """Return ``there(env, x, where)``, whose gradient goes ``back``; if ``env`` posts moves, the move under way."""
    if env.posts:
        with torch.no_grad():
            return Moving(env, there(env, x, where), lambda gradient: back(env, gradient, where))
    result: Tensor = _Move.apply(env, x, where, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(env: Env, x: Tensor, axes: Groups) -> Tensor:
    return x


def _first_only(env: Env, x: Tensor, axes: Groups) -> Tensor:
    return x if env.group(axes)[1] == 0 else torch.zeros_like(x)


def _first_part(env: Env, x: Tensor, axes: Groups) -> Tensor:
    """Return what the first rank adds to a sum that is ``x``; each microbatch adds its share."""
    return _first_only(env, _part(env, x, axes), axes)


def _part(env: Env, x: Tensor, axes: Groups) -> Tensor:
    share = env.share_of(axes)
    return x if share == 1 else x * share


def _reduce(env: Env, x: Tensor, axes: Groups) -> Steps:
    return _sum(env, x, axes, "all_reduce")


# ---- moves -----------------------------------------------------------------------------------------------------------

_KINDS = {_reduce: "all_reduce", _gather: "all_gather", _filled: "all_gather", _scatter: "reduce_scatter"}


def _move_of(**ways: tuple[Way, Way]) -> Callable[[Function], Function]:
    """Declare a move: for each dual of its result, how the value and how the gradient is moved."""
    communicates = any(way in _KINDS for pair in ways.values() for way in pair)
    return own_op(ways=ways, communicates=communicates, moves=communicates, shares=True, blind=True)


def kinds(move: Any, dual: str = "I") -> tuple[str, str]:
    """Return the collectives of a move in forward and in backward; "" where there is none, or if it is no move."""
    there, back = facts_of(move).ways.get(dual, (_same, _same))
    return _KINDS.get(there, ""), _KINDS.get(back, "")


def communicates_forward(facts: OwnOp) -> bool:
    """Whether these are the facts of a move that communicates in forward for some dual."""
    return any(there in _KINDS for there, _ in facts.ways.values())


def _move(move: Any, env: Env, x: Tensor, where: Groups | ShardedFactor, dual: str = "I", cuts: bool = False) -> Tensor:
    """Make a move; one that ``cuts`` a value does so for microbatches too."""
    axes = where.axes if isinstance(where, ShardedFactor) else where
    if not (env.shares(axes) if cuts else env.group(axes)[0] > 1):
        return x
    result: Tensor = moved(env, x, where, *facts_of(move).ways[dual])
    return result


@_move_of(I=(_reduce, _same), R=(_reduce, _reduce))
def all_reduce(env: Env, x: Tensor, axes: Groups, dual: str = "I") -> Tensor:
    """P → I or R: sum ``x`` over ranks; the shape stays."""
    return _move(all_reduce, env, x, axes, dual)


@_move_of(I=(_same, _reduce))
def replicate(env: Env, x: Tensor, axes: Groups) -> Tensor:
    """I → R: return ``x`` unchanged; its gradient is summed over ranks."""
    return _move(replicate, env, x, axes)


@_move_of(I=(_same, _first_only))
def own(env: Env, x: Tensor, axes: Groups) -> Tensor:
    """R → I: return ``x`` unchanged, a parameter with which all ranks compute the same: only the first contributes to
    its gradient, which is summed over ranks later.
    """
    return _move(own, env, x, axes)


@_move_of(I=(_first_part, _part))
def partial(env: Env, x: Tensor, axes: Groups) -> Tensor:
    """I → P: keep ``x`` on the first rank; it becomes zero on the others."""
    return _move(partial, env, x, axes, cuts=True)


@_move_of(I=(_gather, _own), R=(_gather, _scatter))
def gather(env: Env, x: Tensor, cut: Sequence[Any], dual: str = "I") -> Tensor:
    """V → I or R: concatenate the pieces of all ranks along the factor ``cut``."""
    return _move(gather, env, x, ShardedFactor(*cut), dual)


@_move_of(I=(_own, _filled))
def shard(env: Env, x: Tensor, cut: Sequence[Any]) -> Tensor:
    """I → V: take this rank's piece of the factor ``cut``."""
    return _move(shard, env, x, ShardedFactor(*cut), cuts=True)


@_move_of(I=(_scatter, _gather))
def scatter(env: Env, x: Tensor, cut: Sequence[Any]) -> Tensor:
    """P → V: take this rank's piece of the sum over ranks, along the factor ``cut``."""
    return _move(scatter, env, x, ShardedFactor(*cut))


@own_op(shares=True, blind=True)
def shard_leaf(env: Env, x: Tensor, cut: Sequence[Any]) -> Tensor:
    """R → V: take this rank's piece; the gradient is zero outside of it."""
    return _own(env, x, ShardedFactor(*cut))


@own_op(shares=True, blind=True)
def plus_number(env: Env, x: Tensor, number: float, factor: float, axes: Groups) -> Tensor:
    """P → P: add ``factor`` times ``number`` to the sum of ``x`` over ranks and microbatches."""
    return x + env.share_of(axes) * factor * number if is_first(env, axes) else x


@own_op(shares=True, blind=True)
def counted(env: Env, number: int) -> Tensor:
    """Return a sum over the rows that the step has made beforehand; see ``units/batch_sums.py``."""
    return env.counts[number]


@own_op()
def number(env: Env, x: Tensor) -> int:
    """Return a scalar as a number, for which the host waits; on meta it is 1."""
    return 1 if x.is_meta else int(x)


@own_op(shares=True, blind=True)
def placed(env: Env, x: Tensor, cut: Sequence[Any]) -> Tensor:
    """V → P: return zeros of the whole factor ``cut`` with this rank's piece in its place."""
    where = ShardedFactor(*cut)
    mine, whole = where.own(env)
    outer, inner = math.prod(x.shape[: where.dim]) * where.pre, math.prod(x.shape[where.dim + 1 :]) * where.post
    sizes = [stop - start for start, stop in mine]
    out = x.new_zeros((outer, whole, inner))
    for (start, stop), piece in zip(mine, x.reshape(outer, sum(sizes), inner).split_with_sizes(sizes, 1), strict=True):
        out[:, start:stop] = piece
    return out.reshape(*x.shape[: where.dim], where.pre * whole * where.post, *x.shape[where.dim + 1 :])


@own_op(shares=True, blind=True)
def same(env: Env, x: Tensor, axes: Groups) -> Tensor:
    """V → V: return ``x`` unchanged, for its pieces stay the same."""
    return x


def is_first(env: Env, axes: Groups) -> bool:
    """Whether this rank is the first over ``axes``: the one that contributes where all compute the same."""
    return env.group(axes)[1] == 0
