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
from shardwise.train.awaited import changed_parts, parts_of, tensors_of
from shardwise.train.optimizers import MAY_CHANGE, optimizers_in

INSTEAD = {
    "grad": "gradients are in the engine; legal: distribute(..., clip_norm=...), hooks on parameters (register_hook), "
    "step and zero_grad of the optimizer that distribute returned",
    "requires_grad": "the plan was made for what it was at the first batch; legal: before that",
    "other": "its value is in the engine; legal: model(...) of what distribute returned to evaluate, "
    "model.state_dict() for the values, a write before the first batch or after model.trainer.close()",
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
    """The watch over a module that is trained with a ``loss`` function, if it has one, and over the ``optimizer`` that
    was given with it."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, loss: Any = None) -> None:
        self.module, self.optimizer, self.loss = module, optimizer, loss
        self._state: PythonState | None = None
        self._modes: dict[bool, list[bool]] = {}  # of all modules, in training and in evaluation
        self._parts: dict[str, Any] = {}
        self._groups: list[list[int]] | None = None  # of the optimizer, once the model is captured
        self.check_optimizer()

    def check_optimizer(self) -> None:
        """Raise :class:`ShardwiseError` where the optimizer has or does what no step of the engine knows."""
        if self.optimizer is None:
            return
        if any(map(step_hooks, optimizers_in(self.optimizer))):
            raise ShardwiseError("optimizer: hooks on its step are not called; legal: calls before and after step()")
        if self._groups not in (None, _groups(self.optimizer)):
            what = "its groups of parameters changed after the first step"
            raise ShardwiseError(f"optimizer: {what}; legal: {MAY_CHANGE}")
        if any(float(state.get("step", 1)) for state in self.optimizer.state.values()):  # Adagrad's begins with step 0
            what = "a state was loaded after distribute(), but the state is in the engine"
            raise ShardwiseError(
                f"optimizer: {what}; legal: shardwise.Checkpoints(model.trainer), which save and load it"
            )

    def begin(self) -> None:
        """Note the module's state, for it has been captured, and let its tensors raise wherever they are used."""
        modes = [m.training for m in self.module.modules()]
        # A module that is in evaluation mode as a whole is trained as one in training mode.
        self._modes = {True: modes if modes[0] else [True] * len(modes), False: [False] * len(modes)}
        for p in self.module.parameters():
            if type(p) is nn.Parameter:
                p.__class__ = KeptParameter
        self._groups = None if self.optimizer is None else _groups(self.optimizer)
        for b in self.module.buffers():
            if type(b) is Tensor:
                b.__class__ = KeptBuffer
        self._parts, self._state = parts_of(self.module), PythonState(self.module, self.loss)

    def end(self, state: Mapping[str, Tensor]) -> None:
        """Give the module back, with the values of ``state``."""
        for name, tensor in tensors_of(self.module):
            if isinstance(tensor, _Kept):
                kind: type = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
                tensor.__class__ = kind
            if name in state:
                with torch.no_grad():
                    tensor.copy_(state[name])
        self._state = None

    def check(self, training: bool) -> None:
        """Raise :class:`ShardwiseError` where the module or its surroundings are not as they were captured, for a call
        in ``training`` or evaluation."""
        if any(map(torch.is_autocast_enabled, {"cpu", Backend.here().type})):
            legal = 'Plan.of(precision="bf16") or "fp16"'
            raise ShardwiseError(f"model(...) under torch.autocast, which the engine does not see; legal: {legal}")
        self.check_kept()
        if self._state is None:
            return
        for (name, one), mode in zip(self.module.named_modules(), self._modes[training], strict=True):
            if one.training != mode:
                what = f"{name or 'the module'}.training is {one.training}, unlike when the model was captured"
                legal = "a part's mode that is set before the first batch; train() and eval() of the whole model"
                raise ShardwiseError(f"model: {what}; legal: {legal}")

    def check_kept(self) -> None:
        """Raise :class:`ShardwiseError` where the module or the optimizer is not as it was captured."""
        self.check_optimizer()
        if self._state is None:
            return
        for name in changed_parts(self.module, self._parts):
            what = f"{name} is another than at the first batch, or has other hooks"
            raise ShardwiseError(f"model: {what}; {INSTEAD['other']}")
        if changes := self._state.changes():
            what = f"{changes[0]} changed after the first batch, when the model was captured"
            legal = "a field of the batch, a buffer that forward writes, or outside of the model what it does not read"
            raise ShardwiseError(f"model: {what}; legal: {legal}")


def _groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]
