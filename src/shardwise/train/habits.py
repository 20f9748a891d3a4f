"""What a training loop does to its model beside the steps: under ``distribute`` the weights are in the engine, so that
what a user does to the module's own tensors would do nothing. It raises where it is done, and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.capture.state import PythonState
from shardwise.capture.tensor_facts import FACTS
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import step_hooks, without_torch_functions

INSTEAD = {
    "grad": "gradients are in the engine; legal: distribute(..., clip_norm=...), hooks on parameters (register_hook), "
    "zero_grad of the optimizer that distribute returned",
    "requires_grad": "parameters are frozen before the first batch",
    "other": "its value is in the engine; legal: model.state_dict() for the values, a write before the first "
    "batch or after model.trainer.close()",
}


def _refuse(func: Any) -> None:
    owner = getattr(func, "__self__", None)
    name = getattr(owner, "__name__", "") if getattr(func, "__name__", "") in ("__get__", "__set__") else func.__name__
    kind = name if name in INSTEAD else "requires_grad" if name == "requires_grad_" else "other"
    raise ShardwiseError(f"{name} of a tensor of the module under distribute(): {INSTEAD[kind]}")


class _Kept:
    """Mixed into the classes of a module's own tensors once their values are in the engine."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in FACTS:
            _refuse(func)
        with without_torch_functions():
            return func(*args, **(kwargs or {}))


class KeptParameter(_Kept, nn.Parameter):
    """A parameter whose value is in the engine."""


class KeptBuffer(_Kept, Tensor):
    """A buffer whose value is in the engine."""


class Watch:
    """The watch over a module that is trained, and over the ``optimizer`` that was given with it."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.module, self.optimizer = module, optimizer
        self.state: PythonState | None = None
        self.modes: list[bool] = []
        self.tensors: dict[str, int] = {}  # the ids of the module's own
        self.check_optimizer()

    def check_optimizer(self) -> None:
        """Raise :class:`ShardwiseError` if the optimizer has hooks, which no step of the engine calls."""
        if self.optimizer is not None and step_hooks(self.optimizer):
            raise ShardwiseError("optimizer: hooks on its step are not called; legal: calls before and after step()")

    def begin(self) -> None:
        """Note the module's state, for it has been captured, and let its tensors raise wherever they are used."""
        for p in self.module.parameters():
            if type(p) is nn.Parameter:
                p.__class__ = KeptParameter
        for b in self.module.buffers():
            if type(b) is Tensor:
                b.__class__ = KeptBuffer
        self.modes = [m.training for m in self.module.modules()]
        self.tensors = self._ids()
        self.state = PythonState(self.module)

    def _ids(self) -> dict[str, int]:
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: id(tensor) for name, tensor in named}

    def end(self) -> None:
        """Give the module back: its tensors have the values that they had when training began."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if isinstance(tensor, _Kept):
                kind: type = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
                tensor.__class__ = kind

    def check(self) -> None:
        """Raise :class:`ShardwiseError` where the module or its surroundings are not as they were captured."""
        if any(map(torch.is_autocast_enabled, {"cpu", Backend.here().type})):
            legal = 'Plan.of(precision="bf16") or "fp16"'
            raise ShardwiseError(f"model(...) under torch.autocast, which the engine does not see; legal: {legal}")
        self.check_kept()

    def check_kept(self) -> None:
        """Raise :class:`ShardwiseError` where the module or the optimizer is not as it was captured."""
        self.check_optimizer()
        if self.state is None:
            return
        for (name, one), mode in zip(self.module.named_modules(), self.modes, strict=False):
            if one.training != mode:
                what = f"{name or 'the module'}.training changed to {one.training} after the first batch"
                raise ShardwiseError(f"model: {what}; legal: a mode that is set before, or model.eval() of the whole")
        if (now := self._ids()) != self.tensors:
            name = next(iter(dict(set(now.items()) ^ set(self.tensors.items()))))
            raise ShardwiseError(f"model: {name} is another tensor than at the first batch; {INSTEAD['other']}")
        if changes := self.state.changes():
            what = f"{changes[0]} changed after the first batch, when the model was captured"
            raise ShardwiseError(f"model: {what}; legal: a field of the batch, or a buffer that forward writes")
