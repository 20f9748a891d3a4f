"""Pictures of a circle, a square, a cross or stripes, each at a random place under noise, and a network for them."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SHAPES = ("circle", "square", "cross", "stripes")
SIZE = 32  # pixels along each side


class Pictures(Dataset[dict[str, Tensor]]):
    """Each item has an image of shape (3, 32, 32) and the number of its shape, a scalar; item i is always the same."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        label = index % len(SHAPES)
        middle = torch.rand(2, generator=random) * 12 + 10
        y, x = torch.meshgrid(torch.arange(SIZE) - middle[0], torch.arange(SIZE) - middle[1], indexing="ij")
        drawn = (
            x**2 + y**2 < 64,
            torch.maximum(x.abs(), y.abs()) < 7,
            (torch.minimum(x.abs(), y.abs()) < 2.5) & (torch.maximum(x.abs(), y.abs()) < 9),
            ((x + y) % 8 < 4) & (torch.maximum(x.abs(), y.abs()) < 8),
        )[label]
        colour = torch.rand(3, 1, 1, generator=random) + 0.5
        image = drawn * colour + 0.3 * torch.randn(3, SIZE, SIZE, generator=random)
        return {"image": image, "label": torch.tensor(label)}


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    """A convolution has no bias here, for the BatchNorm behind it subtracts the mean anyway."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, width, 2 * width, 4 * width)
        self.blocks = nn.Sequential(
            block(3, width, 1), *(block(a, b, 2) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.head = nn.Linear(widths[-1], len(SHAPES))

    def forward(self, image: Tensor) -> Tensor:
        """Return scores (B, 4) for images (B, 3, 32, 32); the argument has the name of a field of the batch."""
        return self.head(self.blocks(image).mean((2, 3)))


def pictures(count: int) -> Dataset[dict[str, Tensor]]:
    return Pictures(count)


def network(width: int) -> nn.Module:
    return Network(width)


def loss(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy; ``batch`` has the dataset's fields, stacked: image and label."""
    return F.cross_entropy(scores, batch["label"])
