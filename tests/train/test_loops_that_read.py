"""Own loops with models whose forward reads what it computes: in training, in evaluation, and for other shapes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import distribute
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

WIDTH = 6


class Reading(nn.Module):
    """Statements in line with its layers, or a function, read what the first layer computes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.seen = form, list[float]()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.form == "checked" and not h.any():
            raise ValueError("no numbers")
        if self.form == "function":
            h = larger(h)
        elif h.sum() > 0:
            h = 2 * h
        if self.form == "training" and not self.training:
            return self.predicted(h)
        return self.last(h).square().mean()

    def predicted(self, h: Tensor) -> Tensor:
        """It keeps what it reads, so that no part can read it."""
        self.seen.append(float(h.sum()))
        return self.last(h) * (2 if self.seen[-1] > 0 else 1)


def larger(h: Tensor) -> Tensor:
    """Return numbers, twice as large where their sum is more than 0."""
    return 2 * h if h.sum() > 0 else h


def batch(rows: int, length: int, seed: int) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, WIDTH, generator=own, dtype=torch.float64)


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", ["statements", "checked", "function", "training"])
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
            found, expected = model(batch(4, 3, seed)), truth(batch(4, 3, seed))
            assert (found - expected).abs().max() < 1e-12
            assert found.shape == ((4, 3, 2) if form == "training" else ())


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


def clipped_steps(model: Any, optimizer: Any) -> tuple[list[float], list[list[str]]]:
    """Return for each step the norm of the gradients, and which parameters have none."""
    norms, left = list[float](), list[list[str]]()
    for sign in (1, -1, 1, -1):
        optimizer.zero_grad()
        model(sign * batch(4, 3, 1).abs()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        left.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
    return norms, left


PLANS = {
    "alone": Plan.of(precision="fp64"),
    "dp": data_parallel(Plan.of(precision="fp64"), 2),
    "ZeRO-3": data_parallel(Plan.of(precision="fp64"), 3, 3),
    "tp": tensor_parallel(Plan.of(precision="fp64"), 2, "1d"),
}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_of_what_a_step_leaves_out_do_not_count_where_a_loop_clips(name: str) -> None:
    torch.manual_seed(0)
    module, plan = Chosen().double(), PLANS[name]
    truth = copy.deepcopy(module)
    expected = clipped_steps(truth, torch.optim.SGD(truth.parameters(), lr=0.1))
    assert expected[1][:2] == [[f"{one}.weight", f"{one}.bias"] for one in ("others", "some")]

    def rank(comm: ThreadCommunicator) -> tuple[list[float], list[list[str]]]:
        own = copy.deepcopy(module)
        theirs = torch.optim.SGD(own.parameters(), lr=0.1)
        return clipped_steps(*distribute(own, theirs, plan, comm=comm)[:2])

    for norms, left in run_ranks(plan.mesh, rank, timeout=60):
        assert norms == pytest.approx(expected[0], rel=1e-12)
        assert left == expected[1]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("to_none", [True, False])
def test_what_a_step_leaves_out_takes_a_step_where_its_gradient_is_zero(to_none: bool, name: str) -> None:
    torch.manual_seed(0)
    module, plan = Chosen().double(), PLANS[name]

    def trained(own: nn.Module, model: Any, optimizer: Any) -> dict[str, Tensor]:
        for step, sign in enumerate((1, 1, -1, 1, -1)):
            optimizer.zero_grad(set_to_none=to_none or step == 3)
            model(sign * batch(4, 3, 1).abs()).backward()
            if step == 4:
                none = {name for name, one in model.named_parameters() if one.grad is None}
                assert none == ({"some.weight", "some.bias"} if to_none else set())
            optimizer.step()
        return {name: one.clone() for name, one in model.state_dict().items()}

    truth = copy.deepcopy(module)
    expected = trained(truth, truth, torch.optim.AdamW(truth.parameters(), lr=0.1, weight_decay=0.1))

    def rank(comm: ThreadCommunicator) -> dict[str, Tensor]:
        own = copy.deepcopy(module)
        theirs = torch.optim.AdamW(own.parameters(), lr=0.1, weight_decay=0.1)
        return trained(own, *distribute(own, theirs, plan, comm=comm)[:2])

    for found in run_ranks(plan.mesh, rank, timeout=60):
        assert all((found[name] - one).abs().max() < 1e-12 for name, one in expected.items())
