"""What forward reads of tensors in Python (``if mask.any()``, ``labels.max() >= n``) and follows from the batch, and
from random numbers that are drawn for all rows (``if torch.rand([]) > chance``).

Such a read stops a capture, which has no values.  So a first forward computes without values what depends on
parameters, and with values what does not: it tells the answers.  With these the model is captured, and what was read
is given out beside the loss: from that come the checks (:mod:`shardwise.capture.checks`) by which each batch finds the
capture that it fits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.capture.assumed import BRANCHES, SINGLE, Check
from shardwise.capture.coins import Coins, Drawing
from shardwise.capture.eager_calls import EagerCalls
from shardwise.capture.intercept import Intercept, Layer, Proceed
from shardwise.capture.running import here, models_call
from shardwise.graph.torch_private import (
    RESIZES,
    TorchDispatchMode,
    exporting,
    fake_mode,
    pin,
    schema,
    storage_key,
    without_modes,
    without_torch_functions,
)

REPEATS: frozenset[Any] = frozenset({torch.repeat_interleave, Tensor.repeat_interleave})
SIZED_OF: frozenset[Any] = frozenset({
    torch.narrow, torch.reshape, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.narrow, Tensor.view,
    Tensor.reshape, Tensor.expand, Tensor.repeat,
})  # fmt: skip
"""Those of :data:`SIZED` whose first argument is a tensor that they do not read."""
INDEXES: frozenset[Any] = frozenset({Tensor.__getitem__, Tensor.__setitem__})
SIZED: frozenset[Any] = REPEATS | RESIZES | SIZED_OF | INDEXES | {
    torch.arange, torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace, torch.multinomial,
}  # fmt: skip
"""Functions that read numbers from tensors that they are given (``torch.arange(lengths.max())``)."""


PICKS: frozenset[Any] = frozenset({
    torch.unique_consecutive, torch.unique, torch.nonzero, torch.argwhere, torch.masked_select, torch.where,
    Tensor.unique_consecutive, Tensor.unique, Tensor.nonzero, Tensor.argwhere, Tensor.masked_select, Tensor.__getitem__,
})  # fmt: skip
"""Functions whose results may be as large as values say."""


def length(one: Tensor) -> int:
    """Return the size of a tensor's first dim: what is read of the result of a function of :data:`PICKS`."""
    return one.shape[0]


def counted(mask: Tensor) -> int:
    """Return the number of elements of a mask that are true: what is read of it where it picks elements of a tensor
    whose values depend on parameters."""
    return int(mask.count_nonzero())


SIZES: frozenset[Any] = frozenset({length, counted})


def _mask_of(func: Any, args: Sequence[Any]) -> Tensor | None:
    """Return the mask by which a function of :data:`PICKS` picks elements, if it is the only index."""
    if func not in (Tensor.__getitem__, torch.masked_select, Tensor.masked_select) or len(args) != 2:
        return None
    mask = args[1]
    return mask if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.dim() else None


