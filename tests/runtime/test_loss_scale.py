"""Dynamic loss scaling equals torch's GradScaler, and is made of device tensors only."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError
from shardwise.core.scale import ScaleChoice
from shardwise.runtime.scale import LossScale

CPU = torch.device("cpu")


def torchs_scales(choice: ScaleChoice, bad: list[bool]) -> list[float]:
    """The scale after each step of a loop with torch's own scaler, driven by gradients that are or are not finite."""
    scaler = torch.amp.GradScaler("cpu", choice.initial, choice.growth, choice.backoff, choice.interval)
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for overflow in bad:
        scaler.scale(parameter * 0).backward()
        parameter.grad = torch.tensor(float("inf") if overflow else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.quick(2)
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.3, 0.7), (1.001, 0.99)])
@pytest.mark.parametrize(("share", "interval"), [(0.02, 7), (0.3, 2), (0.001, 40), (0.9, 1), (0.0, 3)])
def test_scales_are_torchs(growth: float, backoff: float, share: float, interval: int) -> None:
    """Over 1,000 steps, with rare and frequent overflows; at a share of 0 the scale reaches the end of fp32, at 0.9
    that of 0.
    """
    choice = ScaleChoice(growth=growth, backoff=backoff, interval=interval)
    draw = random.Random(f"{growth} {share}")
    bad = [draw.random() < share for _ in range(1000)]
    ours, in_a_row = LossScale(choice, CPU), 0
    for at, truth in enumerate(torchs_scales(choice, bad)):
        ours.update(torch.tensor(float(bad[at])))
        in_a_row = in_a_row + 1 if bad[at] else 0
        assert ours.scale.item() == truth, at
        assert ours.overflows.item() == in_a_row


def test_a_fixed_scale_stays_and_counts() -> None:
    ours = LossScale(ScaleChoice.fixed(128.0), CPU)
    for _ in range(5000):
        ours.update(torch.tensor(False))
    for _ in range(3):
        ours.update(torch.tensor(True))
    assert (ours.scale.item(), ours.overflows.item()) == (128.0, 3)


def test_nothing_is_read_on_the_host_and_the_tensors_stay() -> None:
    """On the meta device a tensor has no value to read."""
    meta = LossScale(ScaleChoice(), torch.device("meta"))
    tensors = {name: id(tensor) for name, tensor in meta.state_dict().items()}
    meta.update(torch.zeros((), device="meta"))
    assert {name: id(tensor) for name, tensor in meta.state_dict().items()} == tensors
    assert [t.dtype for t in meta.state_dict().values()] == [torch.float32, torch.int32, torch.int32]


def test_state_goes_on_where_it_was() -> None:
    choice = ScaleChoice(interval=5)
    draw = random.Random(3)
    bad = [torch.tensor(draw.random() < 0.2) for _ in range(60)]

    def run(scale: LossScale, steps: list[Tensor]) -> list[float]:
        out = []
        for one in steps:
            scale.update(one)
            out.append(scale.scale.item())
        return out

    whole = run(LossScale(choice, CPU), bad)
    first = LossScale(choice, CPU)
    half = run(first, bad[:33])
    second = LossScale(choice, CPU)
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert half + run(second, bad[33:]) == whole
    with pytest.raises(ShardwiseError, match=r"expected \['good', 'overflows', 'scale'\]"):
        second.load_state_dict({"scale": torch.ones(())})
