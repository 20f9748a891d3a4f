"""The hooks that a user has registered on parameters and modules; a graph shows none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import has_backward_hooks, hooks_of


class ParameterHooks(NamedTuple):
    """The hooks of a parameter: on its ``gradient``, and on itself ``after`` its gradient has been accumulated."""

    gradient: tuple[Callable[[Tensor], Tensor | None], ...]
    after: tuple[Callable[[Tensor], None], ...]

    @staticmethod
    def of(module: nn.Module) -> dict[str, ParameterHooks]:
        """Return the hooks of a module's parameters, by name, where there are any."""
        every = {name: ParameterHooks(*hooks_of(p)) for name, p in module.named_parameters()}
        return {name: hooks for name, hooks in every.items() if hooks.gradient or hooks.after}

    def changed(self, gradient: Tensor) -> Tensor:
        """Return what the hooks of the first kind make of a gradient."""
        for hook in self.gradient:
            own = gradient.clone()
            found = hook(own)
            gradient = own if found is None else found
        return gradient


class RefuseTensorHooks(TorchFunctionMode):
    """Raise :class:`Uncapturable` where forward registers a hook on the gradient of a tensor."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise Uncapturable("forward registers a hook on a tensor, which sees a gradient inside the model")
        return func(*args, **(kwargs or {}))


def refuse_module_hooks(module: nn.Module) -> None:
    """Raise :class:`Uncapturable` where a module has a hook on the gradients of what it takes and returns."""
    for name, one in module.named_modules():
        if has_backward_hooks(one):
            raise Uncapturable(f"{name or 'the model'} has a backward hook, which sees gradients inside the model")


def elementwise(hooks: ParameterHooks, shape: tuple[int, ...]) -> bool:
    """Whether hooks act on each element by itself, by a trial on random numbers: on all, and on parts of them, flat."""
    trial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cut = max(trial.numel() // 3, 1)
    try:
        whole = hooks.changed(trial.clone()).flatten()
        flat = trial.flatten()
        parts = torch.cat([hooks.changed(flat[:cut].clone()), hooks.changed(flat[cut:].clone())])
    except Exception:  # a hook may take no other shape than the parameter's
        return False
    return torch.equal(whole, parts)
