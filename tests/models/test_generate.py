"""Sampling token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import generate


class Fixed(nn.Module):
    """The same logits at every place."""

    def __init__(self, *likely: float) -> None:
        super().__init__()
        self.register_buffer("logits", torch.tensor(likely).log())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.get_buffer("logits").expand(*input_ids.shape, -1)


START = torch.zeros(1, 1, dtype=torch.long)


def drawn(model: nn.Module, tokens: int = 400, **options: float) -> Tensor:
    found = generate(model, START, tokens, generator=torch.Generator().manual_seed(1), **options)  # type: ignore[arg-type]
    return torch.bincount(found[0, 1:], minlength=4) / tokens


def test_likely_tokens_alone_are_drawn_in_their_proportions() -> None:
    model = Fixed(0.4, 0.3, 0.2, 0.1)
    assert drawn(model).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.08)
    two = [4 / 7, 3 / 7, 0, 0]
    assert drawn(model, top_k=2).tolist() == pytest.approx(two, abs=0.08)
    assert drawn(model, top_p=0.65).tolist() == pytest.approx(two, abs=0.08), "the fewest that make up 0.65"
    assert drawn(model, top_p=0.3).tolist() == [1, 0, 0, 0] == drawn(model, top_p=0.0).tolist()
    assert drawn(model, top_k=9, top_p=1.0).tolist() == drawn(model).tolist()
    assert drawn(model, top_k=3, top_p=0.7).tolist() == pytest.approx(two, abs=0.08), "of the three likeliest"


def test_the_order_of_tokens_does_not_matter() -> None:
    assert drawn(Fixed(0.1, 0.2, 0.4, 0.3), top_p=0.65).tolist() == pytest.approx([0, 0, 4 / 7, 3 / 7], abs=0.08)
    assert drawn(Fixed(0.1, 0.2, 0.4, 0.3), temperature=0).tolist() == [0, 0, 1, 0]


def test_a_token_that_ends_the_text() -> None:
    assert generate(Fixed(0.1, 0.9), START, 10, 0.0, stop=1).tolist() == [[0, 1]]
    assert generate(Fixed(0.9, 0.1), START, 3, 0.0, stop=1).tolist() == [[0, 0, 0, 0]]
    assert generate(Fixed(0.1, 0.9), START.expand(2, 1), 3, 0.0, stop=1).shape == (2, 4), "only with one row"
