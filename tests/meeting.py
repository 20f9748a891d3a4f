"""Models in which rows meet whose values depend on parameters: BatchNorm, in-batch negatives, terms of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel

ROWS = 7


class Norms(nn.Module):
    """BatchNorms in blocks, with and without weights and running statistics, over images and over features.

    No bias comes before them: its gradient would be zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4, track_running_stats=i != 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, bias=False)
            )
            for i in range(3)
        )
        self.norm, self.head = nn.BatchNorm1d(4, affine=False, momentum=0.3), nn.Linear(4, 3)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), label)


class Towers(nn.Module):
    """In-batch negatives of two towers; each has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out, self.scale = nn.Linear(4, 5), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for one in self.left:
            x = x + one(x).tanh()
        for one in self.right:
            z = z + one(z).tanh()
        scores = self.scale * F.normalize(x, dim=-1) @ F.normalize(self.out(z), dim=-1).T
        right = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class Covariance(nn.Module):
    """VICReg's terms: variance and covariance of the features of the batch, and means in a product and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.body(x).tanh())
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(x) - 1)
        off = covariance.square().sum() - covariance.diagonal().square().sum()
        spread = F.relu(1 - (covariance.diagonal() + 1e-4).sqrt()).mean()
        return off + spread + z.square().mean() * z.exp().mean() + (z.mean(0).square().sum() + 1).sqrt()


class Supervised(nn.Module):
    """Each row attracts the others of its class (Khosla et al., arXiv 2004.11362)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        z = F.normalize(self.body(x), dim=-1)
        logits = z @ z.T / 0.5
        alike = (label[:, None] == label[None]).to(z.dtype) - torch.eye(len(x), dtype=z.dtype)
        scores = logits - (logits.exp() * (1 - torch.eye(len(x), dtype=z.dtype))).sum(1, keepdim=True).log()
        return -((alike * scores).sum(1) / alike.sum(1).clamp(min=1)).mean()


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    fields: tuple[str, ...]
    loss: Any = None


MODELS: dict[str, Case] = {
    "norms": Case(Norms, ("image", "label")),
    "towers": Case(Towers, ("x", "z")),
    "covariance": Case(Covariance, ("x",)),
    "supervised": Case(Supervised, ("x", "label")),
    "resnet": Case(lambda: zoo.make("resnet").module, ("pixel_values", "labels")),
    "mixtral": Case(lambda: zoo.make("mixtral balanced").module, ("input_ids", "labels")),
}


def batch(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)
    every = {
        **zoo.tokens(rows=rows),
        "image": torch.randn(rows, 3, 6, 6, generator=made), "label": torch.randint(0, 3, (rows,), generator=made),
        "x": torch.randn(rows, 5, generator=made), "z": torch.randn(rows, 4, generator=made),
        "pixel_values": zoo.images(rows),
    }  # fmt: skip
    if name == "resnet":
        every["labels"] = zoo.classes(rows)
    return {field: every[field] for field in MODELS[name].fields}


def in_fp64(name: str, rows: int) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch(name, rows).items()}


def planned(dp: int, zero: int, microbatches: int, recompute: Any, tp: int = 1, **more: Any) -> Plan:
    plan = Plan.of(microbatches=microbatches, recompute=recompute, precision="fp64", rows="batch", **more)
    plan = data_parallel(plan, dp, zero)
    return plan.replace(mesh=Mesh((*plan.mesh.axes, Axis("tp", tp)))) if tp > 1 else plan
