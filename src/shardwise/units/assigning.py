"""A model that is not captured, in the form in which it runs: with what its forward assigns to buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from shardwise.capture.state import assigned_buffers
from shardwise.capture.wrapped import WithLoss, WithOutputs, check_assigned
from shardwise.core.errors import ConfigError


class Assigning(WithLoss):
    """The same, with the buffers that forward assigned, which a functional call forgets."""

    assigned: Mapping[str, Tensor] = MappingProxyType({})

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch."""
        return self.keeping(super().forward, fields)

    def keeping(self, forward: Callable[[Mapping[str, Tensor]], Any], fields: Mapping[str, Tensor]) -> Any:
        """Return what ``forward`` returns, and keep what it assigned."""
        before, found = dict(self.module.named_buffers()), dict[str, Tensor]()
        parameters = dict(self.module.named_parameters())
        results = forward(fields)
        assigned_buffers(self.module, parameters, lambda name, old, new: refuse_write(name))

        def keep(name: str, old: Tensor, new: Tensor) -> None:
            check_assigned(name, old, new)
            found[name] = new

        assigned_buffers(self.module, before, keep)
        self.assigned = found
        return results


class AssigningOutputs(WithOutputs, Assigning):
    """The same, whose forward returns ``(loss, *outputs)``."""

    captured = False

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, and its outputs."""
        return self.keeping(self.results, fields)


def refuse_write(name: str) -> None:
    """Raise :class:`ConfigError` about a forward that writes to the parameter ``name``."""
    raise ConfigError(f"model: forward writes to the parameter {name}; legal: to write to buffers")
