"""Where a residual stream begins with a product, and where a product makes scores: still Megatron's plan, and equal to
one device.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from test_tensor import ALONE, PLAIN, check, model, oracle
from torch import Tensor, nn
from torch.nn import functional as F

from communicating import communicated
from shardwise.core.tensor_options import Tensor as Kind
from shardwise.lower.compiled import Compiled
from shardwise.parallel.tensor import tensor_parallel

WIDTH, WORDS = 12, 36


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.norm(x) if scale is None else self.norm(x) * scale
        return x + self.down(F.gelu(self.up(h)))


class Begun(nn.Module):
    """A stream that begins with a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = (
            nn.Linear(5, WIDTH),
            nn.ModuleList(Layer() for _ in range(2)),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).square().mean()


class Modulated(nn.Module):
    """A stream that is multiplied by what a product makes of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layers = nn.Parameter(torch.randn(WIDTH)), nn.ModuleList(Layer() for _ in range(2))
        self.first, self.scales = nn.Linear(5, WIDTH), nn.Linear(5, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer, scale in zip(self.layers, self.scales(x[:, :1]).chunk(2, -1), strict=True):
            h = layer(h, 1 + scale)
        return (h + self.shift).square().mean()


class Scores(nn.Module):
    """A product right before the scores of a vocabulary, as BERT has it, and a loss over these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(F.gelu(self.first(x)))
        return F.cross_entropy(scores.flatten(0, 1), (x[..., 0].abs() * 7).long().flatten() % WORDS)


MODELS: dict[str, type[nn.Module]] = {"begun": Begun, "modulated": Modulated, "scores": Scores}


@functools.cache
def subject(name: str) -> tuple[Compiled, list[dict[str, Tensor]], list]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    module = MODELS[name]().double()
    batches = [{"x": torch.randn(rows, 4, 5, dtype=torch.float64)} for rows in (7, 5)]
    return Compiled(module, ALONE, batches[0]), batches, oracle(module, None, batches, PLAIN, 1)


def collectives(one: Compiled, path: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, _, where), n in communicated(one.general).items():
        if where.startswith(path) and kind != "slice":
            found[kind] += n
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_device(name: str, kind: Kind, tp: int) -> None:
    one, batches, truth = subject(name)
    check(one.under(tensor_parallel(ALONE, tp, kind)), batches, truth, PLAIN)


@pytest.mark.parametrize("name", ["begun", "modulated"])
def test_a_layer_sums_once_forward_and_once_backward(name: str) -> None:
    one = subject(name)[0].under(tensor_parallel(ALONE, 2, "1d"))
    placed = {p.name: str(p.placed) for b in one.general.buckets for p in b.parameters}
    for i in range(2):
        found = collectives(one, f"layers.{i}")
        assert (found["all_reduce"], found["all_reduce in backward"], found["all_gather in backward"]) == (1, 1, 0)
        assert (
            ":tp" in placed[f"layers.{i}.up.weight"].partition(",")[0]
            and ":tp" in placed[f"layers.{i}.down.weight"].partition(",")[2]
        )

    assert (
        collectives(one, "")["all_gather"] == {"begun": 1, "modulated": 2}[name]
    )  # of each product that has no layer of its own


@pytest.mark.slow
def test_vit_communicates_as_megatron_does() -> None:
    """What the patches become is gathered once; then a layer communicates as any other transformer's."""
    one = model("vit")[0].under(tensor_parallel(ALONE, 2, "1d"))
    assert collectives(one, "vit.embeddings") == {"all_gather": 1}
    for i in range(2):
        assert collectives(one, f"vit.layers.{i}") == {"all_reduce": 2, "all_reduce in backward": 2}


@pytest.mark.parametrize("kind", ["1d", "1d-sp"])
def test_scores_are_never_whole(kind: Kind) -> None:
    general = subject("scores")[0].under(tensor_parallel(ALONE, 2, kind)).general
    placed = {p.name: str(p.placed) for b in general.buckets for p in b.parameters}
    assert ":tp" in placed["head.weight"].partition(",")[0]
    kinds = {kind for (kind, _, where), _ in communicated(general).items() if where in ("", "head")}
    assert "all_reduce" not in kinds


def test_a_chain_takes_turns() -> None:
    """Without anything that is added there is no stream: by columns, then by rows."""
    module = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 24)).double()
    batch = {"input": torch.randn(4, 6, dtype=torch.float64)}
    one = Compiled(module, tensor_parallel(ALONE, 2, "1d"), batch, lambda output, _: output.square().mean())
    placed = {p.name: str(p.placed) for b in one.general.buckets for p in b.parameters}
    assert ":tp" in placed["0.weight"].partition(",")[0] and ":tp" in placed["3.weight"].partition(",")[2]
