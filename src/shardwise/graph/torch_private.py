"""This is the one place that touches what torch does not promise to keep; other modules import it from here."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "GRAD_MODE", "RESIZES", "VMAP_CLOSES", "VMAP_LOADS", "VMAP_OPENS",
    "Assumed", "BatchNormBase", "HigherOrderOperator", "OpOverload", "Symbols", "TorchDispatchMode",
    "assumed", "exporting", "exports_modules_unhooked", "fake_device", "fake_mode", "fresh", "function_calls",
    "has_backward_hooks", "has_storage", "hooks_of", "import_export", "numbers_watched",
    "inside_vmap", "is_composite", "memory_uses", "module_hooks", "note_step", "overload_name",
    "schema", "step_hooks",
    "storage_key", "traced_below", "version", "without_modes", "without_torch_functions",
]  # fmt: skip

# The function by which gradients are switched on and off, as a TorchFunctionMode sees it.
GRAD_MODE = torch._C._set_grad_enabled

# What export records where torch.vmap begins and ends, and before: that is nothing but an import.
VMAP_OPENS, VMAP_CLOSES = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
VMAP_LOADS = predispatch.lazy_load_decompositions


def schema(op: Any) -> Any:
    """Return the schema of an ATen or custom op: its name, arguments and what it writes; None for anything else."""
    return getattr(op, "_schema", None)


def overload_name(op: Any) -> str:
    """Return which of the ops of one name it is: ``Tensor``, ``Scalar``, …"""
    return str(op._overloadname)


def is_composite(op: OpOverload) -> bool:
    """Return whether an op is written in terms of others, with their derivatives."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))  # type: ignore[no-untyped-call]


def storage_key(x: Tensor) -> int:
    """Return a key that is the same for tensors that share memory."""
    return int(x.untyped_storage()._cdata)


def has_storage(x: Tensor) -> bool:
    """Whether a tensor has memory of its own: a sparse one, or one inside ``torch.func``, has none that can be seen."""
    try:
        x.untyped_storage()
    except NotImplementedError:
        return False
    return True


def memory_uses(x: Tensor) -> int:
    """Return how many tensors have the memory of ``x``, which is one of them."""
    own = x.untyped_storage()
    return int(torch._C._storage_Use_Count(own._cdata)) - 1  # without ``own``


