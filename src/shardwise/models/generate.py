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
) -> Tensor:
    """Return ``ids`` (B, S) followed by ``tokens`` sampled ones: (B, S + tokens).

    The model takes ``input_ids`` and returns logits (B, S, V) or an output with ``.logits``; it sees no more than its
    last ``model.context`` tokens, where it has such an attribute.  ``temperature`` 0 takes the likeliest token.
    ``generator`` has to be on the device of ``ids``.  The model's training mode is as before afterwards.
    """
    context = getattr(model, "context", None)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for _ in range(tokens):
            output = model(input_ids=ids if context is None else ids[:, -context:])
            logits = (output if isinstance(output, Tensor) else output.logits)[:, -1].float()
            if temperature > 0:
                weights = torch.softmax(logits / temperature, dim=-1)
                chosen = torch.multinomial(weights, 1, generator=generator)
            else:
                chosen = logits.argmax(dim=-1, keepdim=True)
            ids = torch.cat((ids, chosen), dim=1)
    finally:
        for module, mode in training.items():
            module.training = mode
    return ids
