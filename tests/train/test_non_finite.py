"""A step that is not finite changes nothing: training goes on after the error as if the step had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.data.loader import Batch
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.errors import LossScaleError, NonFiniteError
from shardwise.train.trainer import Trainer
from zoo import Blocks

ROWS, RANKS = 8, 2


class Pairs(Blocks):
    """Each block has two weights and two biases of odd sizes, so that there is padding between them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for block in self.blocks:
            assert isinstance(block, nn.Sequential)
            block.append(nn.Linear(width, width))


def batch(step: int, bad: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    fields = {name: torch.randn(ROWS, 5, generator=generator).to(dtype) for name in "xy"}
    if bad:
        fields["y"][3, 1] = torch.nan
    return fields


def train(
    zero: int, optimizer: str, precision: Any, bad: bool
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Four steps, before the last two of which a bad one is tried or not: errors, weights, and loss scales."""
    torch.manual_seed(0)
    plan = data_parallel(Plan.of(precision=precision), RANKS, zero)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    compiled = Compiled(Pairs(5).to(dtype), plan, batch(0, False, dtype))

    def rank(comm: ThreadCommunicator) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
        trainer = Trainer(
            compiled, OptimizerChoice(optimizer, lr=1e-2), plan, {}, clip_norm=1.0, comm=comm,  # type: ignore[arg-type]
            loss_scale=ScaleChoice(patience=1) if precision == "fp16" else None,
        )  # fmt: skip
        errors = []
        for step, spoilt in ((0, False), (1, False), *([(9, True)] if bad else []), (2, False), (3, False)):
            ((first, last),) = rank_rows(ROWS, 1, RANKS, comm.rank)
            given = {name: value[first:last] for name, value in batch(step, spoilt, dtype).items()}
            try:
                assert not bool(trainer.step(Batch(given, ROWS, (first,), (last - first,))).skipped)
            except (NonFiniteError, LossScaleError) as error:
                errors.append(error.unit)
        scale = trainer.engine.memory.loss_scale
        trainer.finish()
        return errors, trainer.state_dict(), {} if scale is None else dict(scale.state_dict())

    return run_ranks(plan.mesh, rank, timeout=60)[0]


@pytest.mark.quick(6)
@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "rmsprop"])
@pytest.mark.parametrize(
    ("zero", "precision"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "bf16"), (0, "fp16"), (3, "fp16"), (1, "fp64"), (3, "fp64")],
)
def test_training_goes_on_after_the_error(zero: int, optimizer: str, precision: str) -> None:
    errors, weights, scale = train(zero, optimizer, precision, bad=True)
    none, truth, _ = train(zero, optimizer, precision, bad=False)
    assert (errors, none) == (["tail"], [])
    if precision == "fp16":
        assert float(scale["scale"]) == 2.0**15  # it went down once, not again when the culprit was looked for
        for name, value in weights.items():
            assert torch.allclose(value, truth[name], atol=1e-3)
    else:
        assert all(torch.equal(weights[name], value) for name, value in truth.items())
