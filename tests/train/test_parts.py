"""A step in several programs: backwards that add up, a look at the gradients, and the update."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise import OptimizerChoice, Plan, Trainer
from shardwise.core.part import UPDATE, Part
from shardwise.data.loader import Batch
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

ROWS, BACKWARDS, STEPS = 6, 3, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - y).square().mean()


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    return {"x": x, "y": y}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_add_up_and_may_be_changed(zero: int) -> None:
    """Under every stage of ZeRO, on two ranks: gradients and parameters are those of ordinary PyTorch."""
    plain = Net().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    expected: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(BACKWARDS):
            plain(**batch(BACKWARDS * step + k)).backward()
        expected = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
        for p in plain.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        optimizer.step()
    plan = data_parallel(Plan.of(precision="fp64"), 2, zero=zero)
    compiled = Compiled(Net().double(), plan, batch(0))

    def rank(comm: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        choice = OptimizerChoice("adamw", lr=0.05, weight_decay=1e-2, decay="all")
        trainer, half = Trainer(compiled, choice, plan, batch(0), comm=comm), ROWS // 2
        start = half * comm.rank
        found: dict[str, Tensor] = {}
        for step in range(STEPS):
            for k in range(BACKWARDS):
                mine = {name: v[start : start + half] for name, v in batch(BACKWARDS * step + k).items()}
                one = Batch(mine, ROWS, (start,), (half,))
                trainer.step(one, part=Part(adds=k > 0, completes=k + 1 == BACKWARDS, updates=False), turn=k)
            found = trainer.engine.gradients()
            trainer.engine.set_gradients({name: value * 0.5 for name, value in found.items()})
            trainer.step(one, part=UPDATE)
        return trainer.state_dict(), found

    for state, gradients in run_ranks(plan.mesh, rank):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradients[name], expected[name], rtol=1e-10, atol=1e-12)
