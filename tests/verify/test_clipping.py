"""Clipping element by element acts on the gradient of the whole batch, as `torch.nn.utils.clip_grad_value_` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import captured
from shardwise.core.clipping import check_clipping
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.verify.verify import OVERLAPPING_STEPS, verify

SGD = OptimizerChoice("sgd", lr=0.3, momentum=0.9)
PLANS: dict[str, Plan] = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero-1": data_parallel(Plan.of(), 3, 1),
    "zero-2": data_parallel(Plan.of(microbatches=2), 2, 2),
    "zero-3": data_parallel(Plan.of(microbatches=3), 3, 3),
    "hybrid": data_parallel(Plan.of(), 4, 3, 2),
    "offload": data_parallel(Plan.of(offload="optimizer"), 2, 1),
    "tp": tensor_parallel(Plan.of(microbatches=2), 2, "1d-sp"),
    "pp": pipeline(Plan.of(microbatches=3), 2, "1f1b"),
    "post-validated": pipeline(Plan.of(microbatches=4, norm="post-validate", window=3), 2, "1f1b"),
    "pipedream": pipeline(Plan.of(microbatches=1), 2, "pipedream"),
    "sync": parameter_server(data_parallel(Plan.of(), 3), 2),
    "islands": local_training(Plan.of(), 2, 2),
    "three": tensor_parallel(pipeline(data_parallel(Plan.of(microbatches=2), 2, 1), 2, "1f1b"), 2, "1d"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
def test_every_element_of_the_batchs_gradient_is_clipped(plan: str) -> None:
    one, make, loss = captured("own-llama" if plan == "pipedream" else "gpt")  # which ties no stages
    torch.manual_seed(3)
    rows = (9, 8, 7) if not PLANS[plan].overlaps else (8,) * OVERLAPPING_STEPS
    batches = [make(n) for n in rows]
    given: dict[str, Any] = {"loss": loss, "captured": one}
    report = verify(one.module, batches, PLANS[plan], optimizer=SGD, clip_value=1e-3, **given)
    assert report.passed, (report.largest, report.worst[:3])


def test_the_clipping_counts() -> None:
    """At this value many elements are clipped and many are not: one device without clipping does something else."""
    one, make, loss = captured("gpt")
    torch.manual_seed(3)
    batch = make(9)
    (found,) = run_ranks(data_parallel(Plan.of(precision="fp64"), 1).mesh, lambda comm: _clipped(one, comm, batch))
    share = float((found.abs() > 1e-3).double().mean())
    assert 0.05 < share < 0.95


def _clipped(compiled: Compiled, comm: Any, batch: dict[str, Tensor]) -> Tensor:
    engine = Engine(compiled.under(Plan.of(precision="fp64")), comm, SGD)
    engine.interpreter.keep_gradients = kept = []
    engine.step(batch, 9)
    return torch.cat([value.flatten() for value in kept[0].values()])


class Sum(nn.Module):
    """Its gradient is the sum of the rows of x, times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (x * factor[:, None] @ self.weight).sum()


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_under_fp16_it_is_the_unscaled_gradient(kind: str) -> None:
    """A step that overflows is skipped, and the next clips again what has no scale, on a fused kernel or not."""
    x = torch.tensor([[0.5, -2.0, 4.0, 0.25, -0.125], [0.0, -1.0, 1.0, 0.25, 0.0]])
    fields = {"x": x, "factor": torch.ones(2)}
    compiled = Compiled(Sum(), Plan.of(precision="fp16"), fields)

    def rank(comm: Any) -> list[Tensor]:
        choice = OptimizerChoice(kind, lr=0.1, eps=1.0)  # type: ignore[arg-type]
        engine = Engine(compiled, comm, choice, clip_value=0.75, loss_scale=ScaleChoice.fixed(512.0))
        found = []
        for factor in (1.0, 1e4, 1.0):
            engine.step({"x": x, "factor": torch.full((2,), factor)}, 2)
            found.append(engine.state_dict()["weight"])
        return found

    (found,) = run_ranks(compiled.plan.mesh, rank)
    assert torch.equal(found[0], found[1])
    plain = nn.Parameter(torch.zeros(5))
    optimizer = {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[kind](
        [plain], lr=0.1, eps=1.0, weight_decay=0
    )
    for _ in range(2):
        plain.grad = x.sum(0)
        nn.utils.clip_grad_value_([plain], 0.75)
        optimizer.step()
    torch.testing.assert_close(found[2], plain.detach(), rtol=1e-6, atol=1e-7)


REFUSED = {
    "both": (Plan.of(), {"clip_value": 0.1, "clip_norm": 1.0}, "clip_value: 0.1 beside clip_norm = 1.*one of the two"),
    "none": (Plan.of(), {"clip_value": 0.0}, "clip_value: 0.0 is not legal; legal: a number above 0"),
    "servers apart": (asynchronous_server(Plan.of(), "async", 1, 2), {"clip_value": 0.1}, 'with server = "async"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_clipped_is_refused(case: str) -> None:
    plan, given, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_clipping(plan, given.get("clip_norm"), given["clip_value"])
