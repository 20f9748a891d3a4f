"""An ``autograd.Function`` that no op can stand for: it takes a module or another object, or it draws random numbers.

It is opened: the graph gets what its forward computes, and autograd differentiates that, as it would the layers that a
reversible network runs again in backward.  A trial with values shows whether the Function's own backward gives the same
gradients; where it does not, the model is not captured.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwise.capture.intercept import Intercept, Proceed
from shardwise.core.errors import describe
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import GRAD_MODE, TorchDispatchMode, function_calls

Gradients = dict[str, Tensor]
Run = Callable[[int, float], Gradients]
"""This returns the loss and the gradients of parameters, by name, for the model's values (0) or others by number, and a
factor of the loss."""

TRIALS = ((0, 1.0), (1, -1e6), (2, 1e-6))
"""The values and the factors of the trials: gradients that a backward cuts off or turns around show in one of them."""
CLOSE = 1e-9
"""The most by which gradients in fp64 differ, beside the largest of their tensor: a reversible network computes its
activations again from its results."""


class Drawing(Exception):
    """A Function draws random numbers."""


class RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises :class:`Drawing` where a random number is drawn."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Drawing
        return func(*args, **(kwargs or {}))


class _Numbered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the same numbers in each run, by their order, whatever a forward does to torch's generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._drawn += 1
            torch.default_generator.manual_seed(self._drawn)
        return func(*args, **(kwargs or {}))


class _Context:
    """It stands for the context that a Function's forward is given."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(one, Tensor) and one.requires_grad for one in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: set[int] = set()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constant |= {id(one) for one in tensors}

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Uncapturable("an autograd.Function writes to its arguments")

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _with_gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
    """A layer that leaves gradients on: a Function's forward runs without, so what it switches off says nothing."""
    return proceed(func, (True,), {}) if func is GRAD_MODE else proceed(func, args, kwargs)


def opened(function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    """Return what the forward of a Function returns, with its ops behind it."""
    context: Any = _Context(args)
    own = function.setup_context is not torch.autograd.Function.setup_context
    if not torch.is_grad_enabled():
        return function.forward(*args) if own else function.forward(context, *args)
    with Intercept(_with_gradients):
        found = function.forward(*args) if own else function.forward(context, *args)
    if own:
        function.setup_context(context, tuple(args), found)

    def result(one: Any) -> Any:
        return one.detach() if isinstance(one, Tensor) and id(one) in context.constant else one

    return tree_map(result, found)


def _code(function: Any) -> Any:
    """Return what is the same of a Function whose class is made anew for each forward."""
    return getattr(function.forward, "__code__", function)


@contextlib.contextmanager
def _all_opened(functions: Sequence[type]) -> Iterator[None]:
    """Open all calls of ``functions``; raise :class:`Uncapturable` where a run makes none."""
    wanted, met, thread = {_code(one) for one in functions}, set[Any](), threading.get_ident()

    def call(original: Callable[..., Any], function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
        code = _code(function)
        if code not in wanted or threading.get_ident() != thread:
            return original(*args)
        met.add(code)
        return opened(function, args)

    with function_calls(call):
        yield
    if met != wanted:
        raise Uncapturable(f"the autograd.Function {_named(functions)} is not applied in each forward")


def check(functions: Sequence[type], run: Run) -> None:
    """Raise :class:`Uncapturable` unless a model has the same loss and gradients whether ``functions`` are opened or
    not, for some values and sizes of gradients."""
    for values, factor in TRIALS:
        try:
            with _Numbered():
                own = run(values, factor)
            with _Numbered(), _all_opened(functions):
                found = run(values, factor)
        except Uncapturable:
            raise
        except Exception as error:  # the user's code may raise anything
            raise Uncapturable(
                f"a trial of the autograd.Function {_named(functions)} failed: {describe(error)}"
            ) from error
        most = max(map(_largest, own.values()), default=0.0)
        for name in {**own, **found}:
            if name not in own or name not in found or not _same(own[name], found[name], most):
                raise Uncapturable(
                    f"the backward of the autograd.Function {_named(functions)}, which takes an object or draws random "
                    f"numbers, gives another gradient of {name} than its forward has"
                )


def note(functions: Sequence[type]) -> str:
    """Say what was made of these."""
    names = _named(functions)
    return f"the autograd.Function {names} was captured as its forward: a trial gave the gradients of its own backward"


def _named(functions: Sequence[type]) -> str:
    return " and ".join(dict.fromkeys(one.__name__ for one in functions))


def _largest(one: Tensor) -> float:
    return float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0


def _same(one: Tensor, other: Tensor, most: float) -> bool:
    """Whether two gradients are the same but for rounding, where ``most`` is the largest number of all gradients."""
    rounding = CLOSE * _largest(one) + torch.finfo(one.dtype).eps * most
    return torch.allclose(one, other, rtol=0.0, atol=rounding, equal_nan=True)
