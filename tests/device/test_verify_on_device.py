"""Plans against one device, in fp64 and in their own precision, all on one device: each rank is a thread with a stream
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.intercept import Intercept
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.device import Together
from shardwise.verify.verify import Report, run_threads, verify

SIZES: dict[str, Any] = {"vocabulary": 64, "width": 64, "layers": 2, "heads": 4, "context": 16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(**SIZES, dropout=0.1),
    "llama": lambda: Llama(**SIZES, kv_heads=2),
}
BF16 = Plan.of(microbatches=2, precision="bf16")
PLANS: dict[str, Callable[[], Plan]] = {
    "one": lambda: BF16,
    "full": lambda: BF16.replace(recompute="full"),
    "selective": lambda: BF16.replace(recompute="selective"),
    "fp16": lambda: BF16.replace(precision="fp16"),
    "zero 0": lambda: data_parallel(BF16, 2, 0),
    "zero 1": lambda: data_parallel(BF16, 2, 1),
    "zero 2": lambda: data_parallel(BF16, 2, 2),
    "zero 3": lambda: data_parallel(BF16, 2, 3),
    "zero 3, selective": lambda: data_parallel(BF16.replace(recompute="selective"), 2, 3),
    "zero 1, offload": lambda: data_parallel(BF16.replace(offload="optimizer"), 2, 1),
    "tp 1d": lambda: tensor_parallel(BF16, 2, "1d"),
    "tp 1d-sp": lambda: tensor_parallel(BF16, 2, "1d-sp"),
    "tp 2d": lambda: tensor_parallel(BF16, 4, "2d"),
    "pp 1f1b": lambda: pipeline(BF16, 2, "1f1b"),
    "pp zb-h1": lambda: pipeline(BF16, 2, "zb-h1"),
    "pp zbv": lambda: pipeline(BF16, 2, "zbv"),
    "pp, zero 3, tp": lambda: tensor_parallel(pipeline(data_parallel(BF16, 2, 3), 2, "1f1b"), 2, "1d-sp"),
}
ORDINARY = {("gpt", "zero 3, selective"), ("llama", "pp zbv")}
"""On the CPU, where other tests have most of it; the rest is for test-all."""


def cases() -> list[Any]:
    """Every model under every plan on every device."""
    found = []
    for model in MODELS:
        for plan in PLANS:
            marks = () if (model, plan) in ORDINARY else (pytest.mark.full,)
            found += [
                pytest.param("cpu", model, plan, marks=marks),
                pytest.param("gpu", model, plan, marks=pytest.mark.gpu),
            ]
    return found


def subject(name: str) -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    """A module, its batches, and a loss or None."""
    torch.manual_seed(0)
    if name == "literals":
        return Literals(), [{"x": torch.randn(6, 8), "label": torch.randint(0, 4, (6,))} for _ in range(2)], weighted
    batches = [{field: torch.randint(0, 64, (6, 16)) for field in ("input_ids", "labels")} for _ in range(2)]
    return MODELS[name](), batches, None


def verified(
    module: nn.Module, batches: list[dict[str, Tensor]], plan: Plan, device: torch.device, **options: Any
) -> Report:
    """The report; ranks pause at random before they post and wait."""
    run = partial(run_threads, delay_seed=5)
    return verify(module, batches, plan, optimizer=OptimizerChoice("adamw", lr=1e-2), run=run, device=device, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "model", "plan"), cases(), indirect=["device"])
def test_a_plan_is_the_same_as_one_device(device: torch.device, model: str, plan: str) -> None:
    module, batches, _ = subject(model)
    report = verified(module, batches, PLANS[plan](), device)
    assert report.compared > 20 and report.low_precision is not None
    assert report.passed, (report.largest, report.worst[:3], report.low_precision, report.ranks_agree)


class Literals(nn.Module):
    """What ``module.to(device)`` does not move: a plain attribute, literals, what forward makes without saying where,
    and indices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.offset = torch.linspace(0, 1, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.tensor([0.5, 1.0] * 4) + self.offset
        return (x + torch.arange(8) / 8)[:, torch.tensor([0, 2, 4, 7])]


CLASSES = torch.tensor([1.0, 2.0, 0.5, 1.5])


def weighted(output: Tensor, fields: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, fields["label"], weight=CLASSES, reduction="sum") / 12


def test_tensors_of_the_host_come_along(device: torch.device) -> None:
    module, batches, loss = subject("literals")
    report = verified(module, batches, data_parallel(Plan.of(microbatches=2), 2, 3), device, loss=loss)
    assert report.passed, (report.largest, report.worst[:3])


def test_only_what_is_mixed_is_brought_along() -> None:
    """Seen on a device that computes nothing."""
    there, here = torch.ones(3, device="meta"), torch.ones(3)
    with pytest.raises(RuntimeError):
        torch.stack([there, here])
    with Intercept(Together(there.device)):
        assert (there + here).is_meta and torch.stack([there, here]).is_meta and there[torch.tensor([0, 2])].is_meta
        assert torch.where(there > 0, here, there).is_meta
        assert torch.addcmul(there, here, tensor2=here).is_meta
        assert not (here + here).is_meta
        total = here
        total += 1
        assert total is here and bool((here == 2).all())
        assert not here.add_(there).is_meta  # what is written stays where it is
