"""Record the operations of a constructor, so that they can be run again in part.

The record refers to storages, not to tensors: an operand is a window on a storage, so that views, ``.data`` and tied
weights need no care, and an operation depends on the last one that wrote to a storage it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError
from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.dtypes import default_dtype
from shardwise.graph.torch_private import schema

CPU = torch.device("cpu")
META = torch.device("meta")

aten = torch.ops.aten

TRUNCATED_NORMAL: Any = nn.init._no_grad_trunc_normal_
"""This draws truncated normals in a loop that looks at values, so it is recorded as one operation."""

OVERWRITING = frozenset(
    (
        *(aten.fill_, aten.zero_, aten.copy_, aten.normal_, aten.uniform_, aten.bernoulli_),
        *(aten.exponential_, aten.log_normal_, aten.cauchy_, aten.geometric_, aten.random_),
        TRUNCATED_NORMAL,
    )
)
"""The results of these in-place operations do not depend on what the tensor held."""

UNINITIALISED = frozenset(getattr(aten, name) for name in named(Fact.UNWRITTEN))
"""These operations compute nothing.  What nobody writes to afterwards is zero here, equal on all ranks."""

LIKE = {aten.randn_like: aten.normal_, aten.rand_like: aten.uniform_}
"""These random operations may lack a generator; each maps to the in-place one that draws the same."""


class Unrecordable(ShardwiseError):
    """The constructor does what a record cannot repeat; the message says what."""


@dataclass(frozen=True, slots=True)
class RecordedOperand:
    """This is a window on a storage: ``storage`` is its number in the record, ``offset`` is in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def covers(self, nbytes: int) -> bool:
        """Return whether the window is all of a storage of ``nbytes``, with each element once."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == nbytes


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """This is one recorded operation: a function and its arguments, with operands in place of tensors.

    ``function`` is None for a constant, whose ``args`` is a real storage.  ``made`` lists the new storages as
    (position in the flat results, operand), ``needs`` the operations that last wrote to what this one reads.
    """

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, RecordedOperand], ...]
    needs: tuple[int, ...]
    default_dtype: torch.dtype

    @property
    def is_random(self) -> bool:
        """Return whether it draws random numbers."""
        return is_random(self.function)


class ConstructorRecord:
    """These are the operations of a constructor so far, and the storages that they use."""

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.last: dict[int, int] = {}  # storage -> the operation that wrote to it last
        self.nbytes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # an id stays unique only as long as its object lives
        self._stand_ins: dict[int, torch.UntypedStorage] = {}

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, None where it is unknown."""
        return self._numbers.get(id(storage))

    def add(self, storage: torch.UntypedStorage) -> int:
        """Give a new storage its number, and return that."""
        self._numbers[id(storage)] = len(self.nbytes)
        self._kept.append(storage)
        self.nbytes.append(storage.nbytes())
        return len(self.nbytes) - 1

    def operand(self, tensor: Tensor) -> RecordedOperand:
        """Return ``tensor`` as an operand; a real tensor met for the first time is a constant from now on."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise Unrecordable(f"it makes a tensor of class {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise Unrecordable(f"it makes a tensor of layout {tensor.layout} and dtype {tensor.dtype}")
        if tensor.is_conj() or tensor.is_neg():
            raise Unrecordable("it makes a conjugate that is not yet computed")
        storage = tensor.untyped_storage()
        number = self.number(storage)
        if number is None:
            number = self._constant(tensor, storage)
        elif storage.nbytes() != self.nbytes[number]:
            raise Unrecordable("it resizes the storage of a tensor")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return RecordedOperand(number, tensor.dtype, shape, strides, int(tensor.storage_offset()))

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` itself if it is on meta, else a meta tensor in its place."""
        operand = self.operand(tensor)
        if tensor.device == META:
            return tensor
        return _window(self._stand_ins[operand.storage], operand, META)

    def append(self, operation: RecordedOperation, writes: Iterable[int]) -> None:
        """Add an operation that writes to these storages."""
        for storage in writes:
            self.last[storage] = len(self.operations)
        self.operations.append(operation)

    def slice(self, storage: int) -> list[int]:
        """Return the operations that the present value of a storage depends on, in order."""
        pending = [self.last[storage]] if storage in self.last else []
        found = set(pending)
        while pending:
            for needed in self.operations[pending.pop()].needs:
                if needed not in found:
                    found.add(needed)
                    pending.append(needed)
        return sorted(found)

    def evaluate(self, tensor: Tensor) -> Tensor:
        """Return the present value of a tensor; raises :class:`Unrecordable` if it is random."""
        operand = self.operand(tensor)
        indices = self.slice(operand.storage)
        if any(self.operations[index].is_random for index in indices):
            raise Unrecordable("it reads the value of a random tensor")
        memory = Memory(self.nbytes)
        for index in indices:
            memory.run(self.operations[index], None)
        return memory.tensor(operand)

    def _constant(self, tensor: Tensor, storage: torch.UntypedStorage) -> int:
        if tensor.device == META:
            raise Unrecordable("it uses a tensor without values that was made unseen (in another thread?)")
        number = self.add(storage)
        bare = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        self._stand_ins[number] = bare
        self._numbers[id(bare)] = number
        operand = RecordedOperand(number, torch.uint8, (storage.nbytes(),), (1,), 0)
        made = ((0, operand),)
        self.append(RecordedOperation(None, storage, {}, made, (), torch.get_default_dtype()), (number,))
        return number


