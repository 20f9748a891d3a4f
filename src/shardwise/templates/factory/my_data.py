"""Data of your own: sums of two waves with noise, each cut into a series and the values that follow its values."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Waves(Dataset[dict[str, Tensor]]):
    """Each item is a dict of tensors; those of a batch are stacked, and go to the model's forward by their names."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)  # item i is the same on every rank
        times = torch.arange(self.length + 1)
        steps, starts = torch.rand(2, 2, 1, generator=random)
        waves = torch.sin(times * (0.1 + 0.4 * steps) + 6.3 * starts).sum(0)
        values = waves + 0.05 * torch.randn(self.length + 1, generator=random)
        return {"series": values[:-1], "following": values[1:]}


def dataset(count: int, length: int) -> Dataset[dict[str, Tensor]]:
    return Waves(count, length)