def _always_open(func: Any, args: Sequence[Any]) -> bool:
    """Whether values say how large a result of a function of :data:`PICKS` is, whatever it is given."""
    lists = func in (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
    return lists or (func is torch.where and len(args) == 1) or _mask_of(func, args) is not None


def with_numbers(
    layer: Layer, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed
) -> tuple[Sequence[Any], dict[str, Any]]:  # fmt: skip
    """Return the arguments of a function of :data:`SIZED` with what it reads, as ``layer`` reads it.

    How often elements are repeated says how large the result is, which is read of the sum. An index reads the bounds
    of its slices."""
    if func in REPEATS:
        repeats = kwargs.get("repeats", args[-1] if args else None)
        if isinstance(repeats, Tensor) and repeats.dim() and "output_size" not in kwargs:
            kwargs = {**kwargs, "output_size": layer(Tensor.item, (repeats.sum(),), {}, proceed)}
        return args, kwargs

    def number(one: Any) -> Any:
        reads = isinstance(one, Tensor) and not one.dim() and not one.is_floating_point()
        return layer(Tensor.item, (one,), {}, proceed) if reads else one

    if func in INDEXES:
        return (args[0], _bounded(args[1], number), *args[2:]), kwargs
    own = tuple(args[: func in SIZED_OF])
    sizes, options = tree_map(number, (tuple(args[len(own) :]), kwargs))
    return (*own, *sizes), options


def _bounded(index: Any, number: Callable[[Any], Any]) -> Any:
    """Return an index with the ``number`` of each bound of its slices."""
    if isinstance(index, tuple):
        return tuple(_bounded(one, number) for one in index)
    return slice(*map(number, (index.start, index.stop, index.step))) if isinstance(index, slice) else index


def listed(layer: Layer, one: Tensor, proceed: Proceed) -> Any:
    """Return ``one.tolist()`` number by number, as tensors without values do it."""
    if not one.dim():
        return layer(Tensor.item, (one,), {}, proceed)
    return [listed(layer, each, proceed) for each in one.unbind()]


class Read(NamedTuple):
    """A read: the function, its arguments (``operands`` in place of tensors), what it gave, its ``place`` for messages
    and the ``call`` in the model's code; ``assumed`` says that the answer is taken for granted."""

    function: Any
    arguments: tuple[Any, ...]
    answer: Any
    place: str
    call: str = ""
    assumed: bool = False

    @property
    def operands(self) -> int:
        """The number of tensors that are read."""
        return sum(isinstance(one, Operand) for one in self.arguments)

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """Return the answer for other tensors."""
        given = iter(tensors)
        return self.function(*(next(given) if isinstance(one, Operand) else one for one in self.arguments))


def sized(reads: Sequence[Read]) -> bool:
    """Whether some of the reads are of sizes that follow from values, which are others for each part of a batch."""
    return any(one.function in SIZES for one in reads)


class Operand(NamedTuple):
    """It stands for a tensor that is read."""


class Unanswered(Exception):
    """A read by a function that is answered, of what has no value: with answers to more functions it has none either.
    ``why`` is what stopped forward there."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


class UnlikeRead(Exception):
    """Forward reads something else than in the run that gave the answers, or what has too many answers."""


def _picked(found: Any) -> Tensor:
    """Return the first tensor of the result of a function of :data:`PICKS`."""
    one: Tensor = next(one for one in tree_leaves(found) if isinstance(one, Tensor))
    return one


class Answering:
    """A layer of :class:`Intercept` that answers reads of ``functions`` as they were, and notes the ``operands``."""

    def __init__(self, reads: Sequence[Read], functions: frozenset[Any]) -> None:
        self.reads, self.functions = tuple(reads), functions
        self.operands: list[Tensor] = []
        self._at = 0

    @contextmanager
    def answers(self) -> Iterator[None]:
        """Answer what a forward inside reads; raise :class:`UnlikeRead` where that is less than there are answers."""
        self.operands.clear()
        self._at = 0
        with Intercept(self):
            yield
        if self._at != len(self.reads):
            raise UnlikeRead

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in SIZED and Tensor.item in self.functions:
            args, kwargs = with_numbers(self, func, args, kwargs, proceed)
        read = self.reads[self._at] if self._at < len(self.reads) else None
        picks = func in PICKS and func in self.functions
        if picks and read is not None and read.function in SIZES and read.call == models_call():
            found = proceed(func, args, kwargs)
            picked = _picked(found)
            operand = picked if read.function is length else _mask_of(func, args)
            # A mask that has picked before is known to pick as many again.
            if operand is not None and (_always_open(func, args) or isinstance(picked.shape[0], torch.SymInt)):
                self._at += 1
                self.operands.append(operand)
                pin(picked.shape[0], read.answer)
            return found
        if picks or func not in self.functions:
            return proceed(func, args, kwargs)
        if func is Tensor.tolist:
            return listed(self, args[0], proceed)
        tensors = [one for one in args if isinstance(one, Tensor)]
        if read is None or read.function is not func or read.operands != len(tensors) or kwargs:
            raise UnlikeRead
        self._at += 1
        self.operands += tensors
        return read.answer


class _Asking:
    """A layer that answers reads of what has a value, and notes them; for what has none it takes the answers of
    ``checks``, those of all reads of truth values in a forward with values."""

    def __init__(self, known: _Values, functions: frozenset[Any], checks: Sequence[Check]) -> None:
        self.known, self.functions, self.checks = known, functions, checks
        self.reads: list[Read] = []
        self.assumed: list[int] = []  # the checks whose answers were taken
        self.unanswered = False  # whether such a read is going on
        self._at = -1

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in SIZED and Tensor.item in self.functions:
            args, kwargs = with_numbers(self, func, args, kwargs, proceed)
        if func is Tensor.tolist and func in self.functions:
            return listed(self, args[0], proceed)
        if func in PICKS and func in self.functions:
            found = proceed(func, args, kwargs)
            one = _picked(found)
            counts = bool(one.dim()) and (self.known.open(one) or _always_open(func, args))
            value = self.known.of(one) if counts else None
            mask = None if value is not None else self.known.of_argument(_mask_of(func, args))
            if value is not None:
                self.reads.append(Read(length, (Operand(),), len(value), here(), models_call()))
            elif mask is not None:
                with without_modes(), without_torch_functions():
                    number = counted(mask)
                self.reads.append(Read(counted, (Operand(),), number, here(), models_call()))
                pin(one.shape[0], number)
            return found
        values = [self.known.of_argument(one) for one in args]
        self._at += func in BRANCHES
        if func in SINGLE and func in self.functions and len(args) == 1 and values[0] is None and self.checks:
            check = self.checks[self._at]
            if check.place != here():
                raise UnlikeRead("another read than in a forward with values")
            self.assumed.append(self._at)
            self.reads.append(Read(func, (Operand(),), check.answer, check.place, assumed=True))
            return check.answer
        if func not in self.functions or kwargs or any(one is None for one in values):
            self.unanswered = func in self.functions
            found = proceed(func, args, kwargs)
            self.unanswered = False
            return found
        with without_modes(), without_torch_functions():
            answer = func(*values)
        if any(isinstance(one, float) for one in tree_leaves(answer)):
            raise UnlikeRead("a float, which would be another in each batch")
        arguments = tuple(Operand() if isinstance(one, Tensor) else one for one in args)
        self.reads.append(Read(func, arguments, answer, here(), models_call()))
        return answer


def _picks(func: Any, args: Sequence[Any]) -> bool:
    """Whether the result of an op is as large as values say; one that indexes only if it does so by truth values."""
    if func is torch.ops.aten.index.Tensor:
        return any(one.dtype in (torch.bool, torch.uint8) for one in args[1] if one is not None)
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes values of what does not depend on the tensors ``unknown``, beside what ``mode`` computes without."""

    def __init__(self, unknown: Sequence[Tensor], mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._unknown = {storage_key(one) for one in unknown}
        self._values: dict[int, Tensor] = {}
        self._open: set[int] = set()
        self._held: list[Tensor] = []  # an id means something as long as its tensor lives

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor, if it has one."""
        if hasattr(tensor, "fake_mode"):
            found = self._values.get(id(tensor))
            return None if storage_key(tensor) in self._unknown else found
        return None if tensor.is_meta or storage_key(tensor) in self._unknown else tensor

    def of_argument(self, argument: Any) -> Any:
        """Return an argument of a function with its value, None if it has none."""
        return self.of(argument) if isinstance(argument, Tensor) else argument

    def open(self, tensor: Tensor) -> bool:
        """Whether a tensor is as large as values say that it is."""
        return id(tensor) in self._open

    def forget(self, *tensors: Tensor) -> None:
        """Let tensors have no values."""
        self._unknown |= {storage_key(one) for one in tensors}
        self._held += tensors

    def take(self, tensor: Tensor, value: Tensor) -> None:
        """Let a tensor without a value have one."""
        self._values[id(tensor)] = value
        self._held.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        values = {id(one): self.of(one) for one in given}
        described = schema(func)
        writes = described is not None and described.is_mutable
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        real = [one for one in given if not hasattr(one, "fake_mode")]
        if random or any(one is None for one in values.values()) or (writes and real):
            if writes:  # what it writes to has no value any more; a tensor that is freed leaves its key to another
                self._unknown |= {storage_key(one) for one in given}
                self._held += given
            return func(*args, **kwargs)
        own = tree_map(lambda one: values[id(one)] if isinstance(one, Tensor) else one, (tuple(args), kwargs))
        with without_modes(), torch.no_grad():
            result = func(*own[0], **own[1])
        if func is torch.ops.aten._local_scalar_dense.default:  # torch's own code checks a value, as one_hot does
            return result
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
            found = tree_map(
                lambda one: self._mode.from_tensor(one, static_shapes=True) if isinstance(one, Tensor) else one, result
            )
        else:
            found = func(*args, **kwargs)
        for one, value in zip(tree_leaves(found), tree_leaves(result), strict=True):
            if isinstance(one, Tensor) and isinstance(value, Tensor):
                self.take(one, value)
                self._open |= {id(one)} if _picks(func, args) else set()
        return found


def asked(
    forward: Callable[[Mapping[str, Tensor]], Any], module: nn.Module, fields: Mapping[str, Tensor],
    functions: frozenset[Any], rows: int, drawing: Drawing | None = None, calls: EagerCalls | None = None,
    checks: Sequence[Check] = (),
) -> tuple[list[Read], list[int]]:  # fmt: skip
    """Return what ``forward`` of ``fields``, with these ``rows``, reads by ``functions``, with the answers; ``drawing``
    keys the random numbers, if it is a step's, and results of ``calls`` have no values.  Reads of
    truth values that have none have the answers of ``checks``; return also which of these were taken.

    Whatever stops a forward without values is raised, :class:`Unanswered` for reads of what depends on parameters."""
    mode = fake_mode()
    values = _Values(list(module.parameters()), mode)
    telling = (
        contextlib.nullcontext() if calls is None else calls.telling(lambda call, given, made: values.forget(*made))
    )
    asking, coins = _Asking(values, functions, checks), Coins(drawing, rows, values.of_argument, values.take)
    with mode, values, exporting(), torch.enable_grad(), Intercept(asking, coins), telling:
        try:
            forward(fields)
        except Exception as error:
            if asking.unanswered:
                raise Unanswered(error) from error
            raise
    return asking.reads, asking.assumed
