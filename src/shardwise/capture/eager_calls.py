"""Calls that a graph holds as one op each: functions that read values of tensors, and run as they are written.

Where a forward cannot be captured whole for a function reads values (the matching in the loss of a detector), all that
is around the calls of this function is captured, and each call runs the function itself, in every step, on the whole
tensors: rows of all ranks, shards of none.  So it computes what it computes on one device, whatever it does.

Parameters and buffers of a module among the arguments are arguments, too, where no result has a gradient: one that
chooses places or experts, for example.  A part of a function (:mod:`parts`) may give results with gradients of them,
for there is no smaller one; but with most of the parameters it is one only if it decides, for then it needs all rows,
and every rank computes it for them.  What a call returns is seen in a forward with values, before the capture.  Only
functions that keep to their arguments can be called so: :class:`NotEager` says what stands against it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardwise.capture.call_sizes import Size, Sizes, evaluated, following, in_runs
from shardwise.capture.forms import Form
from shardwise.capture.functions import PLAIN
from shardwise.capture.intercept import Intercept, Layer
from shardwise.capture.keyed_calls import RefuseRandom
from shardwise.capture.parts import part_of
from shardwise.capture.redirected import Call, redirected
from shardwise.capture.seen_calls import (
    Held,
    NotEager,
    OpenSize,
    Seen,
    alike,
    emptied,
    equal,
    seen_call,
    share,
    sizes,
    tensors_of,
)
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import storage_key
from shardwise.initial.copies import copied
from shardwise.ops.custom_function import OP, WholeCall

Forward = Callable[..., None]
"""``forward(rows, values, *layers, form=None)`` runs a forward with values for so many rows, of the form of the batch
or of another: with the parameters that the model has (0), or with others, by number; ``layers`` intercept what it
calls."""
OTHERS = (1, 2)

MOST = 8  # functions of a model that may run as written


Told = Callable[["EagerCall", Sequence[Tensor], Sequence[Tensor]], None]
"""It is told a call in a trial: the tensors that it takes, and its results, which have no values."""


class Paused(Protocol):
    """What notes nothing while it is ``paused``."""

    paused: bool


class Made(NamedTuple):
    """A tensor that a call has returned."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    learns: bool