class Memory:
    """These are the real storages of a replay, by number; what nothing wrote to is zero."""

    def __init__(self, nbytes: list[int]) -> None:
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, operand: RecordedOperand) -> Tensor:
        """Return the window of ``operand``, on the CPU."""
        if operand.storage not in self._storages:
            zeros = torch.zeros(self._nbytes[operand.storage], dtype=torch.uint8, device=CPU)
            self._storages[operand.storage] = zeros.untyped_storage()
        return _window(self._storages[operand.storage], operand, CPU)

    def run(self, operation: RecordedOperation, generator: torch.Generator | None) -> None:
        """Run one operation; a random one draws from ``generator``."""
        if operation.function is None:
            self._storages[operation.made[0][1].storage] = operation.args.cpu().clone()
            return
        args, kwargs = mapped((operation.args, dict(operation.kwargs)), RecordedOperand, self.tensor)
        with torch.no_grad(), default_dtype(operation.default_dtype):
            if generator is None:
                results = operation.function(*args, **kwargs)
            else:
                results = seedable(operation.function)(*args, **kwargs, generator=generator)
        leaves = flat(results)
        for position, operand in operation.made:
            self._adopt(leaves[position], operand)

    def _adopt(self, result: Tensor, operand: RecordedOperand) -> None:
        storage = result.untyped_storage()
        window = (storage.nbytes(), result.stride(), result.storage_offset())
        fits = window == (self._nbytes[operand.storage], operand.strides, operand.offset)
        if fits and all(storage is not other for other in self._storages.values()):
            self._storages[operand.storage] = storage
        else:
            # The kernel laid its result out otherwise than the record says (a factorisation by LAPACK).
            self.tensor(operand).copy_(result)


def packet(func: Any) -> Any:
    """Return the ATen function that ``func`` is an overload of."""
    return getattr(func, "overloadpacket", func)


def is_random(func: Any) -> bool:
    """Return whether a function draws random numbers."""
    return func is TRUNCATED_NORMAL or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def seedable(func: Any) -> Any:
    """Return a function that draws as ``func`` does and takes a ``generator``; None if there is none."""
    if func is TRUNCATED_NORMAL:
        return func
    if packet(func) in LIKE:
        in_place = LIKE[packet(func)]
        return lambda *args, generator, **kwargs: in_place(torch.empty_like(*args, **kwargs), generator=generator)
    overloads = [func, *(getattr(packet(func), name) for name in packet(func).overloads())]
    wanted = [argument.name for argument in schema(func).arguments if argument.name != "generator"]
    for overload in overloads:
        names = [argument.name for argument in schema(overload).arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    return None


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a function writes to, by its schema."""
    if func is TRUNCATED_NORMAL:
        return [args[0]]
    declared = schema(func).arguments
    named = {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(kwargs)
    written = [a.name for a in declared if a.alias_info is not None and a.alias_info.is_write]
    return flat([named[name] for name in written if named.get(name) is not None])


def _window(storage: torch.UntypedStorage, operand: RecordedOperand, device: torch.device) -> Tensor:
    empty = torch.empty(0, dtype=operand.dtype, device=device)
    return empty.set_(storage, operand.offset, operand.shape, operand.strides)


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``function`` applied to every instance of ``kind`` in its tuples, lists and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, kind, function) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, function) for key, item in value.items()}
    return value


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested tuples and lists."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value]
