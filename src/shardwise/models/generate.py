"""Sample from a language model, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: Tensor,
    tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return ``ids`` (B, S) followed by ``tokens`` sampled ones: (B, S + tokens).

    The model takes ``input_ids`` and returns logits (B, S, V) or an output with ``.logits``; it sees no more than its
    last ``model.context`` tokens, where it has such an attribute.  ``temperature`` 0 takes the likeliest token.
    ``top_k`` leaves only as many of the likeliest tokens, and ``top_p`` only the fewest that are together as likely as
    that.  With one row the token ``stop`` ends the text.  ``generator`` has to be on the device of ``ids``.  The
    model's training mode is as before afterwards.
    """
    context = getattr(model, "context", None)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for _ in range(tokens):
            output = model(input_ids=ids if context is None else ids[:, -context:])
            logits = (output if isinstance(output, Tensor) else output.logits)[:, -1].float()
            if temperature > 0:
                weights = torch.softmax(_likely(logits / temperature, top_k, top_p), dim=-1)
                chosen = torch.multinomial(weights, 1, generator=generator)
            else:
                chosen = logits.argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, chosen), dim=1)
            if stop is not None and ids.shape[0] == 1 and int(chosen) == stop:
                break
    finally:
        for module, mode in training.items():
            module.training = mode
    return ids


def _likely(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return logits (B, V) in which those of tokens that are not to be drawn are minus infinity."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        likely = ordered.softmax(dim=-1)
        beyond = likely.cumsum(dim=-1) - likely >= top_p
        beyond[:, 0] = False  # the likeliest always stays
        ordered = ordered.masked_fill(beyond, -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, places, ordered)
    return logits
