"""What a call of a function shows in a forward with values: what it is given and returns, and whether it can be an op.

A call can be an op of a graph if it keeps to its arguments, and if it returns the same each time.  It is made twice,
and then once for each truth value that it reads, with the other answer: what it does where a branch goes the other way
has to be as good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from shardwise.capture.assumed import BRANCHES, NUMBERS, SINGLE, Noting
from shardwise.capture.functions import PLAIN
from shardwise.capture.intercept import Intercept, Layer, Proceed
from shardwise.capture.keyed_calls import RefuseRandom
from shardwise.capture.parts import Part, part_of
from shardwise.capture.snapshot import Itself, Look, Parts, difference
from shardwise.capture.state import generators, generators_kept
from shardwise.capture.tensor_facts import FACTS
from shardwise.core.errors import ConfigError
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import TorchDispatchMode, storage_key, version, without_modes
from shardwise.initial.copies import copied

READS = "reads tensors that are not among its arguments"
LOOKS = BRANCHES | NUMBERS | {
    Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.cpu,
}  # fmt: skip
"""The functions of torch after which Python may know values."""
MOST_LOOKS = 5000  # in all forwards before the first step
ANSWERS = 16  # the most truth values that a call reads and of which the other answer is tried


class NotEager(Uncapturable):
    """``function`` cannot be an op of a graph."""

    def __init__(self, function: FunctionType, why: str) -> None:
        super().__init__(f"{function.__qualname__} {why}")
        self.function, self.why = function, why


class OpenSize(NotEager):
    """``function`` can be one for the sizes of a batch, but not for any."""


class Seen(NamedTuple):
    """A call in a forward with values: its arguments and its results, flat, with their structure.

    After the arguments come the tensors of modules among them, if the function computes with these."""

    function: FunctionType
    given: tuple[Any, ...]
    given_spec: TreeSpec
    found: tuple[Any, ...]
    found_spec: TreeSpec
    gradients: bool  # whether autograd was on
    shares: bool  # whether results have memory of arguments, or of each other
    by_test: bool = False  # whether its first argument, a truth value, is all that it reads
    draws: bool = False  # whether it draws from a generator of Python or numpy
    facts: frozenset[int] = frozenset()  # the tensors that it takes, by number, of which it asks facts alone

    def like(self, other: Seen) -> bool:
        """Whether another forward, of other rows, has made the same call, but for sizes."""
        same = self.function is other.function and (self.gradients, self.draws) == (other.gradients, other.draws)
        same = same and self.given_spec == other.given_spec and self.found_spec == other.found_spec
        pairs = [*zip(self.given, other.given, strict=False), *zip(self.found, other.found, strict=False)]
        return same and all(alike(a, b) for a, b in pairs)


def sizes(seen: Seen) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a call has returned."""
    return [tuple(one.shape) for one in seen.found if isinstance(one, Tensor)]


def alike(one: Any, other: Any) -> bool:
    """Whether two arguments or results of calls are the same but for values and sizes of tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.dim() == other.dim()
    if isinstance(one, PLAIN):
        return type(one) is type(other) and (one == other or one != one)
    return type(one) is type(other)


class Held(NamedTuple):
    """What a call is given in a step, as it was before: ``leaves`` and their structure, versions and copies of tensors,
    looks into objects, and the generators that are not torch's, which each rank has for itself."""

    args: Any
    leaves: list[Any]
    spec: TreeSpec
    tensors: Sequence[Tensor]
    versions: list[int]
    contents: list[Tensor]
    objects: list[Any]
    looks: list[Any]
    generators: dict[str, Any]

    @staticmethod
    def of(args: Any, kwargs: Any, tensors: Sequence[Tensor], contents: bool) -> Held:
        """Look at the arguments of a call, and at ``contents`` of tensors: writes through .data leave no version."""
        with without_modes():  # it is not the call that reads these
            leaves, spec = tree_flatten((args, kwargs))
            objects = [one for one in leaves if not isinstance(one, (Tensor, *PLAIN))]
            copies = [one.detach().clone() for one in tensors] if contents else []
            versions, own = [version(one) for one in tensors], {id(one) for one in tensors}
            looks = [Look(own)(one) for one in objects]
        return Held((args, kwargs), leaves, spec, tensors, versions, copies, objects, looks, generators())

    def drawn(self) -> bool:
        """Whether somebody has drawn from the generators since, in this thread or in another one."""
        return generators() != self.generators

    def changed(self) -> bool:
        """Whether something of it is no longer as it was."""
        with without_modes():
            leaves, spec = tree_flatten(self.args)
            if spec != self.spec or not all(a is b for a, b in zip(self.leaves, leaves, strict=True)):
                return True
            own = {id(one) for one in self.tensors}
            if any(difference(a, Look(own)(b)) is not None for a, b in zip(self.looks, self.objects, strict=True)):
                return True
            same = [version(one) for one in self.tensors] == self.versions
            return not same or not all(map(equal, self.tensors, self.contents))


