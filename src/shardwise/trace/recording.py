"""A record of the operations of a constructor, that can be run again in part.

The record speaks of storages, not of tensors: an operand is a window on a storage, so that views, ``.data``
and tied weights need no care, and an operation depends on the last one that wrote to a storage it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# The documented way to see every operation, though its module's name has an underscore.
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.errors import ShardwiseError

CPU = torch.device("cpu")
META = torch.device("meta")

aten = torch.ops.aten

OVERWRITING = frozenset(
    getattr(aten, name)
    for name in (
        *("fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_"),
        *("log_normal_", "cauchy_", "geometric_", "random_"),
    )
)
"""In-place operations whose result does not depend on what the tensor held."""

UNINITIALISED = frozenset(
    (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
)
"""Operations that compute nothing.  What nobody writes to afterwards is zero here, equal on all ranks."""

LIKE = {aten.randn_like: aten.normal_, aten.rand_like: aten.uniform_}
"""Random operations that may lack a generator, with the in-place one that draws the same."""


class Unrecordable(ShardwiseError):
    """The constructor does what a record cannot repeat; the message says what."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A window on a storage: ``storage`` is its number in the record, ``offset`` is in elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def covers(self, nbytes: int) -> bool:
        """Whether it is all of a storage of ``nbytes``, each element once."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == nbytes


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded operation: a function of ATen and its arguments, tensors being operands.

    ``function`` is None for a constant, whose ``args`` is a real storage.  ``made`` lists the new storages as
    (position in the flat results, operand), ``needs`` the operations that last wrote to what this one reads.
    """

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, Operand], ...]
    needs: tuple[int, ...]
    default_dtype: torch.dtype

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return _is_random(self.function)


class Record:
    """The operations of a constructor so far, and the storages they speak of."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.last: dict[int, int] = {}  # storage -> the operation that wrote to it last
        self.nbytes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # an id stays unique only as long as its object lives
        self._stand_ins: dict[int, torch.UntypedStorage] = {}

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage, None where it is unknown."""
        return self._numbers.get(id(storage))

    def add(self, storage: torch.UntypedStorage) -> int:
        """Give a new storage its number."""
        self._numbers[id(storage)] = len(self.nbytes)
        self._kept.append(storage)
        self.nbytes.append(storage.nbytes())
        return len(self.nbytes) - 1

    def operand(self, tensor: Tensor) -> Operand:
        """``tensor`` as an operand; a real tensor met for the first time is a constant from now on."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise Unrecordable(f"it makes a tensor of layout {tensor.layout} or a lazy conjugate")
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise Unrecordable(f"it makes a tensor of class {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        number = self.number(storage)
        if number is None:
            number = self._constant(tensor, storage)
        elif storage.nbytes() != self.nbytes[number]:
            raise Unrecordable("it resizes the storage of a tensor")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Operand(number, tensor.dtype, shape, strides, int(tensor.storage_offset()))

    def stand_in(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself if it has no memory, else a tensor without memory in its place."""
        operand = self.operand(tensor)
        if tensor.device == META:
            return tensor
        return _window(self._stand_ins[operand.storage], operand, META)

    def append(self, operation: Operation, writes: Iterable[int]) -> None:
        """Add an operation that writes to these storages."""
        for storage in writes:
            self.last[storage] = len(self.operations)
        self.operations.append(operation)

    def slice(self, storage: int) -> list[int]:
        """The operations that the present value of a storage depends on, in order."""
        pending = [self.last[storage]] if storage in self.last else []
        found = set(pending)
        while pending:
            for needed in self.operations[pending.pop()].needs:
                if needed not in found:
                    found.add(needed)
                    pending.append(needed)
        return sorted(found)

    def evaluate(self, tensor: Tensor) -> Tensor:
        """The present value of a tensor; :class:`Unrecordable` if it is random."""
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
        operand = Operand(number, torch.uint8, (storage.nbytes(),), (1,), 0)
        made = ((0, operand),)
        self.append(Operation(None, storage, {}, made, (), torch.get_default_dtype()), (number,))
        return number


