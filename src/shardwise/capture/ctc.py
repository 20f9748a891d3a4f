"""CTC losses in a form that a graph can have.

``torch.ctc_loss`` takes the labels of all rows as one list, and reads how many there are: neither the list nor what it
computes has a size that is known before the values are.  A list that is ``labels.masked_select(mask)`` says which
labels are whose, and so the losses are computed by rows (``ops/ctc.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.ops.ctc import CtcByRows

MEAN, SUM = 1, 2
"""The numbers of reductions; 0 is none."""


class CtcLosses:
    """A layer of :class:`~shardwise.capture.intercept.Intercept` that computes CTC losses by rows."""

    def __init__(self) -> None:
        # By the id of a selection: the selection, the labels and the mask.
        self._selected: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in (Tensor.masked_select, torch.masked_select):
            found = proceed(func, args, kwargs)
            labels, mask = (*args, *kwargs.values())[:2]
            if labels.dim() == 2 and labels.shape == mask.shape:
                self._selected[id(found)] = found, labels, mask
            return found
        if func is torch.ctc_loss:  # F.ctc_loss and nn.CTCLoss call it
            found = self._losses(*args, **kwargs)
            if found is not None:
                return found
        return proceed(func, args, kwargs)

    def _losses(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: int = MEAN, zero_infinity: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Return what ``torch.ctc_loss`` does; None for rows that are not told apart."""
        _, labels, mask = self._selected.get(id(targets), (None, targets, None))
        tensors = all(isinstance(one, Tensor) and one.dim() == 1 for one in (input_lengths, target_lengths))
        if log_probs.dim() != 3 or labels.dim() != 2 or not tensors:
            return None
        if mask is None:  # rows that are filled up
            mask = torch.arange(labels.shape[1], device=labels.device) < target_lengths[:, None]
        lengths = input_lengths.to(torch.int64), target_lengths.to(torch.int64)
        rows = log_probs.transpose(0, 1)
        losses: Tensor = CtcByRows.apply(rows, labels.to(torch.int64), mask, *lengths, blank, zero_infinity)  # type: ignore[no-untyped-call]
        if zero_infinity:
            losses = torch.where(losses == torch.inf, torch.zeros_like(losses), losses)
        if reduction == MEAN:
            losses = (losses / lengths[1].clamp_min(1).to(losses.dtype)).mean()
        elif reduction == SUM:
            losses = losses.sum()
        return losses


__all__ = ["CtcLosses"]
