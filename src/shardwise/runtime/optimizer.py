"""The optimizer over flat buffers runs torch's own update kernels, each once over a whole segment.

A skipped step (``skip`` = 1) leaves parameters, state and step counters as they were, bit for bit, and the
host never reads the flag.  The fused kernels take it as ``found_inf``, and the clipping factor as the
inverse of ``grad_scale``: the two attributes by which :class:`torch.amp.GradScaler` talks to an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import FIRST_RATE, FUSED, ROWS, WHOLE
from shardwise.runtime.lamb import Lamb
from shardwise.runtime.lion import Lion
from shardwise.runtime.shampoo import Shampoo

CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax, "adadelta": torch.optim.Adadelta, "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop, "lion": Lion,
    "sparse_adam": torch.optim.SparseAdam, "muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor,
    "lamb": Lamb, "shampoo": Shampoo,
}  # fmt: skip
"""The class of each optimizer of :data:`~shardwise.core.optimizers.OPTIMIZERS`."""

Settings = Sequence[Mapping[str, Any]]
"""The hyperparameters of one step by group, as :meth:`~shardwise.core.optim.OptimizerChoice.settings` has them."""


class Segment(NamedTuple):
    """A segment is a contiguous range of a flat buffer whose elements all have the hyperparameters of one ``group``.

    ``param`` and ``grad`` are 1-d views of the buffers; ``start`` is the position of ``param[0]`` in the flat
    buffer of the parameters, in elements.  The gradient of a table has rows, and no buffer.
    """

    param: Tensor
    grad: Tensor | None
    group: int = 0
    start: int = 0


def torch_optimizer(
    choice: OptimizerChoice, params: Iterable[tuple[Tensor, int]], part: int = 0, **options: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that a ``part`` of the choice names, over parameters with the number of their group.

    Its groups have the number as ``"number"``.  ``options`` are torch's ``fused``, ``foreach``, ``capturable``.
    """
    groups: dict[int, list[Tensor]] = {}
    for param, number in params:
        groups.setdefault(number, []).append(param)
    make: Callable[..., torch.optim.Optimizer] = CLASSES[choice.parts[part].name]
    optimizer = make([{"params": members, "number": number} for number, members in groups.items()], **options)
    arrange(optimizer, choice.settings(0))
    return optimizer


