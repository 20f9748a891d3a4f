"""Recurrent networks with dropout between their layers, as calls of one layer each and of ``torch.dropout``.

``torch.lstm``, ``torch.gru`` and their like run all layers in one call, in which nobody can say which numbers their
dropout draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.running import here
from shardwise.core.errors import ConfigError

States = Tensor | Sequence[Tensor]
FUNCTIONS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def dropped_between(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return what computes a call of a recurrent function layer by layer, or None where it drops nothing between them.

    Raises :class:`ConfigError` for packed sequences: their elements are in the order of time steps and of lengths, not
    of rows."""
    packed = "batch_sizes" in kwargs or len(args) > 3 and not isinstance(args[3], bool)
    names = _PACKED if packed else _PADDED
    given = dict(zip(names, args, strict=False)) | kwargs
    if given["num_layers"] == 1 or not given["train"] or not given["dropout"]:
        return None
    if packed:
        raise ConfigError(
            f"model: torch.{func.__name__}{here()} drops elements of a packed sequence between its layers "
            f"(dropout={given['dropout']}), which has no batch dim by which they could be keyed; legal: a padded "
            "sequence, dropout=0, or one layer each, with dropout between them on padded sequences"
        )
    return lambda: _by_layers(func, **given)


_PADDED = (
    "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first",
)  # fmt: skip
_PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")


def _by_layers(
    func: Callable[..., Any], input: Tensor, hx: States, params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what ``func`` returns: the output of the last layer, and the last states of all layers."""
    states = [one.chunk(num_layers) for one in ([hx] if isinstance(hx, Tensor) else hx)]  # one for each direction
    weights = len(params) // num_layers
    output, last = input, []
    for i in range(num_layers):
        if i:
            output = torch.dropout(output, dropout, True)
        begin = states[0][i] if isinstance(hx, Tensor) else tuple(one[i] for one in states)
        own = list(params[i * weights : (i + 1) * weights])
        output, *ends = func(output, begin, own, has_biases, 1, 0.0, train, bidirectional, batch_first)
        last.append(ends)
    return output, *(torch.cat(ends) for ends in zip(*last, strict=True))


__all__ = ["FUNCTIONS", "dropped_between"]
