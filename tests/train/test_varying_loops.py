"""Loops whose batches vary in shape: what is captured serves all shapes, and the numbers are those of one device."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captures import apart
from processes import run_processes
from shardwise import Plan
from shardwise.train.distribute import distribute

LENGTHS = (7, 12, 5, 12, 9, 7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(11, 6), nn.Conv1d(6, 6, 3, padding=1), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    pairs = ((torch.randint(0, 11, (2, 6, n), generator=generator)).unbind() for n in LENGTHS)
    return [(tokens, targets.masked_fill(targets == 0, -100)) for tokens, targets in pairs]


def looped(model: Any, optimizer: Any, by_sizes: bool = False) -> list[float]:
    losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        logits = model(tokens)
        if by_sizes:
            loss = F.cross_entropy(logits.reshape(6 * tokens.shape[1], 11), targets.flatten())
        else:
            loss = F.cross_entropy(logits.transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    for tokens, _ in batches()[:3]:
        losses.append(model(tokens).square().mean().item())
    return losses


def both(plan: Plan, by_sizes: bool = False) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain = Net().double()
    ours = copy.deepcopy(plain)
    expected = looped(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), by_sizes)
    return expected, looped(*distribute(ours, torch.optim.AdamW(ours.parameters(), lr=0.05), plan), by_sizes)


@pytest.mark.parametrize("by_sizes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_over_lengths_is_that_of_one_device(by_sizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that computes with sizes is captured for each; another for one, and then for all."""
    exported: list[int] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: exported.append(1) or export(*a, **k))
    monkeypatch.setattr("shardwise.train.loop_model.FORMS", 3)  # traces that went are made again
    with apart():
        expected, found = both(Plan.of(precision="fp64"), by_sizes)
    assert found == pytest.approx(expected, rel=1e-10)
    assert len(exported) >= 5 if by_sizes else len(exported) == 4  # two in training, two in evaluation


SCRIPT = """
import json, sys
from test_varying_loops import both
from shardwise import Mesh, Plan
axes = json.loads(sys.argv[1])
print(json.dumps(both(Plan.of(Mesh.of(**axes), precision="fp64", microbatches=2))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}], ids=str)
def test_ranks_that_are_processes_loop_over_lengths(axes: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path.cwd() / "src")])
    for output in run_processes(2, [str(tmp_path / "loop.py"), json.dumps(axes)], 200, PYTHONPATH=path):
        expected, found = json.loads(output.splitlines()[-1])
        assert found == pytest.approx(expected, rel=1e-10)