def arrange(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Give each group of an optimizer its hyperparameters."""
    for group in optimizer.param_groups:
        group.update(settings[group["number"]])


def check_optimizer(choice: OptimizerChoice, device: torch.device) -> None:
    """Raise :class:`ConfigError` where torch cannot take the steps of ``choice`` on ``device`` without the host."""
    backend = Backend.of(device)
    # Adagrad does not use its counter of steps, and where there are rows the host waits.
    legal = (*FUSED[backend.kind], *WHOLE, *ROWS, "adagrad")
    for name in (part.name for part in choice.parts):
        if backend.asynchronous and not backend.counts_steps and name not in legal:
            where = f"devices of type {backend.type}, where torch counts its steps on the host alone"
            raise ConfigError.on("optimizer", f'"{name}" is not legal on {where}', ", ".join(sorted(set(legal))))
    if backend.asynchronous and (found := next((part.lr_decay for part in choice.parts if part.lr_decay), 0)):
        wrong = f"lr_decay = {found} is not legal on devices of type {backend.type}"
        raise ConfigError.on("optimizer", f"{wrong}, where torch counts the steps of adagrad on the host", "0")


class FlatOptimizer:
    """This is one optimizer, a ``part`` of the choice, over segments of flat buffers, all on one device and of one
    dtype.

    The update of a segment equals that of :mod:`torch.optim` on its parameters one by one, as every optimizer here
    works element by element.  State is made at once, so that the very first step can be skipped; a zero element with a
    zero gradient (padding) stays zero, and so does its state.
    """

    def __init__(
        self,
        choice: OptimizerChoice,
        segments: Iterable[Segment],
        states: Iterable[Mapping[str, Tensor]] | None = None,
        part: int = 0,
    ):
        self.every, self.part, self.choice = choice, part, choice.parts[part]
        self.segments = tuple(segment for segment in segments if segment.param.numel())
        # Aliases: the caller's tensors keep their own `.grad`.
        self._params = [segment.param.detach() for segment in self.segments]
        for param, segment in zip(self._params, self.segments, strict=True):
            param.grad = segment.grad
        self.fused = bool(self._params) and self.choice.fused_on(Backend.of(self._params[0].device).kind)
        self._optimizer = self._make(states) if self.segments else None

    @staticmethod
    def joined(parts: Sequence[FlatOptimizer]) -> FlatOptimizer:
        """Return one optimizer that takes the steps of all ``parts`` with their state: the same numbers in fewer
        kernels, where these are fused.
        """
        each = [one for part in parts for one in part.states()]
        first = parts[0]
        segments, states = ([one[at] for one in each] for at in (0, 1))
        return FlatOptimizer(first.every, segments, states, first.part)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(
        self, settings: Settings, grad_scale: Tensor | None = None, skip: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:  # fmt: skip
        """Update every segment in place.

        ``settings`` are the hyperparameters of this step by group.  ``grad_scale`` is a 0-d tensor c on the segments'
        device: gradients count as c times what they are (the buffers hold that product afterwards, or anything where
        the step is skipped).  ``skip`` is a 0-d float32 tensor on that device, 1 to skip the step and 0 to
        take it.  With ``clip_value`` each element of the gradient, so scaled, is first brought to within that of 0.
        """
        if self._optimizer is None:
            return
        arrange(self._optimizer, settings)
        optimizer: Any = self._optimizer
        if clip_value is not None:
            if grad_scale is not None:
                self._scale_gradients(grad_scale, skip)
            self._clip_gradients(clip_value)
            grad_scale = None
        if self.fused:
            optimizer.grad_scale, optimizer.found_inf = self._divisor(grad_scale, skip), skip
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
            return
        if grad_scale is not None:
            self._scale_gradients(grad_scale, skip)
        kept = [tensor.clone() for tensor in self._mutable()] if skip is not None else []
        self._begin_with_rate()
        optimizer.step()
        if self.choice.dampening:
            self._begin_momentum()
        if skip is not None:
            skipped = skip != 0
            for tensor, before in zip(self._mutable(), kept, strict=True):
                torch.where(skipped, before, tensor, out=tensor)

    def states(self) -> list[tuple[Segment, dict[str, Tensor]]]:
        """Return each segment and its live state by torch's names: 1-d tensors like ``param``, and 0-d counters."""
        return [(segment, self._state(index)) for index, segment in enumerate(self.segments)]

    def _make(self, states: Iterable[Mapping[str, Tensor]] | None) -> torch.optim.Optimizer:
        if self.fused:
            options = {"fused": True}
        elif self.choice.name in ROWS:
            options = {}
        else:
            # Over one long tensor "foreach" only adds temporaries.
            options = {"foreach": False}
            if self.choice.name not in ("adagrad", "lion", "sgd"):
                options["capturable"] = self._params[0].device.type != "cpu"
        groups = (segment.group for segment in self.segments)
        optimizer = torch_optimizer(self.every, zip(self._params, groups, strict=True), self.part, **options)
        given = map(self._initial_state, self._params) if states is None else states
        for param, state in zip(self._params, given, strict=True):
            optimizer.state[param] = dict(state)
        return optimizer

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        """Return what torch.optim makes in its first step, with the scalars where its kernels want them.

        Where torch starts momentum from the first gradient, that is what momentum x 0 + gradient gives.
        """
        counted_here = self.choice.name in ROWS or (self.choice.name == "adagrad" and not self.fused)
        on_cpu = param.device.type == "cpu" or counted_here
        scalar_type = torch.get_default_dtype() if on_cpu else param.dtype
        wide = scalar_type == torch.float64 and not self.fused
        device = "cpu" if on_cpu else param.device
        first = {"mu_product": 1.0, "mu": 1.0, "sum": self.choice.initial_accumulator_value}
        scalars = {
            name: torch.full((), first.get(name, 0.0), dtype=torch.float64 if wide else torch.float32, device=device)
            for name in self.choice.scalars
        }
        return scalars | {name: torch.full_like(param, first.get(name, 0.0)) for name in self.choice.state}

    def _begin_with_rate(self) -> None:
        """Set what begins with the learning rate of the first step: a schedule may be made after the optimizer."""
        assert self._optimizer is not None
        if FIRST_RATE.isdisjoint((*self.choice.state, *self.choice.scalars)):
            return
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                state = self._optimizer.state[param]
                for key in FIRST_RATE & state.keys():
                    rate = state[key].new_full((), group["lr"])
                    torch.where(state["step"] == 0, rate, state[key], out=state[key])

    def _begin_momentum(self) -> None:
        """Take back the dampening of the first step: in torch momentum begins with the whole gradient."""
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            share = group["dampening"] / (1 - group["dampening"])
            for param in group["params"]:
                state = self._optimizer.state[param]
                momentum, factor = state["momentum_buffer"], (state["step"] == 0).to(param) * share
                param.addcmul_(momentum, factor, value=-group["lr"])
                momentum.mul_(1 + factor)
                state["step"] += 1

    def _state(self, index: int) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[self._params[index]]
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def changed(self) -> list[Tensor]:
        """Return all that a step changes: parameters and state."""
        return [
            *self._params,
            *(tensor for index in range(len(self._params)) for tensor in self._state(index).values()),
        ]

    def _mutable(self) -> list[Tensor]:
        """Return what a step changes on the device: all but Adagrad's ``step``, which can be on the CPU.

        There it also counts skipped steps; without a decay of its learning rate, Adagrad never uses it.
        """
        return [t for t in self.changed() if t.device == self._params[0].device]

    def _divisor(self, grad_scale: Tensor | None, skip: Tensor | None) -> Tensor | None:
        """Return what the fused kernels must divide gradients by; scale the gradients here where they cannot."""
        if grad_scale is None:
            return None
        if self._params[0].dtype == torch.float64:
            # The kernels take the divisor in float32, which is too coarse for these gradients.
            self._scale_gradients(grad_scale, skip)
            return None
        return grad_scale.float().reciprocal()

    def _clip_gradients(self, value: float) -> None:
        for segment in self.segments:
            assert segment.grad is not None
            segment.grad.clamp_(-value, value)

    def _scale_gradients(self, factor: Tensor, skip: Tensor | None) -> None:
        if skip is not None:
            # In a skipped step the factor may be NaN, and no later step writes the padding of these gradients.
            factor = torch.where(skip != 0, 0.0, factor)
        for segment in self.segments:
            assert segment.grad is not None
            segment.grad.mul_(factor)
