"""These are the modes under which a constructor runs: one records it, and one repeats it as recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import TorchDispatchMode, schema
from shardwise.initial.recording import (
    CPU,
    META,
    OVERWRITING,
    TRUNCATED_NORMAL,
    UNINITIALISED,
    ConstructorRecord,
    RecordedOperand,
    RecordedOperation,
    Unrecordable,
    aten,
    flat,
    is_random,
    mapped,
    packet,
    seedable,
    written,
)


class ConstructorRecorder(TorchDispatchMode):
    """Run every operation on meta tensors and append it to ``record``."""

    def __init__(self, record: ConstructorRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.refusal: Unrecordable | None = None
        self.busy = False  # inside our own code: see through the disguise, record nothing

    @contextmanager
    def own(self) -> Iterator[None]:
        """Run our own code in this context; a refusal is kept, should the constructor swallow the exception."""
        before, self.busy = self.busy, True
        try:
            yield
        except Unrecordable as refusal:
            self.refusal = refusal
            raise
        finally:
            self.busy = before

    def refuse(self, reason: str) -> None:
        """Raise, and remember, that recording is not possible."""
        with self.own():
            raise Unrecordable(reason)

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
        if any(argument.name == "device" for argument in schema(func).arguments):
            tensors = [value for value in flat((args, list(kwargs.values()))) if isinstance(value, Tensor)]
            if not tensors or kwargs.get("device") is not None:
                kwargs["device"] = CPU
        operands = mapped((args, kwargs), Tensor, record.operand)
        real = {}

        def stand_in(tensor: Tensor) -> Tensor:
            other = record.stand_in(tensor)
            real[id(other)] = tensor
            return other

        meta_args, meta_kwargs = mapped((args, kwargs), Tensor, stand_in)
        if "device" in meta_kwargs:
            meta_kwargs["device"] = META
        try:
            results = func(*meta_args, **meta_kwargs)
        except NotImplementedError:
            results = self._computed(func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self._append(func, operands, results)
        return mapped(results, Tensor, lambda tensor: real.get(id(tensor), tensor))

    def truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record :data:`TRUNCATED_NORMAL` as one operation."""
        with self.own():
            self._append(TRUNCATED_NORMAL, ((self.record.operand(tensor), *args), kwargs), ())
        return tensor

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the real results of an operation that has no meaning without values (``nonzero``)."""
        if written(func, args, kwargs) or is_random(func):
            raise Unrecordable(f"{func} needs the values of tensors")
        real_args, real_kwargs = mapped((args, kwargs), Tensor, self.record.evaluate)
        return mapped(func(*real_args, **real_kwargs), Tensor, self.record.stand_in)

    def _append(self, func: Any, operands: Any, results: Any) -> None:
        record = self.record
        args, kwargs = operands
        made = []
        for position, result in enumerate(flat(results)):
            if isinstance(result, Tensor) and record.number(result.untyped_storage()) is None:
                record.add(result.untyped_storage())
                made.append((position, record.operand(result)))
        changed = written(func, args, kwargs)
        if not (made or changed) or packet(func) in UNINITIALISED:
            return
        if is_random(func):
            if kwargs.pop("generator", None) is not None:
                raise Unrecordable("it draws from a generator of its own")
            if seedable(func) is None:
                raise Unrecordable(f"{func} takes no generator")
        read = [value for value in flat((args, list(kwargs.values()))) if isinstance(value, RecordedOperand)]
        if packet(func) in OVERWRITING and args[0].covers(record.nbytes[args[0].storage]):
            read = [operand for operand in read if operand is not args[0]]
        needs = sorted({record.last[operand.storage] for operand in read if operand.storage in record.last})
        operation = RecordedOperation(func, args, kwargs, tuple(made), tuple(needs), torch.get_default_dtype())
        record.append(operation, [operand.storage for operand in [o for _, o in made] + changed])


class Disguise(TorchFunctionMode):
    """Make meta tensors pass for tensors on the CPU, and show their values unless these are random."""

    def __init__(self, recorder: ConstructorRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        of: Any = Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            of.device.__get__: lambda tensor, *_: CPU,
            of.is_meta.__get__: lambda tensor, *_: False,
            of.is_cpu.__get__: lambda tensor, *_: True,
            of.data.__set__: self._set_data,
            of.data_ptr: self._address,
            of.tolist: lambda tensor: recorder.record.evaluate(tensor).tolist(),
            of.numpy: lambda tensor, **_: self._array(tensor, None),
            of.__array__: lambda tensor, dtype=None, **_: self._array(tensor, dtype),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.busy or func is torch.device:
            return func(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, str | torch.device) and str(value) == "meta":
                self._recorder.refuse("it puts tensors on the meta device itself")
        if func not in self._answers:
            return func(*args, **kwargs)
        with self._recorder.own():
            return self._answers[func](*args, **kwargs)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        tensor.data = self._recorder.record.stand_in(value)

    def _address(self, tensor: Tensor) -> int:
        operand = self._recorder.record.operand(tensor)
        return (operand.storage + 1 << 40) + operand.offset * operand.dtype.itemsize

    def _array(self, tensor: Tensor, dtype: Any) -> Any:
        array = self._recorder.record.evaluate(tensor).numpy()
        array = array if dtype is None else array.astype(dtype)
        array.flags.writeable = False  # what is written to it would be lost
        return array


class KeyedDraws(TorchDispatchMode):
    """Run a constructor for real, on the CPU, with the generators that a replay would use.

    ``draws`` lists the random functions of the record in order, each with the maker of its generator.
    """

    def __init__(self, draws: Iterable[tuple[Any, Callable[[], torch.Generator]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = iter(draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        if is_random(func) and kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            return self._draw(func, args, kwargs)
        results = func(*args, **kwargs)
        return results.zero_() if packet(func) in UNINITIALISED else results

    def truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draw :data:`TRUNCATED_NORMAL` as one operation."""
        kwargs.pop("generator", None)
        result: Tensor = self._draw(TRUNCATED_NORMAL, (tensor, *args), kwargs)
        return result

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recorded, make_generator = next(self._draws, (None, torch.Generator))
        if recorded is not func:
            raise ShardwiseError("the constructor's random draws are not the same each time")
        return seedable(func)(*args, **kwargs, generator=make_generator())


@contextmanager
def truncated_normals(draw: Callable[..., Tensor]) -> Iterator[None]:
    """Let ``draw`` draw the truncated normals of this thread."""
    before, thread = nn.init._no_grad_trunc_normal_, get_ident()

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return (draw if get_ident() == thread else before)(*args, **kwargs)

    nn.init._no_grad_trunc_normal_ = drawn
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = before
