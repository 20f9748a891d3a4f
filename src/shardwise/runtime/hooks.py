"""Hooks that a user has registered on parameters act on the gradient of the whole batch, as on one device.

A hook is called once a step, when all microbatches and ranks have added their part and before the norm is taken. Where
a rank has the whole gradient the hook gets that. Where it has a piece the hook gets the piece, flat, if a trial has
shown that the hook acts on each element by itself; otherwise the plan is refused before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.capture.hooks import ParameterHooks, elementwise
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.gradients import Gradients
from shardwise.units.share import entry_ranges
from shardwise.units.trace import Parameter


@dataclass
class GradientHooks:
    """The hooks of the parameters of a rank's buckets; see the module."""

    hooks: Mapping[str, ParameterHooks]
    buckets: Mapping[int, BucketMemory]

    def check(self) -> None:
        """Raise :class:`ConfigError` where a hook needs a gradient that no rank has whole."""
        for _, parameter, _, whole in self._hooked():
            hooks = self.hooks[parameter.name]
            if not whole and (hooks.after or not elementwise(hooks, parameter.shape)):
                kind = "register_post_accumulate_grad_hook" if hooks.after else "register_hook"
                wrong = f"its hook ({kind}) needs the whole gradient, of which each rank has a part"
                legal = "zero = 0 without tensor parallelism, or a hook that acts on each element by itself"
                raise ConfigError.on(f"parameter {parameter.name}", wrong, legal)

    @torch.no_grad()
    def apply(self, gradients: Gradients, scale: Tensor | None) -> None:
        """Let the hooks change the gradients of the batch, which were multiplied by ``scale``."""
        for index, memory in self.buckets.items():
            if memory.learns:
                gradients.held(index)  # what nothing has written becomes zero
        for memory, parameter, gradient, whole in self._hooked():
            hooks = self.hooks[parameter.name]
            found = gradient if scale is None else gradient / scale
            with torch.enable_grad():
                found = hooks.changed(found.detach().clone())
                if whole:
                    found = self._after(memory, parameter, hooks, found)
            if found.shape != gradient.shape:
                wrong = f"its hook made a gradient of shape {tuple(found.shape)} of one of {tuple(gradient.shape)}"
                raise ShardwiseError(f"parameter {parameter.name}: {wrong}")
            gradient.copy_(found if scale is None else found * scale)

    @staticmethod
    def _after(memory: BucketMemory, parameter: Parameter, hooks: ParameterHooks, gradient: Tensor) -> Tensor:
        """Return what hooks make of ``grad`` when they are given the parameter."""
        if not hooks.after:
            return gradient
        own = nn.Parameter(memory.views(memory.param)[parameter.name].detach().to(gradient.dtype, copy=True))
        before = own.detach().clone()
        for hook in hooks.after:
            own.grad = gradient
            hook(own)
            if own.grad is None or not torch.equal(own.detach(), before):  # the host waits for this
                what = "removes the gradient" if own.grad is None else "changes the parameter"
                legal = "a hook that changes its grad alone, for the optimizer of the plan updates the parameter"
                raise ConfigError.on(f"parameter {parameter.name}", f"its post-accumulate hook {what}", legal)
            gradient = own.grad
        return gradient

    def _hooked(self) -> Iterator[tuple[BucketMemory, Parameter, Tensor, bool]]:
        """Yield for each hooked parameter its bucket, the gradient, and whether that is whole: otherwise it is flat."""
        for memory in self.buckets.values():
            if not memory.learns or not any(p.name in self.hooks for p in memory.bucket.parameters):
                continue
            held, gradient = memory.held, memory.held_gradient
            for entry, start, stop in entry_ranges(memory.layout, held.start, held.stop):
                if entry.name not in self.hooks:
                    continue
                parameter = memory.bucket.by_name[entry.name]
                piece = gradient[start - held.start : stop - held.start]
                every = held.numel == memory.layout.numel and stop - start == parameter.numel
                whole = every and parameter.layout is None
                yield memory, parameter, piece.view(parameter.shape) if whole else piece, whole
