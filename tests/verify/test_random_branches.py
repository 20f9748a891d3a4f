"""Models that decide by random numbers in Python (LayerDrop): all ranks decide alike, as one device does."""

from __future__ import annotations

import pytest
import torch
from test_read_in_python import PLANS
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.capture.coins import Drawing
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import verify

WIDTH, CLASSES, STEPS = 6, 5, 6
ADAMW = OptimizerChoice("adamw", lr=0.05, weight_decay=0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class LayerDrop(nn.Module):
    """It skips layers by chance (Fan et al. 2020, section 3.2), and adds noise of a chance kind.

    With ``reads`` it decides by values that depend on parameters too.
    """

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers, self.reads = nn.ModuleList([Layer(), Layer(), Layer()]), reads

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.entry(x)
        for layer in self.layers:
            chance = torch.rand([])
            if not self.training or chance > 0.35:
                h = layer(h)
        if self.training and torch.randint(0, 3, (1,)).item() == 2:
            h = h + 0.1 * torch.rand_like(h)
        if self.reads and (h > 1e3).any():  # never
            h = h / 2
        return F.cross_entropy(self.head(h.mean(1)), label)


class Opaque(LayerDrop):
    """No part of its ``forward`` may run as written: it is not captured."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        if (self.entry(x) > 1e3).any() and locals():  # never
            x = x / 2
        return super().forward(x, label)


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, 4, generator=own, dtype=torch.float64)
    return {"x": x, "label": torch.randint(CLASSES, (rows,), generator=own)}


BATCHES = [batch(5 if step == 3 else 6, step) for step in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["chance", "values too"])
@pytest.mark.parametrize("plan", PLANS)
def test_chance_decides_for_all_ranks(plan: str, reads: bool) -> None:
    torch.manual_seed(0)
    report = verify(LayerDrop(reads), BATCHES, PLANS[plan], optimizer=ADAMW)
    assert report.passed, report
    assert not [note for note in report.notes if "not captured" in note]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["alone", "microbatches", "dp"])
def test_chance_decides_in_models_that_are_not_captured(plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Opaque(), BATCHES, PLANS[plan], optimizer=ADAMW)
    assert report.passed, report
    assert [note for note in report.notes if "not captured" in note]


@pytest.mark.slow
def test_layers_are_skipped_as_often_as_they_should_be() -> None:
    compiled = Compiled(LayerDrop(), Plan.of(precision="fp64"), BATCHES[0])
    assert compiled.general.opaque is None
    used = [0, 0, 0]
    for step in range(60):
        found = compiled.deciding(BATCHES[0], {}, Drawing(0, step))
        names = {p.name for p in found.general.parameters}
        for number in range(3):
            used[number] += f"layers.{number}.up.weight" in names
    assert all(28 <= one <= 50 for one in used), used  # 39 are expected, with a deviation of 3.7
    assert len(compiled._decided) < 3 * 2**3


@pytest.mark.slow
def test_the_first_capture_has_all_layers() -> None:
    compiled = Compiled(LayerDrop(), Plan.of(precision="fp64"), BATCHES[0])
    assert compiled.general.opaque is None
    assert {p.name for p in compiled.general.parameters} == {name for name, _ in LayerDrop().named_parameters()}


class ByRows(nn.Module):
    """It decides by numbers that are drawn for rows, and some ``more``."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.entry, self.more = nn.Linear(4, 1), more

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape[0] + self.more)
        return self.entry(x).mean() * (2 if drawn.max() > 0.7 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1])
def test_numbers_of_rows_decide_nothing(more: int) -> None:
    fields = {"x": BATCHES[0]["x"]}
    with pytest.raises(ConfigError, match="tp: the model could not be captured"):
        Compiled(ByRows(more), Plan.of(Mesh.of(tp=2)), fields)
