"""Notes on the BatchNorms of a model that is not captured name those that run, wherever their code is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, oracle_run, sharded_run


class Model(nn.Module):
    """Branches by a value; ``spare`` runs on no batch, and ``frozen`` does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)])
        self.untracked, self.spare = nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5)
        self.frozen = nn.BatchNorm1d(5)

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if x.sum() > 1e9:
            x = self.spare(x)
        x = self.frozen(self.untracked(x.tanh()).tanh())
        return F.batch_norm(x.sin(), None, None, training=True).tanh().square().mean()


def test_those_that_run_are_named() -> None:
    one = Subject(Model(), {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))})
    assert one.trace.opaque is not None
    assert one.trace.meets == ("layers.1 (batch_norm)", "untracked (batch_norm)", "forward (batch_norm)")
    (note,) = one.trace.notes_of_microbatches(2)
    assert "spare" not in note and note.endswith("all are seen with microbatches = 1")
    (idle,) = (note for note in one.trace.notes if "did not run" in note)
    assert idle.startswith("spare: ")
    for dp, microbatches in ((1, 1), (2, 1), (2, 2)):
        truth = oracle_run(one, microbatches)
        assert max(errors(sharded_run(one, dp, microbatches), truth).values()) <= TOLERANCE
