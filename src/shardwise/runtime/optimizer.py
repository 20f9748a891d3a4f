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
from shardwise.core.optim import FUSED, OptimizerChoice


class Segment(NamedTuple):
    """A segment is a contiguous range of a flat buffer whose elements all have weight decay, or none of them has.

    ``param`` and ``grad`` are 1-d views of the buffers; ``start`` is the position of ``param[0]`` in the flat
    buffer of the parameters, in elements.  The gradient of a table has rows, and no buffer.
    """

    param: Tensor
    grad: Tensor | None
    decays: bool
    start: int = 0


def torch_optimizer(
    choice: OptimizerChoice,
    decayed: Sequence[Tensor],
    undecayed: Sequence[Tensor],
    **options: bool,
) -> torch.optim.Optimizer:
    """Return the optimizer of :mod:`torch.optim` that ``choice`` names, over two groups of parameters.

    Weight decay applies to ``decayed`` only.  ``options`` are torch's ``fused``, ``foreach``, ``capturable``.
    """
    kwargs: dict[str, Any] = {"lr": choice.lr, **options}
    if choice.eps is not None:
        kwargs["eps"] = choice.eps
    if choice.weight_decay is not None:
        kwargs["weight_decay"] = choice.weight_decay
    betas = {"betas": choice.betas}
    make: Callable[..., torch.optim.Optimizer]
    own: dict[str, Any]
    match choice.name:
        case "adamw":
            make, own = torch.optim.AdamW, betas
        case "adam":
            make, own = torch.optim.Adam, betas
        case "radam":
            make, own = torch.optim.RAdam, betas
        case "nadam":
            make, own = torch.optim.NAdam, betas | {"momentum_decay": choice.momentum_decay}
        case "adagrad":
            make, own = torch.optim.Adagrad, {}
        case "rmsprop":
            make, own = torch.optim.RMSprop, {"alpha": choice.alpha, "momentum": choice.momentum}
        case "sgd":
            make, own = torch.optim.SGD, {"momentum": choice.momentum, "nesterov": choice.nesterov}
    groups: list[dict[str, Any]] = [{"params": list(decayed)}] if decayed else []
    if undecayed:
        groups.append({"params": list(undecayed), "weight_decay": 0.0})
    return make(groups, **kwargs, **own)


def check_optimizer(choice: OptimizerChoice, device: torch.device) -> None:
    """Raise :class:`ConfigError` where torch cannot take the steps of ``choice`` on ``device`` without the host."""
    backend = Backend.of(device)
    legal = (*FUSED[backend.kind], "adagrad")  # Adagrad does not use its counter of steps
    if backend.asynchronous and not backend.counts_steps and choice.name not in legal:
        where = f"devices of type {backend.type}, where torch counts its steps on the host alone"
        wrong = f'"{choice.name}" is not legal on {where}'
        raise ConfigError.on("optimizer", wrong, ", ".join(sorted(set(legal))))


class FlatOptimizer:
    """This is one optimizer over segments of flat buffers, all on one device and of one dtype.

    The update of a segment equals that of :mod:`torch.optim` on its parameters one by one, as every optimizer here
    works element by element.  State is made at once, so that the very first step can be skipped; a zero element with a
    zero gradient (padding) stays zero, and so does its state.
    """

    def __init__(
        self,
        choice: OptimizerChoice,
        segments: Iterable[Segment],
        states: Iterable[Mapping[str, Tensor]] | None = None,
    ):
        self.choice = choice
        self.segments = tuple(segment for segment in segments if segment.param.numel())
        # Aliases: the caller's tensors keep their own `.grad`.
        self._params = [segment.param.detach() for segment in self.segments]
        for param, segment in zip(self._params, self.segments, strict=True):
            param.grad = segment.grad
        self.fused = bool(self._params) and choice.name in FUSED[Backend.of(self._params[0].device).kind]
        self._optimizer = self._make(states) if self.segments else None

    @staticmethod
    def joined(parts: Sequence[FlatOptimizer]) -> FlatOptimizer:
        """Return one optimizer that takes the steps of all ``parts`` with their state: the same numbers in fewer
        kernels, where these are fused.
        """
        each = [one for part in parts for one in part.states()]
        return FlatOptimizer(parts[0].choice, [segment for segment, _ in each], [state for _, state in each])

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update every segment in place.

        ``lr`` is the learning rate of this step.  ``grad_scale`` is a 0-d tensor c on the segments' device:
        gradients count as c times what they are (the buffers hold that product afterwards, or anything where
        the step is skipped).  ``skip`` is a 0-d float32 tensor on that device, 1 to skip the step and 0 to
        take it.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        optimizer: Any = self._optimizer
        if self.fused:
            optimizer.grad_scale, optimizer.found_inf = self._divisor(grad_scale, skip), skip
            optimizer.step()
            optimizer.grad_scale = optimizer.found_inf = None
            return
        if grad_scale is not None:
            self._scale_gradients(grad_scale, skip)
        kept = [tensor.clone() for tensor in self._mutable()] if skip is not None else []
        optimizer.step()
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
        else:
            # Over one long tensor "foreach" only adds temporaries.
            options = {"foreach": False}
            if self.choice.name != "adagrad":
                options["capturable"] = self._params[0].device.type != "cpu"
        decayed: list[Tensor] = []
        undecayed: list[Tensor] = []
        for param, segment in zip(self._params, self.segments, strict=True):
            (decayed if segment.decays else undecayed).append(param)
        optimizer = torch_optimizer(self.choice, decayed, undecayed, **options)
        given = [self._initial_state(param) for param in self._params] if states is None else states
        for param, state in zip(self._params, given, strict=True):
            optimizer.state[param] = dict(state)
        return optimizer

    def _initial_state(self, param: Tensor) -> dict[str, Tensor]:
        """Return what torch.optim makes in its first step, with the scalars where its kernels want them."""
        on_cpu = param.device.type == "cpu" or (self.choice.name == "adagrad" and not self.fused)
        scalar_type = torch.get_default_dtype() if on_cpu else param.dtype
        wide = scalar_type == torch.float64 and not self.fused
        scalar = torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device="cpu" if on_cpu else param.device
        )
        match self.choice.name:
            case "adamw" | "adam" | "radam" | "nadam":
                names = ["exp_avg", "exp_avg_sq"]
            case "adagrad":
                names = ["sum"]
            case "rmsprop":
                names = ["square_avg"] + (["momentum_buffer"] if self.choice.momentum else [])
            case "sgd":
                # torch starts from the first gradient, which is what momentum x 0 + gradient gives.
                return {"momentum_buffer": torch.zeros_like(param)} if self.choice.momentum else {}
        state = {"step": scalar}
        if self.choice.name == "nadam":
            state["mu_product"] = torch.ones_like(scalar)
        return state | {name: torch.zeros_like(param) for name in names}

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

    def _scale_gradients(self, factor: Tensor, skip: Tensor | None) -> None:
        if skip is not None:
            # In a skipped step the factor may be NaN, and no later step writes the padding of these gradients.
            factor = torch.where(skip != 0, 0.0, factor)
        for segment in self.segments:
            assert segment.grad is not None
            segment.grad.mul_(factor)
