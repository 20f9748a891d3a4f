"""Copies of a user's module; what cannot be copied, or has no shape yet, is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.core.errors import ConfigError
from shardwise.graph.layouts import check_layout

NESTED = 4  # how deep lists and dicts of an attribute are searched for what cannot be copied


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return ``copy.deepcopy(module, memo)``; raise :class:`ConfigError` that names the attribute that refuses that."""
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception as error:  # whatever an object of the user's raises
        found = _culprit(module, memo)
        name, value = found or (type(module).__name__, module)
        wrong = f"{name}, of type {type(value).__name__}, cannot be copied: {' '.join(str(error).split())}"
        legal = (
            "what copy.deepcopy takes. Make it in forward, keep it outside of the model, or give the class that holds "
            "it a __deepcopy__ or __getstate__ that leaves it out"
        )
        raise ConfigError(f"model: {wrong}; legal: {legal}") from error


def refuse_unready(module: nn.Module) -> None:
    """Raise :class:`ConfigError` for parameters and buffers of which nobody knows the shape, or that are sparse,
    nested or quantized."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            path = name.rpartition(".")[0] or "the model"
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"model: {name} has no shape yet, for {path} is a {kind} that has not run; legal: one forward of the "
                "model on a batch first, or a module that is given its sizes"
            )
        check_layout("model", name, tensor)


def _culprit(module: nn.Module, memo: dict[int, Any]) -> tuple[str, Any] | None:
    """Return the path and the value of the innermost attribute that cannot be copied."""
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            own = name in ("_modules", "_parameters", "_buffers") or isinstance(value, nn.Module)
            if not own and not _copies(value, memo):
                return _innermost(f"{path}.{name}".removeprefix("."), value, memo)
    return None


def _innermost(name: str, value: Any, memo: dict[int, Any], depth: int = NESTED) -> tuple[str, Any]:
    for key, part in _parts(value) if depth else ():
        if not _copies(part, memo):
            return _innermost(f"{name}[{key!r}]", part, memo, depth - 1)
    return name, value


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _copies(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


__all__ = ["copied", "refuse_unready"]
