"""What a model returns for arguments: the shapes, without its computing anything; and the buffers that it writes to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from shardwise.capture.capture import fill, shadow
from shardwise.capture.state import assigned_buffers
from shardwise.core.errors import ConfigError
from shardwise.graph.torch_private import fake_mode, version
from shardwise.train.habits import KeptParameter
from shardwise.train.values import Value


class Kind(NamedTuple):
    """What a model returns for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def meta(self) -> Tensor:
        """Return a new tensor of this kind."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Shapes:
    """The shapes of what ``entry(module, args, kwargs)`` returns, found on a copy of the module, once for arguments
    that are alike; and the names of the buffers that it has ``written`` to in training."""

    def __init__(self, module: nn.Module, precision: str, entry: Callable[[nn.Module, Any, Any], Any]) -> None:
        self.module, self.precision, self.entry = module, precision, entry
        self._template: nn.Module | None = None
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self.written: set[str] = set()

    @property
    def template(self) -> nn.Module:
        """A copy of the module whose parameters take no memory, for the shapes of what it returns."""
        if self._template is None:
            self._template = shadow(self.module, self.precision)
        return self._template

    def forget(self) -> None:
        """Forget all, since the module has changed."""
        self._template = None
        self._known.clear()
        self.written.clear()

    def results(self, values: Sequence[Any], spec: TreeSpec, training: bool) -> tuple[list[Any], TreeSpec]:
        """Return what the model returns for arguments like these: for each tensor one like it and whether it has a
        gradient."""
        modes = [one.training for one in self.module.modules()]
        key = (
            str(spec), training, tuple(modes),
            tuple((tuple(v.meta.shape), v.meta.dtype, v.grad) if isinstance(v, Value) else repr(v) for v in values),
        )  # fmt: skip
        if key not in self._known:
            for one, mode in zip(self.template.modules(), modes, strict=True):
                one.training = mode
            try:
                with fake_mode():
                    found = self._run(self.template, values, spec, training)
            except Exception:  # what it computes depends on values: it runs on some
                own = shadow(self.template, self.precision)
                every = self.module.named_parameters()
                fill(own, {name: one for name, one in every if not isinstance(one, KeptParameter)}, 0)
                found = self._run(own, values, spec, training)
            self._known[key] = found
        kinds, out = self._known[key]
        return [(one.meta(), one.grad) if isinstance(one, Kind) else one for one in kinds], out

    def _run(self, own: nn.Module, values: Sequence[Any], spec: TreeSpec, training: bool) -> tuple[list[Any], TreeSpec]:
        def like(value: Value) -> Tensor:
            made = torch.zeros(value.meta.shape, dtype=value.meta.dtype)
            if value.known is not None and type(made) is Tensor:
                made = value.known.get().detach().cpu()
            return made.requires_grad_(value.grad)

        args, kwargs = spec.unflatten([like(one) if isinstance(one, Value) else one for one in values])
        with torch.set_grad_enabled(training), torch.random.fork_rng(), self._noting_writes(own):
            flat, out = tree_flatten(self.entry(own, args, kwargs))
        if strange := [one for one in flat if not isinstance(one, Tensor | int | float | bool | str | None)]:
            what = f"forward returns an object of type {type(strange[0]).__name__}"
            raise ConfigError(f"model: {what}; legal: tensors, and tuples, lists, dicts and outputs of transformers")
        found = [
            Kind(tuple(map(int, one.shape)), one.dtype, one.requires_grad) if isinstance(one, Tensor) else one
            for one in flat
        ]
        return found, out

    @contextmanager
    def _noting_writes(self, own: nn.Module) -> Iterator[None]:
        """Note the buffers of a copy of the module that are written to inside the context."""
        before = dict(own.named_buffers())
        versions = {name: version(one) for name, one in before.items()}
        with _Statistics() as statistics:
            yield
        assigned_buffers(own, before, lambda name, *_: self.written.add(name))
        for name, one in before.items():
            if version(one) != versions[name] or id(one) in statistics.seen:
                self.written.add(name)


class _Statistics(TorchFunctionMode):
    """Sees the running statistics that norms write to, of which torch's own count of writes knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (functional.batch_norm, functional.instance_norm):
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            if given.get("training") or given.get("use_input_stats"):
                self.seen.update((id(given[name]), given[name]) for name in ("running_mean", "running_var"))
        return func(*args, **(kwargs or {}))