class Memory:
    """The real storages of a replay, by number; what nothing wrote to is zero."""

    def __init__(self, nbytes: list[int]) -> None:
        self._nbytes = nbytes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, operand: Operand) -> Tensor:
        """The window of ``operand``, on the CPU."""
        if operand.storage not in self._storages:
            zeros = torch.zeros(self._nbytes[operand.storage], dtype=torch.uint8)
            self._storages[operand.storage] = zeros.untyped_storage()
        return _window(self._storages[operand.storage], operand, CPU)

    def run(self, operation: Operation, generator: torch.Generator | None) -> None:
        """Run one operation; a random one draws from ``generator``."""
        if operation.function is None:
            self._storages[operation.made[0][1].storage] = operation.args.cpu().clone()
            return
        args, kwargs = _mapped((operation.args, dict(operation.kwargs)), Operand, self.tensor)
        with torch.no_grad(), _default_dtype(operation.default_dtype):
            if generator is None:
                results = operation.function(*args, **kwargs)
            else:
                results = _draw(operation.function, args, kwargs, generator)
        flat = _flat(results)
        for position, operand in operation.made:
            self._adopt(flat[position], operand)

    def _adopt(self, result: Tensor, operand: Operand) -> None:
        storage = result.untyped_storage()
        window = (storage.nbytes(), result.stride(), result.storage_offset())
        fits = window == (self._nbytes[operand.storage], operand.strides, operand.offset)
        if fits and all(storage is not other for other in self._storages.values()):
            self._storages[operand.storage] = storage
        else:
            # The kernel laid its result out otherwise than the record says (a factorisation by LAPACK).
            self.tensor(operand).copy_(result)


class Recorder(TorchDispatchMode):
    """Runs every operation on tensors without memory and appends it to ``record``."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.refusal: Unrecordable | None = None
        self.busy = False  # inside our own code: see through the disguise, record nothing

    @contextmanager
    def own(self) -> Iterator[None]:
        """Our own code; a refusal is kept, should the constructor swallow the exception."""
        before, self.busy = self.busy, True
        try:
            yield
        except Unrecordable as refusal:
            self.refusal = refusal
            raise
        finally:
            self.busy = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.busy:
            return func(*args, **kwargs)
        with self.own():
            if func is aten._local_scalar_dense.default:
                return self.record.evaluate(args[0]).item()
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        record = self.record
        kwargs.pop("pin_memory", None)
        if any(argument.name == "device" for argument in func._schema.arguments):
            tensors = [value for value in _flat((args, list(kwargs.values()))) if isinstance(value, Tensor)]
            if not tensors or kwargs.get("device") is not None:
                kwargs["device"] = CPU
        operands = _mapped((args, kwargs), Tensor, record.operand)
        real = {}

        def stand_in(tensor: Tensor) -> Tensor:
            other = record.stand_in(tensor)
            real[id(other)] = tensor
            return other

        meta_args, meta_kwargs = _mapped((args, kwargs), Tensor, stand_in)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = META
        try:
            results = func(*meta_args, **meta_kwargs)
        except NotImplementedError:
            results = self._computed(func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self._append(func, operands, results)
        return _mapped(results, Tensor, lambda tensor: real.get(id(tensor), tensor))

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results, for real, of an operation that has no meaning without values (``nonzero``)."""
        if _written(func, args, kwargs) or _is_random(func):
            raise Unrecordable(f"{func} needs the values of tensors")
        real_args, real_kwargs = _mapped((args, kwargs), Tensor, self.record.evaluate)
        return _mapped(func(*real_args, **real_kwargs), Tensor, self.record.stand_in)

    def _append(self, func: Any, operands: Any, results: Any) -> None:
        record = self.record
        args, kwargs = operands
        made = []
        for position, result in enumerate(_flat(results)):
            if isinstance(result, Tensor) and record.number(result.untyped_storage()) is None:
                record.add(result.untyped_storage())
                made.append((position, record.operand(result)))
        written = _written(func, args, kwargs)
        if not (made or written) or func.overloadpacket in UNINITIALISED:
            return
        if _is_random(func):
            if any(isinstance(value, torch.Generator) for value in _flat((args, list(kwargs.values())))):
                raise Unrecordable("it draws from a generator of its own")
            if func.overloadpacket not in LIKE and _seedable(func) is None:
                raise Unrecordable(f"{func} takes no generator")
        read = [value for value in _flat((args, list(kwargs.values()))) if isinstance(value, Operand)]
        if func.overloadpacket in OVERWRITING and args[0].covers(record.nbytes[args[0].storage]):
            others = [operand for operand in read if operand is not args[0]]
            if all(operand.storage != args[0].storage for operand in others):
                read = others
        needs = sorted({record.last[operand.storage] for operand in read if operand.storage in record.last})
        operation = Operation(func, args, kwargs, tuple(made), tuple(needs), torch.get_default_dtype())
        record.append(operation, [operand.storage for operand in [o for _, o in made] + written])


