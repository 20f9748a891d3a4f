"""Connectionist temporal classification (Graves et al. 2006, section 4) by rows, with all tensors of fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class CtcByRows(torch.autograd.Function):
    """The CTC losses (N,) of log-probabilities ``log_probs`` (N, T, C), of which a row has ``input_lengths`` (N,).

    The labels of a row are those of ``labels`` (N, S), int64, where ``mask`` (N, S) is true; ``target_lengths`` (N,)
    says how many these are.  A row that has no alignment has an infinite loss, or none with ``zero_infinity``."""

    independent_rows = True
    """Each row of the results follows from that of the operands: no trial on random numbers, which are no labels, has
    to show it."""

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, labels: Tensor, mask: Tensor, input_lengths: Tensor, target_lengths: Tensor,
        blank: int, zero_infinity: bool,
    ) -> Tensor:  # fmt: skip
        if _without_values(log_probs):
            rows, steps, _ = log_probs.shape
            losses, alpha = log_probs.new_empty(rows), log_probs.new_empty(rows, steps, 2 * labels.shape[1] + 1)
            targets = labels
        else:
            order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # the labels that count come first
            targets = labels.gather(1, order).masked_fill(~mask.gather(1, order), blank)
            losses, alpha = aten._ctc_loss.Tensor(
                log_probs.transpose(0, 1), targets, input_lengths, target_lengths, blank, zero_infinity
            )
        ctx.save_for_backward(log_probs, targets, input_lengths, target_lengths, losses, alpha)
        ctx.options = blank, zero_infinity
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, targets, input_lengths, target_lengths, losses, alpha = ctx.saved_tensors
        if _without_values(log_probs):
            return torch.empty_like(log_probs), *[None] * 6
        found = aten._ctc_loss_backward.Tensor(
            gradients[0].contiguous(), log_probs.transpose(0, 1), targets, input_lengths, target_lengths, losses, alpha,
            *ctx.options,
        )  # fmt: skip
        return found.transpose(0, 1), *[None] * 6


def _without_values(tensor: Tensor) -> bool:
    """Whether a tensor only stands for others, of which the lengths in alignments cannot be read."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")


__all__ = ["CtcByRows"]
