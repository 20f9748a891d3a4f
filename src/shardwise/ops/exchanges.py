"""Find out what an own function communicates, by running it on the meta device with local shapes and a communicator
that only records. So the code of the function is the only description of its communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.ops.env import Env

META = torch.device("meta")


class Exchange(NamedTuple):
    """A collective over ``axes`` as :class:`Env` names them; ``backward`` says whether it runs in backward.

    ``nbytes`` is the number of bytes of the whole tensor: the operand of an all_reduce, the result of an all_gather,
    the operand of a reduce_scatter or an all_to_all, each with the padding of uneven pieces; what one rank sends in a
    shift.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    backward: bool


class _Recorder:
    """A communicator that only records its operations; it is also their handle."""

    def __init__(self) -> None:
        self.found: list[Exchange] = []
        self.backward = False

    def note(self, kind: str, whole: Tensor, axes: Sequence[str]) -> _Recorder:
        self.found.append(Exchange(kind, tuple(axes), whole.nbytes, self.backward))
        return self

    def all_reduce(self, x: Tensor, axes: Any, **kwargs: Any) -> _Recorder:
        return self.note("all_reduce", x, axes)

    def all_gather(self, out: Tensor, x: Tensor, axes: Any, **kwargs: Any) -> _Recorder:
        return self.note("all_gather", out, axes)

    def reduce_scatter(self, out: Tensor, x: Tensor, axes: Any, **kwargs: Any) -> _Recorder:
        return self.note("reduce_scatter", x, axes)

    def all_to_all(self, out: Tensor, x: Tensor, axes: Any, **kwargs: Any) -> _Recorder:
        return self.note("all_to_all", x, axes)

    def shift(self, out: Tensor, x: Tensor, axes: Any, **kwargs: Any) -> _Recorder:
        return self.note("shift", x, axes)

    def wait(self) -> None:
        """Return at once."""


@dataclass
class _Recording(Env):
    """An Env whose axes stay as the graph names them."""

    def real(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axes)


def stand_in(shape: Sequence[int], dtype: torch.dtype, grad: bool) -> Tensor:
    """Return a tensor on meta; it requires a gradient if ``grad`` says so and its dtype allows it."""
    learns = grad and (dtype.is_floating_point or dtype.is_complex)
    return torch.empty(tuple(shape), dtype=dtype, device=META, requires_grad=learns)


class _Argument(NamedTuple):
    """An argument by which calls are told apart: 1, 1.0 and True are equal, but of different types."""

    kind: type
    value: Any

    @classmethod
    def of(cls, value: Any) -> _Argument:
        if isinstance(value, Tensor):
            return cls(Tensor, (tuple(value.shape), value.dtype, value.requires_grad))
        if isinstance(value, list | tuple):
            return cls(tuple, tuple(map(cls.of, value)))
        return cls(type(value), value)

    def made(self) -> Any:
        """Return the argument again: a tensor as one of its own, a list as a tuple."""
        if self.kind is Tensor:
            return stand_in(*self.value)
        return tuple(one.made() for one in self.value) if self.kind is tuple else self.value


class _Call(NamedTuple):
    """A call of one of our own functions, and the place of the rank that makes it."""

    function: Callable[..., Any]
    args: tuple[_Argument, ...]
    kwargs: tuple[tuple[str, _Argument], ...]
    parts: int
    index: int
    rows: int
    window: tuple[int, int] | None
    windows: tuple[tuple[int, int], ...]
    tensor: tuple[tuple[str, tuple[int, int]], ...]


def exchanges(
    env: Env, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Exchange, ...]:
    """Return the collectives of ``function(env, *args, **kwargs)`` and its backward on the rank of ``env``, in order.

    The tensors among the arguments are made by :func:`stand_in` and have local shapes.
    """
    named = tuple((name, _Argument.of(value)) for name, value in kwargs.items())
    place = env.parts, env.index, env.rows, env.window, env.windows, tuple(env.tensor.items())
    return _found(_Call(function, tuple(map(_Argument.of, args)), named, *place))


@lru_cache(maxsize=4096)  # the layers of a model make the same calls
def _found(call: _Call) -> tuple[Exchange, ...]:
    comm = _Recorder()
    mine = _Recording(
        comm, parts=call.parts, index=call.index, rows=call.rows, window=call.window, windows=call.windows,
        tensor=dict(call.tensor),
    )  # fmt: skip
    args = [one.made() for one in call.args]
    with torch.enable_grad():
        results = call.function(mine, *args, **{name: one.made() for name, one in call.kwargs})
    good = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    comm.backward = True
    if good:
        given = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        torch.autograd.grad(good, given, [torch.empty_like(r) for r in good], allow_unused=True)
    return tuple(comm.found)