class Disguise(TorchFunctionMode):
    """Tensors without memory pass for tensors on the CPU, and show their values unless these are random."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._answers: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda tensor, *_: CPU,  # type: ignore[attr-defined]
            Tensor.is_meta.__get__: lambda tensor, *_: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda tensor, *_: True,  # type: ignore[attr-defined]
            Tensor.data.__set__: self._set_data,
            Tensor.data_ptr: self._address,
            Tensor.tolist: lambda tensor: recorder.record.evaluate(tensor).tolist(),
            Tensor.numpy: lambda tensor, **_: self._array(tensor),
            Tensor.__array__: lambda tensor, dtype=None, **_: self._array(tensor).astype(dtype),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = None if self._recorder.busy else self._answers.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        with self._recorder.own():
            return answer(*args, **(kwargs or {}))

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        tensor.data = self._recorder.record.stand_in(value)

    def _address(self, tensor: Tensor) -> int:
        operand = self._recorder.record.operand(tensor)
        return (operand.storage + 1 << 40) + operand.offset * operand.dtype.itemsize

    def _array(self, tensor: Tensor) -> Any:
        array = self._recorder.record.evaluate(tensor).numpy()
        array.flags.writeable = False  # what is written to it would be lost
        return array


class KeyedDraws(TorchDispatchMode):
    """Runs a constructor for real, on the CPU, with the generators that a replay would use.

    ``draws`` lists the random functions of the record in order, each with the maker of its generator.
    """

    def __init__(self, draws: Iterable[tuple[Any, Callable[[], torch.Generator]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        if _is_random(func):
            recorded, make_generator = next(self._draws, (None, torch.Generator))
            if recorded is not func:
                raise ShardwiseError("the constructor's random draws are not the same each time")
            return _draw(func, args, kwargs, make_generator())
        results = func(*args, **kwargs)
        return results.zero_() if func.overloadpacket in UNINITIALISED else results


def _is_random(func: Any) -> bool:
    return func is not None and torch.Tag.nondeterministic_seeded in func.tags


def _seedable(func: Any) -> Any:
    """The overload of a random function with the same arguments and a generator, None if there is none."""
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    for overload in overloads:
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    return None


def _draw(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """The results of a random function, drawn from ``generator``."""
    if func.overloadpacket in LIKE:
        return LIKE[func.overloadpacket](torch.empty_like(*args, **kwargs), generator=generator)
    return _seedable(func)(*args, **{**kwargs, "generator": generator})


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a function writes to, by its schema."""
    schema = func._schema.arguments
    named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return _flat([named[name] for name in written if named.get(name) is not None])


def _window(storage: torch.UntypedStorage, operand: Operand, device: torch.device) -> Tensor:
    empty = torch.empty(0, dtype=operand.dtype, device=device)
    return empty.set_(storage, operand.offset, operand.shape, operand.strides)


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` applied to every instance of ``kind`` in its tuples, lists and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, kind, function) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, function) for key, item in value.items()}
    return value


def _flat(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists."""
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
