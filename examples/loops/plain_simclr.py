"""SimCLR: two views of each picture, whose features are to be alike and unlike those of the others in the batch."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.head(self.backbone(x))


def info_nce_loss(features, n_views, temperature):
    """Return the scores of each view against all others, the right one first, and the labels that say so."""
    labels = torch.cat([torch.arange(features.shape[0] // n_views) for _ in range(n_views)])
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity[~labels.bool()].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1) / temperature
    return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def accuracy(output, target):
    return (output.topk(1, dim=1).indices.squeeze(1) == target).double().mean()


def main(log=print):
    torch.manual_seed(0)
    pictures = torch.randn(24, 1, 8, 8)
    model = Encoder()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for _ in range(2):
        for x in pictures.split(8):
            images = torch.cat([x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)], dim=0)
            features = model(images)
            logits, labels = info_nce_loss(features, n_views=2, temperature=0.1)
            loss = criterion(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            log(loss.item())
            log(accuracy(logits, labels).item())


if __name__ == "__main__":
    main()
