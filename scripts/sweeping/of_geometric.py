"""The zoo of torch_geometric: five nets on graphs of a batch, a row for each graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweeping.case import LABELS, Case, Draws, Entry, batches

NODES, EDGES, WIDTH = 6, 14, 16
NETS = ("gcn", "gat", "sage", "gin", "transformer")


def entries() -> Iterator[Entry]:
    """Return the nets; :class:`ImportError` where torch_geometric is not installed."""
    import torch_geometric.nn  # noqa: F401

    for name in NETS:
        yield Entry("torch_geometric", name, "graphs", lambda n=name: graphs(n))


class Graphs(nn.Module):
    """Layers of a net over the graphs of a batch, which are put together as torch_geometric does: their nodes follow
    each other, and the numbers of the edges' ends are raised by the nodes before."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(8, WIDTH), layer(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return scores of classes; ``x`` is of shape (graphs, nodes, 8), ``edges`` of (graphs, 2, edges)."""
        graphs, nodes = x.shape[:2]
        raised = edges + torch.arange(graphs, device=x.device)[:, None, None] * nodes
        ends = raised.transpose(0, 1).reshape(2, -1)
        y = x.flatten(0, 1)
        for layer in self.layers:
            y = F.relu(layer(y, ends))
        return self.head(y.view(graphs, nodes, -1).mean(1))


def loss(output: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a class for each graph."""
    return F.cross_entropy(output, fields["label"])


def graphs(name: str) -> Case:
    """Return a net that classifies graphs."""
    import torch_geometric.nn as g

    torch.manual_seed(0)
    layers: dict[str, Callable[[int, int], Any]] = {
        "gcn": g.GCNConv,
        "gat": lambda a, b: g.GATConv(a, b // 2, heads=2),
        "sage": g.SAGEConv,
        "gin": lambda a, b: g.GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
        "transformer": lambda a, b: g.TransformerConv(a, b // 2, heads=2),
    }

    def batch(draws: Draws) -> dict[str, Tensor]:
        edges = draws.integers(0, NODES, 2, EDGES)
        return {"x": draws.numbers(NODES, 8), "edges": edges, "label": draws.integers(0, LABELS)}

    return Case(Graphs(layers[name]).train(), batches(batch), loss)
