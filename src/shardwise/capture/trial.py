"""Whether what a forward computes depends on what it keeps in Python, found by running it a few times.

The runs need no values: each tensor is named by how it was computed (the op, the names of its operands, numbers), so
equal names are equal values. A forward is independent of what it keeps if its loss and its buffers have the same names
in each run. Tensors that an earlier run has left behind count as that run's, unless they follow from constants alone
(a table that is made when it is first needed). Where forward draws numbers from Python's or numpy's generators, two
more runs draw the smallest and the largest of them.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.capture.alike import Alike
from shardwise.capture.eager_calls import EagerCall, EagerCalls
from shardwise.capture.running import users_line
from shardwise.capture.state import generators_kept
from shardwise.core.structure import like
from shardwise.graph.torch_private import (
    SYMBOLIC,
    TorchDispatchMode,
    exporting,
    fake_device,
    fake_mode,
    renamed,
    schema,
    storage_key,
    without_modes,
    without_values,
)

RUNS, RUNS_UNSEEN = 3, 2  # the second where no change was seen, as in most models
SYMBOL = re.compile(r"\b[a-z]+\d+\b")  # a size that depends on data
DEVICE = torch.ops.prim.device.default
WORDS, EXTREME = 624, 64  # the words of a Mersenne twister's state, and how many of them give an extreme number


class Found(NamedTuple):
    """What a run has computed: the names of results, and of all operations in order, with the user's lines."""

    results: Mapping[str, str]
    operations: Sequence[tuple[str, str]]


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names each tensor that is computed, in a ``mode`` without values, from these ``values``; see the module."""

    def __init__(self, values: Mapping[str, Tensor], mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = Alike(mode)
        self._known = {storage_key(one): name for name, one in values.items()}
        self._names: dict[int, str] = {}
        self._constant: set[int] = set()
        self._held: list[Any] = []  # a key stays unique only as long as its storage lives
        self._symbols: dict[str, str] = {}
        self._draws = 0
        self.operations: list[tuple[str, str]] = []

    def begin(self) -> None:
        """Begin a run: what earlier runs have left behind is theirs, but for what follows from constants alone."""
        kept = {at: name if at in self._constant else _digest("kept", name) for at, name in self._names.items()}
        self._names = kept | self._known
        self._draws, self.operations = 0, []

    def name(self, value: Any) -> str:
        """Return the name of a tensor, or of any other argument."""
        if isinstance(value, Tensor):
            at = storage_key(value)
            if at not in self._names:  # a constant that was made where no op was seen
                self._names[at] = _digest("constant", _content(value))
                self._constant.add(at)
                self._held.append(value)
            learns = value.requires_grad, value.is_leaf  # a leaf with the memory of another tensor cuts its gradient
            geometry = (value.dtype, *learns, *value.shape, *value.stride(), value.storage_offset())
            return _digest(self._names[at], *map(self._plain, geometry))
        return self._plain(value)

    def _plain(self, value: Any) -> str:
        if isinstance(value, SYMBOLIC):
            return renamed(value, self._symbols)
        return repr(value)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:  # more than half of all calls, and nothing is computed
            return fake_device(args[0]) or func(*args)
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        written = [one for one in _written(func, args, kwargs) if isinstance(one, Tensor)]
        key = [str(func), str(torch.is_grad_enabled()), *map(self.name, leaves)]
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            key.append(str(self._draws))
            self._draws += 1
        constant = all(storage_key(one) in self._constant for one in tensors) and len(key) == 2 + len(leaves)
        found = self._run(func, args, kwargs, tensors)
        whole = _digest(*key)
        self.operations.append((whole, users_line()))
        self._results(found, tensors, whole, constant)
        for number, one in enumerate(written):
            self._set(one, _digest(whole, "written", number), constant)
        return found

    def called(self, call: EagerCall, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Name what a call that runs as written returns, by all that it is given."""
        whole = _digest(call.form(), torch.is_grad_enabled(), *map(self.name, given))
        self.operations.append((whole, users_line()))
        for number, one in enumerate(results):
            self._set(one, _digest(whole, number), False)

    def _results(self, found: Any, tensors: Sequence[Tensor], whole: str, constant: bool) -> None:
        shared = {storage_key(one) for one in tensors}
        for number, one in enumerate(tree_leaves(found)):
            if isinstance(one, SYMBOLIC):
                self._symbol(one, whole, number)
            elif isinstance(one, Tensor):
                for dim, size in enumerate(one.shape):
                    if isinstance(size, torch.SymInt):
                        self._symbol(size, whole, number, dim)
                if storage_key(one) not in shared:
                    self._set(one, _digest(whole, number), constant)

    def _symbol(self, value: Any, *place: Any) -> None:
        for index, name in enumerate(SYMBOL.findall(str(value))):
            self._symbols.setdefault(name, _digest(*place, index))

    def _set(self, value: Tensor, name: str, constant: bool) -> None:
        at = storage_key(value)
        self._names[at] = name
        self._held.append(value)
        (self._constant.add if constant else self._constant.discard)(at)


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _content(value: Tensor) -> str:
    if value.is_meta or type(value) is not Tensor and type(value) is not nn.Parameter:
        return f"without values {id(value)}"
    with without_modes():
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    known = schema(func)
    for number, argument in enumerate(known.arguments if known is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else None
            yield from tree_leaves(kwargs.get(argument.name, given))


def runs(
    forward: Callable[[Mapping[str, Tensor]], Tensor], module: nn.Module, fields: Mapping[str, Tensor], drawing: bool,
    number: int, settled: Callable[[], bool] = bool, calls: EagerCalls | None = None,
) -> list[Found]:  # fmt: skip
    """Run ``forward`` of ``fields`` ``number`` times, or until all is ``settled`` after a run that is not the first;
    with ``drawing`` also where generators give extreme numbers.  It makes ``calls`` that run as written.  In
    all of them a read of the values of ``fields`` raises an error."""
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with fake_mode() as mode:
        fields = like({key: without_values(mode, one) for key, one in fields.items()}, fields)
        names = Names(values | {f"field {key}": one for key, one in fields.items()}, mode)
        found = list[Found]()
        with nullcontext() if calls is None else calls.telling(names.called):
            while len(found) < number and not (settled() and len(found) > 1):
                found.append(_one(names, forward, module, fields))
            for word in (0, 0xFFFFFFFF) if drawing else ():
                with _generators_give(word):
                    found.append(_one(names, forward, module, fields))
    return found


def _one(
    names: Names, forward: Callable[[Mapping[str, Tensor]], Tensor], module: nn.Module, fields: Mapping[str, Tensor]
) -> Found:
    names.begin()
    with names, exporting(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the capture has passed them on
        loss = forward(fields)
    results = {"the loss": _digest(*map(names.name, tree_leaves(loss)))}
    for name, one in module.named_buffers():
        results[f"the buffer {name}"] = names.name(one)
    return Found(results, names.operations)


def apart(found: Sequence[Found]) -> str | None:
    """Return in which line of the user's code runs first differ ("" if no line is known); None if they are the same."""
    first = found[0]
    for other in found[1:]:
        if other.results != first.results:
            for one, two in zip(first.operations, other.operations, strict=False):
                if one[0] != two[0]:
                    return two[1] or one[1]
            return ""
    return None


@contextmanager
def _generators_give(word: int) -> Iterator[None]:
    """Let the generators of Python and numpy give ``word`` several times, then other numbers.

    Otherwise a draw by rejection would never end. A Mersenne twister gives a word of its state through a bijection."""
    rest = random.Random(0)
    words = [_inverse(word)] * EXTREME + [rest.getrandbits(32) for _ in range(WORDS - EXTREME)]
    with generators_kept():
        random.setstate((3, (*words, 0), None))
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0))
        yield


def _inverse(word: int) -> int:
    """Return the word of a state for which a Mersenne twister gives ``word`` (Matsumoto and Nishimura 1998, 2.1)."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(5):
        found = word ^ ((found << 7) & 0x9D2C5680)
    word = found
    for _ in range(3):
        found = word ^ (found >> 11)
    return found & 0xFFFFFFFF