class _Reading:
    """A layer that notes whether ``more`` is read of tensors than whether ``test`` is true."""

    def __init__(self, test: Any, function: FunctionType) -> None:
        self.test, self.function, self.more, self.looks = test, function, False, 0
        self.used: set[int] = set()  # the tensors that more is asked of than facts

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func not in FACTS:
            self.used.update(id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        looks = func in LOOKS
        self.more |= looks and not (func in SINGLE and args[0] is self.test)
        self.looks += looks
        if self.looks > MOST_LOOKS and part_of(self.function) is not None:  # a loop that other values do not end
            raise NotEager(self.function, f"reads more than {MOST_LOOKS} values")
        return proceed(func, args, kwargs)


class _Call:
    """A call that may be made several times, of ``whole``, which does what a function did."""

    def __init__(
        self, function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.function, self.whole, self.args, self.kwargs = function, whole, args, kwargs
        self.given, self.spec = tree_flatten((tuple(args), kwargs))
        self.own = tensors_of(self.given)
        self.tensors = [*(one for one in self.given if isinstance(one, Tensor)), *self.own]
        self.beside = _Beside(function, [one for one in self.given if not isinstance(one, (Tensor, *PLAIN))])
        self._versions = [version(one) for one in self.tensors]
        self._contents = [one.detach().clone() for one in self.tensors]
        self.reading = _Reading(self.given[0] if self.given else None, function)
        self._drawn, self.draws = generators(), False
        self.shares = False  # whether results have had memory of what was given, or of each other

    def made(self, *layers: Layer) -> Any:
        """Return what the function returns, under ``layers``, with the numbers of Python and numpy that it would draw
        first; raise :class:`NotEager` where it draws from torch's generator, or changes what it is given."""
        try:
            with generators_kept(), RefuseRandom(), self.beside, Intercept(*layers, self.reading):
                result = self.whole(*self.args, **self.kwargs)
                self.draws |= generators() != self._drawn
        except ConfigError as error:
            raise NotEager(self.function, "draws random numbers") from error
        after, spec = tree_flatten((tuple(self.args), self.kwargs))
        same = spec == self.spec and all(a is b for a, b in zip(self.given, after, strict=True))
        same = same and not self.beside.changed() and [version(one) for one in self.tensors] == self._versions
        if not same or not all(map(equal, self.tensors, self._contents)):  # through .data it leaves no version
            raise NotEager(self.function, "changes what it is given")
        self.shares |= share([one for one in tree_leaves(result) if isinstance(one, Tensor)], self.tensors)
        return result

    def try_other_ways(self, found: list[Any], spec: TreeSpec) -> bool:
        """Raise :class:`NotEager` where the function returns something else than it has ``found`` when a truth value
        that it reads is the other one; where it raises then, it would on one device.  Return whether it reads some.

        What has a gradient in one of these ways has one in ``found``, too."""
        noting = Noting()
        self.made(noting)
        for number in range(min(len(noting.checks), ANSWERS)):
            try:
                other, other_spec = tree_flatten(self.made(Noting(number)))
            except (NotEager, KeyboardInterrupt):
                raise
            except BaseException:  # the user's code may raise anything, and end the process
                continue
            if spec != other_spec or not all(map(_same_form, found, other)):
                raise NotEager(self.function, "returns something else where a branch goes the other way")
            for at, (one, way) in enumerate(zip(found, other, strict=True)):
                if isinstance(one, Tensor) and way.requires_grad and not one.requires_grad:
                    found[at] = one.detach().clone().requires_grad_()
        return bool(noting.checks)


def seen_call(
    function: FunctionType, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], parameters: int
) -> tuple[Seen, Any]:  # fmt: skip
    """Make a call in a forward of a model with so many ``parameters``; return what is seen of it and what it returned.

    Raises :class:`NotEager` where it cannot be an op."""
    part, call = part_of(function), _Call(function, whole, args, kwargs)
    result = call.made()
    found, spec = tree_flatten(result)
    again, again_spec = tree_flatten(call.made())
    if spec != again_spec or not all(map(equal, found, again)):
        raise NotEager(function, "returns something else each time")
    for one in found:
        if not isinstance(one, (Tensor, *PLAIN)):
            raise NotEager(function, f"returns an object of {type(one).__name__}, which no graph can hold")
    if part is not None:
        if part.written and (call.shares or _shared(part, args)):
            raise NotEager(function, "writes to a tensor whose memory it uses in another way, too")
        if not found:
            raise NotEager(function, "sets nothing")
        if not part.ends and not all(isinstance(one, Tensor) for one in found):
            raise NotEager(function, "sets what is no tensor")  # and may be something else for other values
        decides = call.try_other_ways(found, spec) and part.innermost
        if 2 * sum(one.numel() for one in call.tensors if isinstance(one, nn.Parameter)) > parameters and not decides:
            raise NotEager(function, "computes with most of the parameters, so that one unit does it as well")
    learns = any(isinstance(one, Tensor) and one.requires_grad for one in found)
    if call.beside.reads and learns and part is None:
        raise NotEager(function, READS)
    if call.draws and (learns or call.beside.reads):
        raise NotEager(function, "draws numbers from Python or numpy, and computes with parameters")
    own = call.own if call.beside.reads or part is not None else []
    by_test = part is not None and part.alone and isinstance(call.given[0], Tensor) and not call.reading.more
    gradients = torch.is_grad_enabled()
    tensors = [one for one in (*call.given, *own) if isinstance(one, Tensor)]
    facts = frozenset(i for i, one in enumerate(tensors) if id(one) not in call.reading.used)
    flags = (gradients, call.shares, by_test, call.draws, facts)
    seen = Seen(function, (*call.given, *own), call.spec, tuple(found), spec, *flags)
    return seen, result


def _shared(part: Part, args: Sequence[Any]) -> bool:
    """Whether a tensor to which a part writes has memory of something else that the part is given."""
    memory = Counter(storage_key(one) for one in _tensors(args))
    own = dict(zip(part.taken, args[part.tested :], strict=True))
    return any(memory[storage_key(one)] > 1 for name in part.written if isinstance(one := own[name], Tensor))


def _tensors(objects: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among objects, and those of modules among them."""
    leaves = tree_leaves(objects)
    return [*(one for one in leaves if isinstance(one, Tensor)), *tensors_of(leaves)]


class _Beside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a function has beside tensors: the ``objects`` among its arguments, and what it closes over.

    ``reads`` says whether it computes with the parameters or buffers of modules among its arguments."""

    def __init__(self, function: FunctionType, objects: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.function = function
        closed = [cell.cell_contents for name, cell in cells if name != "__class__"]
        self.objects, self.reads = [*objects, *closed], False
        self.own = {id(one) for one in tensors_of(self.objects)}
        self.memory, self.closed = ({storage_key(one) for one in tensors_of(every)} for every in (self.objects, closed))
        self.before = self._looks()

    def _looks(self) -> list[Any]:
        found = [Look(self.own)(one) for one in self.objects]
        if any(map(_holds_tensors, found)):
            raise NotEager(self.function, READS)
        return found

    def changed(self) -> bool:
        """Whether an object is no longer what it was."""
        return any(difference(*pair) is not None for pair in zip(self.before, self._looks(), strict=True))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = {storage_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        if read & self.closed:
            raise NotEager(self.function, READS)
        self.reads |= bool(read & self.memory)
        return func(*args, **(kwargs or {}))


def share(results: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether results have memory of what was given, or of each other."""
    taken = {storage_key(one) for one in given}
    own = [storage_key(one) for one in {id(one): one for one in results}.values()]
    return len({*own}) < len(results) or not taken.isdisjoint(own)


def tensors_of(objects: Sequence[Any]) -> list[Tensor]:
    """Return the parameters and buffers of the modules among ``objects``, each once."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    return list({id(t): t for one in modules for t in (*one.parameters(), *one.buffers())}.values())


def emptied(seen: Seen) -> Seen:
    """Return a call whose tensors have no values, nor the parameters and buffers of its modules: another branch of the
    function that computes with these stops."""
    memo = {id(one): _without_values(one) for one in tensors_of(seen.given)}  # those that are tied stay so
    given, found = ([_without_values(one) for one in each] for each in (seen.given, seen.found))
    given = [copied(one, memo) if isinstance(one, nn.Module) else one for one in given]
    return seen._replace(given=tuple(given), found=tuple(found))


def _without_values(one: Any) -> Any:
    return torch.empty_like(one, device="meta").requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one


def _same_form(one: Any, other: Any) -> bool:
    """Whether what else a call returns can stand where it has returned ``one``."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype
    return alike(one, other)


def equal(one: Any, other: Any) -> bool:
    """Whether two arguments or results of calls have the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    return alike(one, other)


def _holds_tensors(look: Any) -> bool:
    if isinstance(look, Parts):
        return any(map(_holds_tensors, look.items.values()))
    return isinstance(look, Itself) and isinstance(look.value, Tensor)


__all__ = [
    "READS",
    "Held",
    "NotEager",
    "OpenSize",
    "Seen",
    "alike",
    "emptied",
    "equal",
    "seen_call",
    "share",
    "sizes",
    "tensors_of",
]
