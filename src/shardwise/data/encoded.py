"""States of other libraries' loaders as JSON: what a checkpoint can keep of them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError


def encoded(value: Any, where: str = "state") -> Any:
    """Return a state of dicts, lists, tuples, numbers, text, bytes, tensors and arrays as JSON; ConfigError, with the
    place, for others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encoded(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, dict):
        pairs = [[encoded(key, where), encoded(one, f"{where}.{key}")] for key, one in value.items()]
        return {"dict": pairs}
    if type(value) is tuple:
        return {"tuple": [encoded(one, f"{where}[{i}]") for i, one in enumerate(value)]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(raw.dtype).removeprefix("torch."), list(raw.shape), base64.b64encode(data).decode()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.generic):
        return encoded(value.item(), where)
    legal = "dicts, lists, tuples, numbers, text, bytes, tensors and arrays"
    raise ConfigError.on(where, f"{type(value).__name__} cannot be kept in a checkpoint", legal)


def decoded(value: Any) -> Any:
    """Return what :func:`encoded` was given."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decoded(key): decoded(one) for key, one in inner}
    if kind == "tuple":
        return tuple(decoded(one) for one in inner)
    if kind == "bytes":
        return base64.b64decode(inner)
    dtype, shape, data = inner
    raw = base64.b64decode(data)
    if kind == "array":
        return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return values.view(getattr(torch, dtype)).reshape(shape)
