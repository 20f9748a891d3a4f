"""A graph convolutional network: one graph, whose nodes' classes are known for some; accuracy on the others."""

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import distribute


class GCNConv(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x, edge_index):
        source, target = edge_index
        degree = torch.zeros(x.size(0)).index_add(0, target, torch.ones(target.size(0)))
        weight = (degree[source] * degree[target]).pow(-0.5)
        messages = self.linear(x)[source] * weight.unsqueeze(-1)
        return torch.zeros(x.size(0), messages.size(1)).index_add(0, target, messages)


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, hidden), GCNConv(hidden, classes)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


def graph(nodes=24, classes=3):
    """Return features, edges and classes: nodes of a class are mostly connected to each other."""
    y = torch.arange(nodes) % classes
    alike = (y[:, None] == y[None, :]) & (torch.rand(nodes, nodes) < 0.5)
    linked = alike | (torch.rand(nodes, nodes) < 0.05) | torch.eye(nodes, dtype=torch.bool)
    return F.one_hot(y, 5) + torch.randn(nodes, 5), (linked | linked.t()).nonzero().t().contiguous(), y


def main(log=print):
    torch.manual_seed(0)
    x, edge_index, y = graph()
    train_mask = torch.arange(len(y)) % 2 == 0
    model = GCN(5, 8, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)
    model, optimizer = distribute(model, optimizer)
    for _ in range(6):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.nll_loss(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        pred = model(x, edge_index).argmax(dim=1)
        log(float(loss))
        log(int((pred[~train_mask] == y[~train_mask]).sum()) / int((~train_mask).sum()))


if __name__ == "__main__":
    main()
