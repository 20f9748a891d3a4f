"""Find, while forward runs, whether a module's loss is a mean cross-entropy, and over how many targets, by weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.graph.torch_private import inside_vmap, version

_SAME = frozenset(
    (
        "to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "alias", "contiguous",
        "view", "view_as", "reshape", "squeeze", "unsqueeze", "flatten",
    )
)  # fmt: skip


class _Found(NamedTuple):
    """This is a mean cross-entropy, or a view or cast of one: its version then, its targets, and if these weigh nothing
    the sum of their losses."""

    result: Tensor
    version: int
    targets: float
    total: Tensor | None


class MeanCrossEntropy:
    """This layer remembers the results of mean cross-entropies, and those of functions that only cast or view them."""

    def __init__(self) -> None:
        self._results: dict[int, _Found] = {}  # by id: no other tensor gets that of one that is held
        self._signatures = {f: inspect.signature(f) for f in (F.cross_entropy, F.nll_loss)}

    def begin(self) -> None:
        """Forget everything, because a forward pass starts."""
        self._results = {}

    def of(self, loss: Tensor) -> tuple[Tensor, float | None]:
        """Return ``loss``, and the number of targets that it is the mean over, or the sum of their classes' weights;
        None if it is not a mean cross-entropy.

        Where targets weigh nothing the mean is undefined, and the sum, which a batch's sum has in it, takes its place:
        it is 0, but for smoothed targets of classes of no weight."""
        found = self._found(loss)
        if found is None:
            return loss, None
        return loss if found.total is None else found.total, found.targets

    def _found(self, loss: Tensor) -> _Found | None:
        found = self._results.get(id(loss))
        return None if found is None or version(loss) != found.version else found  # `loss += other` is another loss

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        result = proceed(func, args, kwargs)
        signature = self._signatures.get(func)
        if signature is not None and not inside_vmap():  # a mapped one is the loss of a row, not of the batch
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["reduction"] == "mean":
                targets = _count(*(bound.arguments[name] for name in ("input", "target", "ignore_index", "weight")))
                bound.arguments["reduction"] = "sum"
                total = None if targets else proceed(func, bound.args, bound.kwargs)
                self._results[id(result)] = _Found(result, version(result), targets, total)
        elif isinstance(result, Tensor) and args and getattr(func, "__name__", "") in _SAME:
            found = self._found(args[0])
            if found is not None:
                self._results[id(result)] = found._replace(result=result, version=version(result))
        return result


def _count(scores: Tensor, target: Tensor, ignore_index: int, weight: Tensor | None) -> float:
    """Return how many targets count: all rows of class probabilities, or class indices other than ``ignore_index``,
    each by the weight of its class."""
    if target.is_floating_point():
        return scores.numel() // scores.shape[1 if scores.dim() > 1 else 0]
    found = target[target != ignore_index]
    return found.numel() if weight is None else float(weight.cpu()[found.cpu()].double().sum())
