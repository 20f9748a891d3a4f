"""One value for all that a mask picks is chosen where the mask is true, so that no row needs another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

WIDTH = 4


class Put(nn.Module):
    """It puts something into the places of a mask."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.head, self.what = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2), what
        self.vector = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh().clone()
        mask = mask > 0
        if self.what == "a number":
            h[mask] = 0.5
        elif self.what == "a vector":
            h[mask] = self.vector
        elif self.what == "in rows":
            h[mask[:, 0]] = self.vector
        elif self.what == "in elements":
            h[mask[..., None] & (h > 0)] = self.vector.sum()
        elif self.what == "a sum":
            h = h.index_put((mask,), self.vector, accumulate=True)
        else:
            h[mask] = h[mask] * 2
        return F.cross_entropy(self.head(h.mean(1)), y)


def batch(seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(6, 5, 3, generator=own), "mask": torch.randint(0, 2, (6, 5), generator=own),
        "y": torch.randint(0, 2, (6,), generator=own),
    }  # fmt: skip


@pytest.mark.parametrize("what", ["a number", "a vector", "in rows", "in elements", "a sum", "one value each"])
def test_what_a_mask_puts(what: str) -> None:
    torch.manual_seed(0)
    chooses = what not in ("a sum", "one value each")
    plan = data_parallel(Plan.of(microbatches=2 if chooses else 1), 2)
    assert verify(Put(what), [batch(0), batch(1)], plan).passed
    made = Compiled(Put(what), Plan.of(precision="fp64"), batch(0)).general
    targets = {str(node.target) for unit in made.units for node in unit.graph.nodes}
    assert ("aten.index_put.default" in targets) is not chooses
    assert not made.meets or not chooses
