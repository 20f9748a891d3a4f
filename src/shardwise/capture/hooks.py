"""The hooks that a user has registered on parameters and modules; a graph shows none of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwise.capture.own_copy import OwnCopy
from shardwise.capture.running import at_line
from shardwise.capture.tensor_facts import FACTS
from shardwise.core.errors import ConfigError
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import TorchDispatchMode, has_backward_hooks, hooks_of

HOOKED = "forward registers a hook on a tensor, which sees a gradient inside the model"
REGISTER = ("register_hook", "register_post_accumulate_grad_hook")

Watch = Callable[[Tensor], AbstractContextManager[Any]]
"""This returns what a hook is called in, for what the hook is given."""


class ParameterHooks(NamedTuple):
    """The hooks of a parameter: on its ``gradient``, and on itself ``after`` its gradient has been accumulated."""

    gradient: tuple[Callable[[Tensor], Tensor | None], ...]
    after: tuple[Callable[[Tensor], None], ...]

    def changed(self, gradient: Tensor, watch: Watch = nullcontext) -> Tensor:
        """Return what the hooks of the first kind make of a gradient."""
        for hook in self.gradient:
            own = gradient.clone()
            with watch(own):
                found = hook(own)
            gradient = own if found is None else found
        return gradient

    def changed_after(self, name: str, gradient: Tensor, data: Tensor, watch: Watch = nullcontext) -> Tensor:
        """Return what the hooks of the second kind make of the gradient of the parameter ``name`` with these values."""
        if not self.after:
            return gradient
        own, gradient = nn.Parameter(data.detach().clone()), gradient.clone()  # a hook may keep them
        for hook in self.after:
            own.grad = gradient
            with watch(own):
                hook(own)
            if own.grad is None or not torch.equal(own.detach(), data):  # the host waits for this
                what = "removes the gradient" if own.grad is None else "changes the parameter"
                legal = "a hook that changes its grad alone, for the optimizer of the plan updates the parameter"
                raise ConfigError.on(f"parameter {name}", f"its post-accumulate hook {what}", legal)
            gradient = own.grad
        return gradient


@dataclass(frozen=True)
class UserHooks:
    """The hooks of a module's parameters, by name, where there are any, and the module's own ``tensors`` by id: their
    values are in the engine, so that no hook may read them here."""

    parameters: Mapping[str, ParameterHooks] = field(default_factory=dict)
    tensors: Mapping[int, tuple[str, weakref.ref[Tensor]]] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module) -> UserHooks:
        """Return the hooks of a module's parameters."""
        every = {name: ParameterHooks(*hooks_of(p)) for name, p in module.named_parameters()}
        found = {name: hooks for name, hooks in every.items() if hooks.gradient or hooks.after}
        named = (*module.named_parameters(), *module.named_buffers()) if found else ()
        return UserHooks(found, {id(tensor): (name, weakref.ref(tensor)) for name, tensor in named})

    def own(self) -> dict[int, Tensor]:
        """Return the module's tensors by id, those that still exist."""
        found = {key: one() for key, (_, one) in self.tensors.items()}
        return {key: one for key, one in found.items() if one is not None}

    def copied(self) -> UserHooks:
        """Return the same hooks with copies of what they keep; raises :class:`ConfigError` where there are none."""
        copier, found = OwnCopy(self.own()), {}
        for name, hooks in self.parameters.items():
            try:
                found[name] = ParameterHooks(*(tuple(map(copier.of, kind)) for kind in hooks))
            except Exception as error:  # the objects of users may raise anything
                wrong = f"its hook keeps an object that cannot be copied ({error}), and threads would share it"
                legal = "a hook that keeps tensors, numbers, lists and the like; training in processes, without verify"
                raise ConfigError.on(f"parameter {name}", wrong, legal) from error
        return UserHooks(found, self.tensors)

    def apply(self, name: str, gradient: Tensor, data: Tensor, watch: Watch = nullcontext) -> Tensor:
        """Return what the hooks make of the gradient of a parameter with the values ``data``.

        Raises :class:`ConfigError` where they read the module's own tensors, draw random numbers, or change the
        parameter."""
        hooks = self.parameters[name]
        with torch.enable_grad(), _RefuseReads(name, self.tensors), _RefuseDraws(name):
            return hooks.changed_after(name, hooks.changed(gradient, watch), data, watch)


class _RefuseReads(TorchFunctionMode):
    """Raise :class:`ConfigError` where the hook of a parameter reads a tensor of the module."""

    def __init__(self, name: str, tensors: Mapping[int, tuple[str, weakref.ref[Tensor]]]) -> None:
        super().__init__()
        self.name, self.tensors = name, tensors

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FACTS:
            for one in tree_leaves((args, kwargs)):
                name, held = self.tensors.get(id(one), ("", None))
                if held is not None and held() is one:
                    wrong = f"its hook reads {name}, whose value is in the engine{at_line()}"
                    legal = "a hook that reads what it is given, and tensors that are not the module's"
                    raise ConfigError.on(f"parameter {self.name}", wrong, legal)
        return func(*args, **(kwargs or {}))


class _RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise :class:`ConfigError` where the hook of a parameter draws from a generator that it has not itself."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not (kwargs or {}).get("generator"):
            raise draws(self.name, "torch")
        return func(*args, **(kwargs or {}))


def draws(name: str, generator: str) -> ConfigError:
    """Return the error that the hook of a parameter draws from a generator that all code shares."""
    wrong = f"its hook draws from the generator of {generator}: one device and each rank would draw others{at_line()}"
    return ConfigError.on(f"parameter {name}", wrong, "a hook with a generator of its own, with a seed")


@contextmanager
def tensor_hooks_refused() -> Iterator[None]:
    """Raise :class:`Uncapturable` where forward, in this thread, registers a hook on the gradient of a tensor, or on
    what autograd saves.

    A mode would be asked about every other function, too, which takes as long as a fourth of an export.  What this
    changes holds for all threads, so it has to be inside of what lets one export at a time."""
    thread, originals = threading.get_ident(), {name: getattr(Tensor, name) for name in REGISTER}
    enter, getter = saved_tensors_hooks.__enter__, Tensor.grad_fn

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise Uncapturable(HOOKED)
            return original(*args, **kwargs)

        return register

    def node(tensor: Tensor) -> Any:
        found = getter.__get__(tensor)
        return found if found is None or threading.get_ident() != thread else _Unhooked(found)

    def saving(hooks: saved_tensors_hooks) -> None:
        of_torch = type(hooks) is save_on_cpu or type(hooks).__module__.startswith("torch.utils.")  # checkpoint
        if threading.get_ident() == thread and not of_torch:
            raise Uncapturable("forward has hooks on what autograd saves, which may change a gradient")
        enter(hooks)

    for name, original in originals.items():
        setattr(Tensor, name, refusing(original))
    Tensor.grad_fn, saved_tensors_hooks.__enter__ = property(node), saving
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
        del Tensor.grad_fn
        saved_tensors_hooks.__enter__ = enter


class _Unhooked:
    """A node of autograd that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self.__node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise Uncapturable(HOOKED)
        return getattr(self.__node, name)


def refuse_module_hooks(module: nn.Module) -> None:
    """Raise :class:`Uncapturable` where a module has a hook on the gradients of what it takes and returns."""
    for name, one in module.named_modules():
        if has_backward_hooks(one):
            raise Uncapturable(f"{name or 'the model'} has a backward hook, which sees gradients inside the model")