class EagerCall(WholeCall):
    """A call as the target of a node: given the tensors among its arguments, it returns those among its results.

    ``__name__`` tells it apart from all others of a capture, for code is shared between units by its text."""

    def __init__(self, runs: Sequence[Seen], number: int, layers: Sequence[Layer]) -> None:
        self.seen = seen = runs[0]
        self.layers, self.shares = layers, seen.shares
        self.by_test, self.title = all(one.by_test for one in runs), seen.function.__qualname__
        self.written = False  # whether forward writes to what it returns
        self.draws = seen.draws  # whether it runs once a step, before the model
        self.given = [Tensor if isinstance(one, Tensor) else one for one in seen.given]
        taken, results = in_runs([one.given for one in runs]), [one for one in seen.found if isinstance(one, Tensor)]
        self.taken = [[own[0] if len({*own}) == 1 else None for own in shape] for shape in taken]  # None: open
        self.made = [
            Made(tuple(_follows(own, taken, seen.function) for own in sizes), one.dtype, one.requires_grad)
            for one, sizes in zip(results, in_runs([one.found for one in runs]), strict=True)
        ]
        learning = sum(isinstance(one, Tensor) and one.requires_grad for one in seen.given)
        chooses = learning > 1 or part_of(seen.function) is not None
        self.skips = chooses and any(one.learns for one in self.made)
        self.__name__ = self.__qualname__ = f"{seen.function.__name__}_{number}"
        self.__module__ = seen.function.__module__

    def __str__(self) -> str:
        return f"{self.title}, which runs as written"

    def form(self) -> str:
        """Return all that a capture takes from the call but for its tensors; another start gives the same text."""
        seen = self.seen
        given, found = (
            [repr(one) if isinstance(one, PLAIN) else type(one).__qualname__ for one in each]
            for each in (seen.given, seen.found)
        )
        flags = (seen.gradients, seen.shares, self.by_test, self.skips, self.draws)
        name = (seen.function.__module__, self.title)
        return repr((name, given, seen.given_spec, found, seen.found_spec, flags, self.taken, self.made))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if any(one.is_meta or hasattr(one, "fake_mode") for one in tensors):
            return self.shaped(tensors)
        args, kwargs = self._arguments(tensors)
        before = Held.of(args, kwargs, tensors, contents=part_of(self.seen.function) is not None)
        gradients = self.seen.gradients and torch.is_grad_enabled()
        with torch.set_grad_enabled(gradients), RefuseRandom(), Intercept(*self.layers):
            found, spec = tree_flatten(self._called(args, kwargs))
            drawn = before.drawn() and not self.draws
            if drawn and not all(map(equal, found, tree_leaves(self._called(args, kwargs)))):
                wrong = f"{self.title} reads values, and for this batch draws from a generator of Python or numpy"
                raise ShardwiseError(f"model: {wrong}, as each rank would for itself; legal: torch's random functions")
        if before.changed():
            wrong = f"{self.title} reads values, and for this batch writes to what it is given, or changes it"
            raise ShardwiseError(f"model: {wrong}; legal: statements and functions that change nothing around them")
        results = [one for one in found if isinstance(one, Tensor)]
        same = spec == self.seen.found_spec and all(map(alike, self.seen.found, found))
        if not same or not all(self._fits(one, made, tensors) for one, made in zip(results, self.made, strict=True)):
            raise ShardwiseError(
                f"model: {self.title} reads values, and does not return for this batch what the "
                "rest of forward was captured for: other shapes, dtypes, numbers or objects, or a gradient where there "
                "was none; legal: results whose sizes follow from those of the arguments"
            )
        if self.written and not self.shares and share(results, tensors):
            wrong = f"{self.title} reads values, and for this batch returns memory of its arguments, or one twice"
            raise ShardwiseError(
                f"model: {wrong}, to which forward writes then; legal: no in-place ops on what it returns"
            )
        return tuple(apart(results, tensors))

    def _called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the function returns; raise :class:`ShardwiseError` where it uses a parameter that it was
        not seen to use."""
        try:
            return self.seen.function(*args, **kwargs)
        except RuntimeError as error:
            if "device meta" not in str(error):
                raise
            wrong = f"{self.title} reads values, and for this batch computes with parameters that it did not use before"
            legal = "a function that uses all parameters of its module each time, or statements in forward itself"
            raise ShardwiseError(f"model: {wrong}; legal: {legal}") from error

    def _arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments with these tensors, and their device in place of that of the capture; where the last
        ones are of modules, these are copies with them."""
        feed, device = iter(tensors), tensors[0].device if tensors else None
        given = [next(feed) if one is Tensor else device or one if isinstance(one, torch.device) else one
                 for one in self.given]  # fmt: skip
        leaves, own = given[: self.seen.given_spec.num_leaves], given[self.seen.given_spec.num_leaves :]
        if own:
            memo = {id(old): new for old, new in zip(tensors_of(leaves), own, strict=True)}
            leaves = [copied(one, memo) if isinstance(one, nn.Module) else one for one in leaves]
        return tree_unflatten(leaves, self.seen.given_spec)

    def _fits(self, result: Tensor, made: Made, tensors: Sequence[Tensor]) -> bool:
        """Whether a result of the call with these tensors has the sizes that the capture gave it, and no gradient where
        none was seen."""
        if result.requires_grad and not made.learns:
            return False
        return list(result.shape) == [evaluated(size, tensors) for size in made.sizes]

    def shaped(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return results without values, which depend on all tensors where the real ones have gradients."""
        like = tensors[0] if tensors else torch.empty((), device="meta")
        learning = [one for one in tensors if one.requires_grad]
        results = []
        for one in self.made:
            result = like.new_empty([evaluated(size, tensors) for size in one.sizes], dtype=one.dtype)
            if one.learns and torch.is_grad_enabled():
                result = sum((x.sum().to(one.dtype) for x in learning), result)
            results.append(result)
        return tuple(results)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise :class:`OpenSize` where sizes are open that did not vary when the calls were seen."""
        for tensor, known in zip(tensors, self.taken, strict=True):
            for size, own in zip(tensor.shape, known, strict=True):
                if isinstance(size, torch.SymInt) and own is not None:
                    raise OpenSize(self.seen.function, "takes a size that is open")

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the function returns, with these tensors."""
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(one, Tensor) else one for one in self.seen.found]
        return tree_unflatten(leaves, self.seen.found_spec)


def _follows(sizes: Sizes, taken: Sequence[Sequence[Sizes]], function: FunctionType) -> Size:
    """Return how a size of a result follows from what is taken; the first two runs differ in their rows alone."""
    found = following(sizes, taken)
    if found is None:
        by_rows = following(sizes[:2], [[own[:2] for own in shape] for shape in taken]) is not None
        why = "returns tensors whose sizes do not follow from those of its arguments"
        raise (OpenSize if by_rows else NotEager)(function, why)
    return found


def apart(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield results, copies of those that share memory with these tensors, or with one before."""
    taken = {storage_key(one) for one in tensors}
    for one in results:
        yield one.clone() if storage_key(one) in taken else one
        taken.add(storage_key(one))


class EagerCalls:
    """The calls of ``functions`` in a forward of a model with so many ``parameters`` (elements), which ``forward`` runs
    with values; inside them ``layers`` intercept what they call, as in all of forward.  Where sizes are open, batches
    may have the ``forms``, too."""

    def __init__(
        self, functions: Sequence[FunctionType], forward: Forward, layers: Sequence[Layer], parameters: int,
        forms: Sequence[Form] = (),
    ) -> None:  # fmt: skip
        self.functions, self.forward, self.layers = tuple(functions), forward, layers
        self.parameters, self.forms = parameters, tuple(forms)
        self.ops: list[Any] | None = None  # those of the running capture, by number; None in a trial
        self.told: Told | None = None  # hears of each call in a trial
        self.calls: list[EagerCall] = []
        self._seen: list[Seen] = []
        self._inside = False
        self._stopped: NotEager | None = None

    def see(self, rows: Sequence[int], forms: bool = False) -> None:
        """Run forward with values, once for each of one or two numbers of rows, and with ``forms`` for these; raise
        :class:`NotEager` where a function cannot be called so, and what forward raises."""
        every = [self._run(number, 0) for number in rows]
        first, other = every[0], every[-1]
        with contextlib.suppress(ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
            for values in OTHERS:
                for one, two in zip(first, self._run(rows[0], values), strict=False):
                    if sizes(one) != sizes(two):
                        raise NotEager(one.function, "returns tensors whose sizes follow from values")
                    if not all(map(alike, one.found, two.found)):
                        raise NotEager(one.function, "returns numbers that follow from values")
        for one, two in zip(first, other, strict=False):
            if not one.like(two):
                raise NotEager(one.function, "returns something else for other rows")
        if len(first) != len(other) or not first:
            raise NotEager(self.functions[-1], "is called as often as there are rows")
        runs = [first, other]
        for one in self.forms if forms else ():
            with contextlib.suppress(ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
                runs.append(self._in_form(one, rows[0], first))
        self.calls = [
            EagerCall([*map(emptied, each)], i, self.layers) for i, each in enumerate(zip(*runs, strict=True))
        ]

    def _in_form(self, form: Form, rows: int, first: Sequence[Seen]) -> list[Seen]:
        """Return the calls of a batch of another form, which are the ``first`` but for sizes; raise :class:`OpenSize`
        where they are not, and what forward raises for such sizes."""
        try:
            found = self._run(rows, 0, form)
        except NotEager as error:
            raise OpenSize(error.function, error.why) from error
        for one, other in zip(first, found, strict=False):
            if not one.like(other):
                raise OpenSize(one.function, "returns something else for other sizes")
        if len(found) != len(first):
            raise OpenSize(self.functions[-1], "is called as often as a size says")
        return found

    def _run(self, rows: int, values: int, form: Form | None = None) -> list[Seen]:
        self._seen = []
        with self._redirected(self._see):
            self.forward(rows, values, form=form)
        return self._seen

    @contextmanager
    def _redirected(self, call: Call) -> Iterator[None]:
        """Pass calls of the functions through ``call``; what stops one of them is raised also where forward has caught
        it, and gone another way."""
        self._stopped = None

        def noted(
            function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
        ) -> Any:  # fmt: skip
            try:
                return call(function, whole, args, kwargs)
            except NotEager as error:
                self._stopped = error
                raise

        with redirected(self.functions, noted):
            yield
        if self._stopped is not None:
            raise self._stopped

    def _see(
        self, function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        if self._inside:
            return whole(*args, **kwargs)
        self._inside = True
        try:
            seen, result = seen_call(function, whole, args, kwargs, self.parameters)
        finally:
            self._inside = False
        self._seen.append(seen)
        return result

    @contextmanager
    def passed_by(self, noting: Paused) -> Iterator[None]:
        """Let a layer, or what looks for draws, note nothing inside the calls."""

        def call(
            function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
        ) -> Any:  # fmt: skip
            before, noting.paused = noting.paused, True
            try:
                return whole(*args, **kwargs)
            finally:
                noting.paused = before

        with redirected(self.functions, call):
            yield

    @contextmanager
    def ops_of(self, functions: list[Any]) -> Iterator[None]:
        """Let calls be ops of a capture that has these ``functions``, meanwhile."""
        self.ops = functions
        try:
            yield
        finally:
            self.ops = None

    @contextmanager
    def telling(self, told: Told) -> Iterator[None]:
        """Let ``told`` hear of each call in a trial, meanwhile."""
        self.told = told
        try:
            yield
        finally:
            self.told = None

    @contextmanager
    def called(self) -> Iterator[None]:
        """Let calls of the functions be those ops, or in a trial their results without values, while forward runs."""
        at = iter(self.calls)

        def call(
            function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
        ) -> Any:  # fmt: skip
            given, spec = tree_flatten((tuple(args), kwargs))
            one = next(at, None)
            known = None if one is None else one.seen
            if one is None or known is None or known.function != function or known.given_spec != spec:
                raise NotEager(function, "is called in another way where there are no values")
            if len(known.given) > len(given):
                given += tensors_of(given)
            if len(known.given) != len(given) or not all(map(alike, known.given, given)):
                raise NotEager(function, "is given other numbers or objects where there are no values")
            tensors = [each for each in given if isinstance(each, Tensor)]
            if self.ops is None:
                results = one.shaped(tensors)
                if self.told is not None:
                    self.told(one, tensors, results)
                return one.rebuilt(results)
            one.check(tensors)
            self.ops.append(one)
            return one.rebuilt(OP(tensors, len(self.ops) - 1))

        with self._redirected(call):
            yield


__all__ = ["EagerCall", "EagerCalls", "MOST"]
