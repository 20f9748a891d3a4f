"""Rows that look up their own elements by numbers of the whole batch: microbatches count them from their own rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

NODES, WIDTH = 4, 6


class Graphs(nn.Module):
    """Two layers of messages along the edges of graphs, whose nodes follow each other; ``turned`` mixes the graphs."""

    def __init__(self, loops: bool = False, turned: bool = False, fixed: bool = False) -> None:
        super().__init__()
        self.loops, self.turned, self.fixed = loops, turned, fixed
        self.layers = nn.ModuleList([nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edges: Tensor, label: Tensor) -> Tensor:
        rows = len(x) if self.fixed else x.shape[0]
        first = torch.arange(rows)
        source, goal = (edges + (first * NODES)[:, None, None]).transpose(0, 1).reshape(2, -1).unbind()
        if self.turned:
            source = (edges[:, 0] + first.flip(0)[:, None] * NODES).flatten()
        if self.loops:
            kept = source != goal
            every = torch.arange(rows * NODES)
            source, goal = torch.cat([source[kept], every]), torch.cat([goal[kept], every])
        h = x.flatten(0, 1)
        for layer in self.layers:
            y = layer(h)
            h = torch.tanh(torch.zeros_like(y).index_add(0, goal, F.dropout(y[source], 0.0)))
        return F.cross_entropy(self.head(h.view(rows, NODES, -1).mean(1)), label)


def graphs(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, NODES, 3, generator=own, dtype=torch.float64),
        "edges": torch.randint(0, NODES, (rows, 2, 7), generator=own),
        "label": torch.randint(0, 3, (rows,), generator=own),
    }


PLANS = {
    "microbatches": Plan.of(microbatches=3),
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(Plan.of(microbatches=2), 2, zero=3),
    "all": Plan.of(Mesh.of(pp=2, dp=2, tp=2), microbatches=2, schedule="1f1b"),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_of_a_batch(plan: str, loops: bool, fixed: bool) -> None:
    torch.manual_seed(0)
    report = verify(Graphs(loops, fixed=fixed).double(), [graphs(7, 1), graphs(5, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_number_of_another_row_is_refused(fixed: bool) -> None:
    wrong = graphs(6, 2)
    wrong["edges"][1, 0, 3] = NODES
    assert verify(Graphs(fixed=fixed).double(), [graphs(6, 1), wrong], Plan.of()).passed
    with pytest.raises(ConfigError, match=r"batch: a row looks up elements of another in .* legal: microbatches = 1"):
        verify(Graphs(fixed=fixed).double(), [graphs(6, 1), wrong], Plan.of(microbatches=2))


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_that_are_mixed_are_refused(fixed: bool) -> None:
    """The numbers look like those of own rows, but each row takes messages of another: a trial shows it."""
    model = Graphs(turned=True, fixed=fixed).double()
    assert verify(model, [graphs(6, 1)], data_parallel(Plan.of(), 2)).passed
    with pytest.raises(ConfigError, match="microbatches: 2 are not possible: rows meet in "):
        verify(model, [graphs(6, 1)], Plan.of(microbatches=2))
