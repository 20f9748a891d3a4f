"""Convolution nets are sharded by channels, with groups and norms of them; so are tables of positions, weights that are
made of others, and queries beside one head of keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.units.trace import Trace
from shardwise.verify.verify import verify

PLANS = {
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "tp-dp": tensor_parallel(Plan.of(Mesh.of(dp=2)), 2, "1d"),
    "tp-zero3": tensor_parallel(data_parallel(Plan.of(), 2, 3), 2, "1d"),
    "tp3-sp": tensor_parallel(Plan.of(), 3, "1d-sp"),
    "tp4": tensor_parallel(Plan.of(), 4, "1d"),
}


class Squeezed(nn.Module):
    """A block of RegNet (Radosavovic et al., arXiv 2003.13678): three groups, between two norms, and a gate for each
    channel."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(wide, wide, 1, bias=False), nn.Conv2d(wide, wide, 1, bias=False)
        self.groups = nn.Conv2d(wide, wide, 3, padding=1, groups=3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wide), nn.GroupNorm(3, wide), nn.BatchNorm2d(wide)])
        self.down, self.up = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.groups(F.relu(self.norms[0](self.first(x))))).relu()
        gate = self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        return F.relu(x + self.norms[2](self.last(y * gate)))


class Depthwise(nn.Module):
    """A block of ConvNeXt (Liu et al., arXiv 2201.03545): each channel by itself, then twice as many of them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.each, self.norm = nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.LayerNorm(wide)
        self.up, self.down = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.each(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)


class Standard(nn.Conv2d):
    """A convolution whose weight is standardised for each of its outputs (Qiao et al., arXiv 1903.10520), perhaps with
    a gain."""

    def __init__(self, wide: int, gain: bool) -> None:
        super().__init__(wide, wide, 3)
        self.gain = nn.Parameter(torch.ones(wide, 1, 1, 1)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        scale = None if self.gain is None else (self.gain * 0.5).view(-1)
        flat = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, scale, training=True)
        return F.conv2d(x, flat.reshape_as(self.weight), self.bias, padding=1)


class Channels(nn.Module):
    """Such blocks, between pooling and resizing, and a convolution of groups that takes them to more channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True)
        self.blocks = nn.ModuleList([Squeezed(6), Depthwise(6)])
        self.wider = nn.ConvTranspose2d(6, 12, 2, 2, groups=3)
        self.standard = nn.Sequential(Standard(12, gain=False), Standard(12, gain=True))
        self.reweighed = weight_norm(nn.Conv2d(12, 12, 3, groups=4), dim=2)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.stem(x)), 2)
        for block in self.blocks:
            x = block(x)
        x = F.interpolate(self.wider(x), scale_factor=0.5, mode="bilinear")
        return F.cross_entropy(self.head(self.reweighed(self.standard(x)).mean((2, 3))), y)


class Each(nn.Module):
    """Two blocks of ConvNeXt whose input is whole, with fewer channels than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Depthwise(3) for _ in range(2)), nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Queries(nn.Module):
    """Words and positions, attention with one head of keys, whose weight has the queries too, and a weight that is
    applied to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(48, 12), nn.Embedding(32, 12)
        self.both, self.out, self.head = nn.Linear(12, 4 * 3 + 6), nn.Linear(12, 12), nn.Linear(12, 48)
        self.relative, self.project = nn.Parameter(torch.randn(5, 12)), nn.Linear(12, 12)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        q, k, v = self.both(x).split([12, 3, 3], -1)
        q = q.unflatten(-1, (4, 3)).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k[:, None], v[:, None], enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2)) + self.project(self.relative)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Added(nn.Module):
    """Nodes of a graph that add up what their neighbours say, and differences along a sequence of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("source", torch.tensor([0, 1, 2, 3, 4, 0]))
        self.register_buffer("goal", torch.tensor([1, 2, 0, 0, 3, 4]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)  # (rows, nodes, width)
        h = torch.zeros_like(h).index_add(1, self.goal, h[:, self.source])
        h = h + torch.fft.fftn(h, dim=(1, 2)).real * 0.1 + (h @ torch.eye(8)).diff(dim=1, prepend=h[:, :1])
        start = self.out.weight.mean(1).repeat(len(x), 1)
        return F.cross_entropy(self.out(h.mean(1)) + start, y)


class Between(nn.Module):
    """Six blocks, with a norm of sharded channels by itself behind the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(self.norm(x).relu() if i == 4 else x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def pictures(rows: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 3, 12, 12), "y": torch.randint(0, 3, (rows,))}


def texts(rows: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 48, (rows, 5)), "y": torch.randint(0, 48, (rows, 5))}


def graphs(rows: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 5, 6), "y": torch.randint(0, 3, (rows,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "channels": (Channels, pictures), "each": (Each, pictures), "queries": (Queries, texts), "added": (Added, graphs),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def trace(name: str) -> Trace:
    return Compiled(made(name), tensor_parallel(Plan.of(), 2, "1d"), MODELS[name][1]()).general


def whole(found: Trace) -> set[str]:
    """The names of the parameters that all ranks have whole."""
    return {p.name for p in found.parameters if p.layout is None}


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_to_the_numbers_of_one_device(name: str, plan: str) -> None:
    report = verify(made(name), [MODELS[name][1]()], PLANS[plan])
    assert report.passed, report.worst[:3]


@pytest.mark.slow
def test_a_convolution_net_is_sharded_by_channels() -> None:
    found = trace("channels")
    kept = whole(found)
    sizes = {name: math.prod(p.shape) for name, p in made("channels").named_parameters()}
    assert not found.replicated
    assert not {name for name in kept if name.endswith("weight") and sizes[name] > 12}
    assert sum(sizes[name] for name in kept) < 0.1 * sum(sizes.values())


def test_a_rank_of_a_pipeline_has_the_statistics_of_its_channels() -> None:
    torch.manual_seed(0)
    plan = pipeline(tensor_parallel(Plan.of(microbatches=2), 2, "1d"), 2, "1f1b")
    report = verify(Between(), [pictures(5), pictures(4)], plan)
    assert report.passed, report.worst[:3]


def test_a_convolution_of_each_channel_of_a_whole_value_is_gathered() -> None:
    layouts = {p.name: p.placed for p in trace("each").parameters}
    dims = {
        name: [any(f.axes for f in dim) for dim in layouts[f"blocks.0.{name}.weight"].dims] for name in ("each", "up")
    }
    assert dims == {"each": [True, False, False, False], "up": [True, False]}  # a product by columns reads it whole


def test_positions_are_sharded_by_rows_and_a_weight_with_the_queries_is_cut() -> None:
    found = trace("queries")
    assert not found.replicated
    assert not whole(found) & {"words.weight", "positions.weight", "both.weight", "project.weight", "head.bias"}


def test_what_adds_up_and_transforms_has_rules() -> None:
    found = trace("added")
    assert not found.replicated and "body.weight" not in whole(found)
