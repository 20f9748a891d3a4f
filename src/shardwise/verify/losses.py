"""Find, while forward runs, whether a module's loss is a mean cross-entropy, and over how many targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.graph.torch_private import version

_SAME = frozenset(
    (
        "to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "alias", "contiguous",
        "view", "view_as", "reshape", "squeeze", "unsqueeze", "flatten",
    )
)  # fmt: skip


class MeanCrossEntropy:
    """This layer remembers the results of mean cross-entropies, and those of functions that only cast or view them."""

    def __init__(self) -> None:
        self._results: dict[int, tuple[Tensor, int, int]] = {}  # by id: the tensor, its version then, its targets
        self._signatures = {f: inspect.signature(f) for f in (F.cross_entropy, F.nll_loss)}

    def begin(self) -> None:
        """Forget everything, because a forward pass starts."""
        self._results = {}

    def targets(self, loss: Tensor) -> int | None:
        """Return the number of targets that ``loss`` is the mean over; None if it is not a mean cross-entropy."""
        found = self._results.get(id(loss))
        return None if found is None or version(loss) != found[1] else found[2]  # `loss += other` is another loss

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        result = proceed(func, args, kwargs)
        signature = self._signatures.get(func)
        if signature is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["reduction"] == "mean":
                count = _count(bound.arguments["input"], bound.arguments["target"], bound.arguments["ignore_index"])
                self._results[id(result)] = (result, version(result), count)  # no other tensor gets a held one's id
        elif isinstance(result, Tensor) and args and getattr(func, "__name__", "") in _SAME:
            targets = self.targets(args[0])
            if targets is not None:
                self._results[id(result)] = (result, version(result), targets)
        return result


def _count(scores: Tensor, target: Tensor, ignore_index: int) -> int:
    """Return how many targets count: class indices other than ``ignore_index``, or all rows of class probabilities."""
    if target.is_floating_point():
        return scores.numel() // scores.shape[1 if scores.dim() > 1 else 0]
    return int((target != ignore_index).sum())
