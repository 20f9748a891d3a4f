"""Low precision against torch's own mixed precision: a small GPT learns the same, step by step, as under autocast on
one device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import Batch
from shardwise.models.gpt import GPT

STEPS, ROWS, LENGTH, VOCABULARY, LR, DECAY, EPS = 50, 8, 32, 256, 3e-3, 0.1, 1e-12
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def batches() -> list[dict[str, Tensor]]:
    """Walks on a ring of tokens, with a step of 1, 2 or 3: what can be learned in 50 steps, and never wholly."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for _ in range(STEPS):
        first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
        moves = torch.randint(1, 4, (ROWS, LENGTH), generator=generator)
        walk = (torch.cat([first, moves], 1).cumsum(1)) % VOCABULARY
        out.append({"input_ids": walk[:, :-1].contiguous(), "labels": walk[:, 1:].contiguous()})
    return out


def model(factor: float = 1.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Scaled(GPT(vocabulary=VOCABULARY, width=64, layers=2, heads=4, context=LENGTH), factor)


class Scaled(nn.Module):
    """A model with ``factor`` times its loss: what AdamW learns is the same, as long as gradients do not leave their
    dtype's range.
    """

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids, labels) * self.factor


def torchs(dtype: torch.dtype | None, module: nn.Module, lr: float = LR) -> list[float]:
    """The losses of an ordinary loop: in fp32, or under autocast, with torch's scaler for fp16."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=EPS)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for batch in batches():
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = module(**batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(precision: str, module: nn.Module, lr: float = LR) -> list[float]:
    data, optimizer = batches(), OptimizerChoice("adamw", lr=lr, weight_decay=DECAY, eps=EPS)
    with shardwise.Trainer(module, optimizer, Plan.of(precision=precision), data[0]) as trainer:
        return [float(trainer.step(Batch(batch, ROWS, (0,), (ROWS,))).loss) for batch in data]


@pytest.mark.slow
def test_fp32_is_torchs() -> None:
    assert max(apart(ours("fp32", model()), torchs(None, model()))) < 1e-5


def apart(a: list[float], b: list[float]) -> list[float]:
    """The differences of two curves, step by step."""
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize(("precision", "factor"), [("bf16", 1.0), ("fp16", 1.0), ("fp16", 2.0**-16)])
def test_losses_are_those_of_autocast(precision: str, factor: float) -> None:
    """At every step as near to fp32 as torch's mixed precision comes in its worst step, to a factor of 2, and so on
    average.

    Both leave the curve in fp32 by rounding alone, along random paths, so the spread is that of four runs from
    different weights. Ours are a little wider, for the residual stream is in low precision too: measured are ratios of
    1.5 and 1.2 in bf16, 1.7 and 1.2 in fp16.  A learning rate 1 % larger is several times as far away.  With the small
    factor all but a few gradients are zero in fp16 unless the loss is scaled.
    """
    theirs, mine = [], []
    for seed in range(4):
        truth = torchs(None, model(factor, seed))
        assert truth[-1] < truth[0] / 2
        theirs += apart(torchs(DTYPES[precision], model(factor, seed)), truth)
        mine += apart(ours(precision, model(factor, seed)), truth)
    faster = apart(ours(precision, model(factor, seed), lr=1.01 * LR), truth)
    most, mean = max(mine) / max(theirs), sum(mine) / sum(theirs)
    assert most <= 2 and mean <= 2, (most, mean)
    assert max(faster) > 3 * max(theirs)
