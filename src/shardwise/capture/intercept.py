"""See and replace the torch functions that a module's forward calls, also those inside torch's own Python functions.

A :class:`TorchFunctionMode` is switched off while it handles a call, so what ``F.multi_head_attention_forward`` calls
in turn would go unseen.  :class:`Intercept` runs the body of such a function with the mode on.  Some random functions
have a body in :mod:`shardwise.capture.composed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from shardwise.capture.composed import composed

Proceed = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]

_OPENED = (
    "torch.nn.functional",
    "torch.functional",
)  # not methods of Tensor: their base's methods carry the same name
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class Layer(Protocol):
    """A layer looks at a call, changes it or its result, or answers in its place; ``proceed`` makes the call."""

    def __call__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any: ...


class Intercept(TorchFunctionMode):
    """Pass each call of a torch function through ``layers``, the first one outermost."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self._bodies: dict[FunctionType, FunctionType] = {}
        self._call: Proceed = self._run
        for layer in reversed(layers):
            self._call = _wrap(layer, self._call)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, dict(kwargs or {}))

    def _run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if (others := composed(func, args, kwargs)) is not None:
            with self:
                return others()
        if not isinstance(func, FunctionType) or func.__module__ not in _OPENED or func.__closure__:
            return func(
                *args, **kwargs
            )  # a closure chooses by a flag (max_pool2d) between functions that would ask again
        body = self._bodies.get(func)
        if body is None:
            body = self._bodies[func] = _body(func)
        with self:
            return body(*args, **kwargs)


def _wrap(layer: Layer, inner: Proceed) -> Proceed:
    return lambda func, args, kwargs: layer(func, args, kwargs, inner)


def _body(func: FunctionType, made: dict[FunctionType, FunctionType] | None = None) -> FunctionType:
    """Return ``func`` without its first question, whether somebody wants to handle the call: the mode just did. A
    function may leave the question to a helper (``torch.meshgrid`` does), which would ask the mode again and again;
    what is ``made`` of it is not made once more where functions name themselves, as ``threshold`` does."""
    made = {} if made is None else made
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    made[func] = body
    for name in func.__code__.co_names:
        helper = func.__globals__.get(name)
        if name.startswith("_") and isinstance(helper, FunctionType) and set(_CHECKS) & {*helper.__code__.co_names}:
            names[name] = made.get(helper) or _body(helper, made)
    return body
