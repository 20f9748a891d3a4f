"""Hooks that a user has registered on parameters act on the gradient of the whole batch, as on one device.

A hook is called once a step, when all microbatches and ranks have added their part and before the norm is taken. Where
a rank has the whole gradient the hook gets that. Where it has a piece the hook gets the piece, flat, with the piece of
the parameter if it asks for that, if a trial has shown that the hook acts on each element by itself; otherwise the plan
is refused before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.capture.hook_trial import Facts, check_hooks, dependence
from shardwise.capture.hooks import UserHooks
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.gradients import Gradients
from shardwise.units.share import entry_ranges
from shardwise.units.trace import Parameter


class _Hooked(NamedTuple):
    """A parameter with hooks, and the range of elements of its bucket, from the first held, that this rank has."""

    memory: BucketMemory
    parameter: Parameter
    start: int
    stop: int
    whole: bool  # else its pieces are flat

    def piece(self, held: Tensor) -> Tensor:
        """Return what this rank has of the parameter in a tensor of the held elements of the bucket."""
        found = held[self.start : self.stop]
        return found.view(self.parameter.shape) if self.whole else found


@dataclass
class GradientHooks:
    """The hooks of the parameters of a rank's buckets; see the module."""

    hooks: UserHooks
    buckets: Mapping[int, BucketMemory]

    def check(self) -> None:
        """Raise :class:`ConfigError` where a hook does what no rank may do, or needs a gradient that no rank has
        whole."""
        gradients = {
            one.parameter.name: Facts(tuple(one.parameter.shape), one.memory.bucket.wide, one.memory.comm.device)
            for one in self._hooked()
        }
        check_hooks(self.hooks, gradients)
        for one in self._hooked():
            name = one.parameter.name
            why = "" if one.whole else dependence(self.hooks, name, gradients[name], one.stop - one.start)
            if why:
                after = self.hooks.parameters[name].after
                kind = "register_post_accumulate_grad_hook" if after else "register_hook"
                wrong = f"its hook ({kind}) needs the whole gradient, of which each rank has a part: {why}"
                legal = "zero = 0 without tensor parallelism and servers, or a hook that acts on each element by itself"
                raise ConfigError.on(f"parameter {name}", wrong, legal)

    @torch.no_grad()
    def apply(self, gradients: Gradients, scale: Tensor | None) -> None:
        """Let the hooks change the gradients of the batch, which were multiplied by ``scale``."""
        for index, memory in self.buckets.items():
            if memory.learns:
                gradients.held(index)  # what nothing has written becomes zero
        for one in self._hooked():
            name, gradient = one.parameter.name, one.piece(one.memory.held_gradient)
            found = gradient if scale is None else gradient / scale
            data = one.piece(one.memory.master).to(found.device, found.dtype, copy=True)
            found = self.hooks.apply(name, found, data)
            if found.shape != gradient.shape:
                wrong = f"its hook made a gradient of shape {tuple(found.shape)} of one of {tuple(gradient.shape)}"
                raise ShardwiseError(f"parameter {name}: {wrong}")
            gradient.copy_(found if scale is None else found * scale)

    def _hooked(self) -> Iterator[_Hooked]:
        """Yield the hooked parameters of which this rank holds a part."""
        for memory in self.buckets.values():
            if not memory.learns:
                continue
            held = memory.held
            for entry, start, stop in entry_ranges(memory.layout, held.start, held.stop):
                if entry.name in self.hooks.parameters:
                    parameter = memory.bucket.by_name[entry.name]
                    every = not memory.share.apart and stop - start == parameter.numel
                    whole = every and parameter.layout is None
                    yield _Hooked(memory, parameter, start - held.start, stop - held.start, whole)