def traced_below(function: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Return the graph of the ops that ``function`` runs below autograd and transforms such as vmap, from tensors of
    one :func:`fake_mode` and sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next((one.fake_mode for one in given if hasattr(one, "fake_mode")), None)
    with mode or nullcontext():
        return make_fx(function)(*given).graph


def inside_vmap() -> bool:
    """Whether what runs now is mapped over a dim that it does not see."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def version(x: Tensor) -> int:
    """Return how often a tensor has been written in place; 0 for one of inference mode, of which nobody counts that."""
    if torch.Tensor.is_inference(x):
        return 0
    return int(torch.Tensor._version.__get__(x))  # type: ignore[attr-defined]


def hooks_of(parameter: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the hooks of a leaf: on its gradient, and on itself after its gradient has been accumulated."""
    found = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return tuple((found[0] or {}).values()), tuple((found[1] or {}).values())


def step_hooks(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of hooks on the step of an optimizer."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def fake_mode() -> Any:
    """Return a mode in which ops make tensors without values; what depends on values becomes a symbol."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy, which a trial alone needs

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def without_values(mode: Any, x: Tensor) -> Tensor:
    """Return a tensor like ``x`` of a :func:`fake_mode`, which nothing can read values of."""
    return mode.from_tensor(x, static_shapes=True)  # type: ignore[no-any-return]


def fake_device(x: Tensor) -> torch.device | None:
    """Return the device that a tensor without values stands for, which ``x.device`` would have to ask its mode for;
    None where it has values, or its mode knows them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return x.fake_device if isinstance(x, FakeTensor) and x.constant is None else None


def fresh(mode: Any, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a :func:`fake_mode` that shares memory with no other; an op would take longer to make it."""
    from torch._subclasses.fake_tensor import FakeTensor

    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


class Assumed(NamedTuple):
    """What a capture assumed of its symbols: ``facts`` that hold, and the range of each."""

    facts: tuple[Any, ...] = ()
    ranges: Mapping[Any, tuple[int | None, int | None]] = MappingProxyType({})


def assumed(value: Tensor) -> Assumed:
    """Return what the capture that ``value`` belongs to assumed."""
    mode = getattr(value, "fake_mode", None)
    env = None if mode is None else mode.shape_env
    if env is None:
        return Assumed()
    facts = [guard.expr for guard in env.guards]
    facts += [one.expr for each in env.deferred_runtime_asserts.values() for one in each]
    ranges = {one: (_bound(each.lower), _bound(each.upper)) for one, each in env.var_to_range.items()}
    return Assumed(tuple(dict.fromkeys(map(env.replace, facts))), ranges)


def _bound(value: Any) -> int | None:
    return int(value) if value.is_Integer else None


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_KINDS = dict(zip(SYMBOLIC, (int, float, bool), strict=True))  # of plain numbers


def known_number(value: Any) -> int | float | bool | None:
    """Return a symbolic number of a capture as a plain one, where the capture knows it; else None."""
    kind = _KINDS.get(type(value))
    if kind is None or (expression := value.node.expr).free_symbols:
        return None
    found: int | float | bool = kind(expression)
    return found


class Symbols:
    """Numbers in place of some symbols of a capture, beside that of the number of ``rows``; ``mode`` is the one that
    the values of the capture belong to."""

    def __init__(self, numbers: Mapping[Any, Any], rows: Any, mode: Any) -> None:
        self._numbers, self.mode, self._env = dict(numbers), mode, mode.shape_env
        self._hints = {rows.node.expr: _sympy().Integer(rows.node.hint)} if isinstance(rows, torch.SymInt) else {}

    @classmethod
    def solved(cls, pairs: Sequence[tuple[Any, int]], rows: Any, value: Tensor, known: Assumed) -> Symbols | None:
        """Return the numbers with which each size of a captured field is what it is paired with; None where there are
        none, or where what the capture assumed does not hold for them.  ``value`` is one of the capture."""
        numbers = {
            size.node.expr: _sympy().Integer(number) for size, number in pairs
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
        }  # fmt: skip
        mode = getattr(value, "fake_mode", None)
        if mode is None or mode.shape_env is None:
            return None
        found = cls(numbers, rows, mode)
        fits = all(found.of(size) == number for size, number in pairs)
        return found if fits and found._admitted(known) else None

    def _admitted(self, known: Assumed) -> bool:
        """Whether the numbers are in the ranges of their symbols, and what was assumed of them holds for any rows."""
        own = set(self._numbers)
        for one, number in self._numbers.items():
            least, most = known.ranges.get(one, (None, None))
            if (least is not None and number < least) or (most is not None and number > most):
                return False
        about = [one for one in known.facts if one.free_symbols & own]
        return all(one.xreplace(self._numbers) == True for one in about)  # noqa: E712 - sympy's

    def of(self, value: Any) -> Any:
        """Return a symbolic number with the numbers in it: itself where none is, or a number, or one that is symbolic
        in what is left."""
        if not isinstance(value, SYMBOLIC):
            return value
        before = value.node.expr
        after = before.xreplace(self._numbers)
        if after == before and before.free_symbols:
            return value
        return self.number(after, type(value))

    def number(self, expression: Any, kind: type) -> Any:
        """Return an expression as a number of a ``kind`` of torch's, plain where it has no symbol."""
        plain = _KINDS[kind]
        if not expression.free_symbols:
            return plain(expression)
        if kind is torch.SymBool:
            return self._env.create_symboolnode(expression)
        hint = expression.xreplace(self._hints)
        hint = plain(hint) if not hint.free_symbols else None
        make = self._env.create_symintnode if kind is torch.SymInt else self._env.create_symfloatnode
        return make(expression, hint=hint)

    def shown(self, meta: Tensor, device: torch.device) -> Tensor:
        """Return a value of the capture, on a device, that shows the memory of a tensor on the meta device; an op in
        the capture's mode would take ten times as long to make it."""
        return self.mode.fake_tensor_converter.from_meta_and_device(self.mode, meta, device)  # type: ignore[no-any-return]


def written_expression(expression: Any, names: Mapping[Any, str]) -> Any:
    """Return an expression in symbols with ``names`` as nested lists; raise KeyError for another symbol or function."""
    if expression.is_Symbol:
        return names[expression]
    if expression.is_Integer:
        return int(expression)
    if expression is _sympy().true or expression is _sympy().false:
        return bool(expression)
    name = type(expression).__name__
    if _function(name) is not expression.func:
        raise KeyError(name)
    return [name, *(written_expression(one, names) for one in expression.args)]


def read_expression(written: Any, symbols: Mapping[str, Any]) -> Any:
    """Return the expression that :func:`written_expression` wrote; raise KeyError for what it does not write."""
    if isinstance(written, bool):
        return _sympy().true if written else _sympy().false
    if isinstance(written, int):
        return _sympy().Integer(written)
    if isinstance(written, str):
        return symbols[written]
    return _function(written[0])(*(read_expression(one, symbols) for one in written[1:]))


_PLAIN = ("Add", "Mul", "Pow", "Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan",
          "StrictGreaterThan", "And", "Or", "Not")  # fmt: skip


def _sympy() -> Any:
    return importlib.import_module("sympy")


def _function(name: str) -> Any:
    """Return a function of sympy's, or of torch's own for sizes."""
    if name in _PLAIN:
        return getattr(_sympy(), name)
    functions = importlib.import_module("torch.utils._sympy.functions")
    found = getattr(functions, name, None)
    if not isinstance(found, type) or found.__module__ != functions.__name__:
        raise KeyError(name)
    return found


def renamed(value: Any, names: Mapping[str, str]) -> str:
    """Return what a symbolic number is in words, with other ``names`` for its symbols, which decide on the order."""
    expression = value.node.expr
    symbols = {one: type(one)(names[str(one)], integer=one.is_integer) for one in expression.free_symbols
               if str(one) in names}  # fmt: skip
    return str(expression.xreplace(symbols))


process_lock = threading.RLock()
"""Only one thread at a time changes what holds for all of them."""


class _InOneThread:
    """A truth value that is true in the thread that made it alone."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return id(self)

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__


AS_IN_A_STEP = frozenset({"transformers.masking_utils"})
"""Modules that compute something else where they are exported: these leave out a mask that nobody needs only in a step,
and some models attend to later positions with it, and not without it."""


class _Exporting(_InOneThread):
    """The same, but false to code that shall do what it does in a step."""

    def __bool__(self) -> bool:
        return super().__bool__() and sys._getframe(1).f_globals.get("__name__") not in AS_IN_A_STEP


@contextmanager
def exporting() -> Iterator[None]:
    """Let code of this thread that asks torch whether it is exported go the way that it goes then, also inside
    ``torch.export``, which would tell all threads.  Others that export wait, as what says so would be put back in
    another order; those that run see nothing of it: torch's optimizers count steps in single precision where they
    are exported."""
    compiler: Any = torch.compiler
    import_export()
    tracer: Any = importlib.import_module("torch.export._trace")
    home = importlib.import_module("torch._export.non_strict_utils")
    builtins_replaced = getattr(home, "_override_builtin_ops", nullcontext)  # max(1, tensor) reads no value then
    with process_lock:
        before = compiler._is_compiling_flag, compiler._is_exporting_flag
        own_context = getattr(tracer, "_compiling_state_context", None)  # older ones have it elsewhere
        compiler._is_compiling_flag, compiler._is_exporting_flag = _InOneThread(), _Exporting()
        tracer._compiling_state_context = nullcontext
        try:
            with builtins_replaced():
                yield
        finally:
            compiler._is_compiling_flag, compiler._is_exporting_flag = before
            tracer._compiling_state_context = own_context


_ASKED = {torch.SymBool: ("__bool__", "__int__"), torch.SymInt: ("__bool__", "__int__", "__index__"),
          torch.SymFloat: ("__bool__", "__int__", "__float__")}  # fmt: skip


@contextmanager
def numbers_watched(raised: Callable[[Exception], None]) -> Iterator[None]:
    """Call ``raised`` with what a number without a value raises in this thread where code that is neither torch's nor
    ours asks for its value, as in a branch: that code may catch it."""
    thread = threading.get_ident()
    homes = tuple(os.path.join(path, "") for path in (os.path.dirname(torch.__file__), str(Path(__file__).parents[1])))

    def watched(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(number: Any) -> Any:
            try:
                return method(number)
            except Exception as error:
                own = threading.get_ident() == thread
                if own and not sys._getframe(1).f_code.co_filename.startswith(homes):
                    raised(error)
                raise

        return asked

    with process_lock:
        before = [(kind, name, vars(kind)[name]) for kind, names in _ASKED.items() for name in names]
        for kind, name, method in before:
            setattr(kind, name, watched(method))
        try:
            yield
        finally:
            for kind, name, method in before:
                setattr(kind, name, method)


@contextmanager
def without_modes() -> Iterator[None]:
    """Let ops run on values, whatever dispatch modes are on.  The mode of an export is off for all threads, so that
    this waits where another one exports."""
    with process_lock, _disable_current_modes():
        yield


@contextmanager
def without_torch_functions() -> Iterator[None]:
    """Let functions see a subclass of Tensor as the plain tensor that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's schedules know that a step was taken in place of the optimizer's own."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def module_hooks(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the ids of the hooks of a module, of any kind."""
    kinds = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return tuple(id(hook) for kind in kinds for hook in kind.values())


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks on the gradients of what it takes and returns, its own or those of all modules."""
    every = torch.nn.modules.module
    here = module._backward_hooks or module._backward_pre_hooks
    return bool(here or every._global_backward_hooks or every._global_backward_pre_hooks)


@contextmanager
def conversions_skipped() -> Iterator[None]:
    """Let ``Module.to`` do nothing meanwhile where all tensors are as asked: an export, in which it exchanges tensors
    for equal ones, cannot do that."""
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, form = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        same = dtype is None or all(one.dtype == dtype for one in tensors if one.is_floating_point())
        if same and form is None and (device is None or all(one.device == device for one in tensors)):
            return module
        return original(module, *args, **kwargs)

    nn.Module.to = to
    try:
        yield
    finally:
        nn.Module.to = original


@contextmanager
def exports_modules_unhooked() -> Iterator[None]:
    """Let the forward hooks on all modules pass by those that torch.export has of its own."""
    every = torch.nn.modules.module
    kinds: list[dict[int, Any]] = [every._global_forward_pre_hooks, every._global_forward_hooks]
    before = [dict(kind) for kind in kinds]

    def passing_by(hook: Any) -> Any:
        return lambda module, *given: None if type(module).__module__.startswith(_EXPORTS) else hook(module, *given)

    for kind, old in zip(kinds, before, strict=True):
        kind.update((key, passing_by(hook)) for key, hook in old.items())
    try:
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            kind.update((key, old[key]) for key in kind if key in old)


_EXPORTS = ("torch.export", "torch._export", "torch.fx")


@contextmanager
def function_calls(call: Callable[[Any, type, Sequence[Any]], Any]) -> Iterator[None]:
    """Pass each call of an ``autograd.Function``, however it was reached, through ``call(original, function, args)``.

    All threads' calls pass, so ``call`` has to tell its own."""
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(function: type, *args: Any) -> Any:
        return call(lambda *given: super(base, function).apply(*given), function, args)

    with process_lock:
        original = vars(base).get("apply")  # not before, when another thread may have changed it
        base.apply = classmethod(apply)
        try:
            yield
        finally:
            if original is None:
                del base.apply
            else:
                base.apply = original


class _Later(ModuleType):
    """Stand for a module of which only names in annotations are needed, until somebody uses it."""

    used = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name) if self.used else Any


def import_export() -> None:
    """Import torch.export without networkx, which it names in annotations alone; that saves 12 MB on each rank."""
    name, exporting = "networkx", "torch.export._trace"
    if name in sys.modules or exporting in sys.modules or (spec := find_spec(name)) is None:
        return
    sys.modules[name] = placeholder = _Later(name)
    placeholder.__spec__ = spec  # other code may ask meanwhile whether there is one
    try:
        importlib.import_module(exporting)
    finally:
        del sys.modules[name]
        placeholder.used = True


def pin(size: Any, number: int) -> None:
    """Let a size that a trace does not know be ``number``."""
    torch._check(size == number)  # type: ignore[no-untyped-call]


RESIZES: frozenset[Any] = frozenset(
    getattr(torch._C._nn, name) for name in dir(torch._C._nn) if name == "pad" or name.startswith("upsample_")
)
"""What ``F.interpolate`` and ``F.pad`` call, which take sizes also as tensors."""
