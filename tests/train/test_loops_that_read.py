"""Own loops with models whose forward reads what it computes: in training, in evaluation, and for other shapes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from shardwise import distribute

WIDTH = 6


class Reading(nn.Module):
    """Statements in line with its layers, or a function, read what the first layer computes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.form == "function":
            h = larger(h)
        elif h.sum() > 0:
            h = 2 * h
        if self.form == "training" and not self.training:
            seen = list[float]()
            while len(seen) < 2:  # what evaluation reads no part can
                seen.append(float(h.sum()) if locals() else 0.0)
            h = h * (2 if seen[0] > 0 else 1)
        return self.last(h).square().mean()


def larger(h: Tensor) -> Tensor:
    """Return numbers, twice as large where their sum is more than 0."""
    return 2 * h if h.sum() > 0 else h


def batch(rows: int, length: int, seed: int) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, WIDTH, generator=own, dtype=torch.float64)


@pytest.mark.parametrize("form", ["statements", "function", "training"])
def test_a_loop_computes_what_torch_does(form: str) -> None:
    """Parameters have no values in the model that is captured anew: for evaluation and for another length."""
    torch.manual_seed(0)
    module = Reading(form).double()
    truth = copy.deepcopy(module)
    model, optimizer = distribute(module, torch.optim.AdamW(module.parameters(), lr=0.01))[:2]
    other = torch.optim.AdamW(truth.parameters(), lr=0.01)
    for step, length in enumerate([3, 3, 5, 4]):
        x = batch(4, length, step)
        losses = []
        for one, own in ((model, optimizer), (truth, other)):
            own.zero_grad()
            loss = one(x)
            loss.backward()
            own.step()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12), step
    model.eval(), truth.eval()
    for seed in (7, 8):
        with torch.no_grad():
            assert float(model(batch(4, 3, seed))) == pytest.approx(float(truth(batch(4, 3, seed))), rel=1e-12)


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, temperature: float | Tensor) -> Tensor:
        return (self.layer(x) / temperature).square().mean()


@pytest.mark.parametrize("tensor", [False, True])
def test_a_loop_with_a_number_that_changes_is_told_what_that_takes(tensor: bool) -> None:
    torch.manual_seed(0)
    module = Divided().double()
    model, optimizer = distribute(module, torch.optim.SGD(module.parameters(), lr=0.01))[:2]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(9):
            optimizer.zero_grad()
            model(batch(4, 3, step), torch.tensor(1.0 + step) if tensor else 1.0 + step).backward()
            optimizer.step()
    found = [str(one.message) for one in told if "has computed something else 8 times" in str(one.message)]
    assert len(found) == (not tensor) and all(__file__ in one for one in found)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.others = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        if (x * self.some.weight.square().mean()).sum() > 0:
            h = self.some(x)
        else:
            h = self.others(x)
        return h.square().mean()


def test_gradients_of_what_a_step_leaves_out_do_not_count_where_a_loop_clips() -> None:
    torch.manual_seed(0)
    module = Chosen().double()
    truth = copy.deepcopy(module)
    model, optimizer = distribute(module, torch.optim.SGD(module.parameters(), lr=0.1))[:2]
    other = torch.optim.SGD(truth.parameters(), lr=0.1)
    for sign in (1, -1, 1, -1):
        norms = []
        for one, own in ((model, optimizer), (truth, other)):
            own.zero_grad()
            one(sign * batch(4, 3, 1).abs()).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)))
            left = [name for name, p in one.named_parameters() if p.grad is None]
            assert left == [f"{'others' if sign > 0 else 'some'}.{name}" for name in ("weight", "bias")]
            own.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
