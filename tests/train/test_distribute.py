"""A user's own loop, unchanged: model, loss and optimizer stand for the trainer's steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates

from processes import run_processes
from shardwise import Checkpoints, Mesh, OptimizerChoice, Plan
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.runtime.lamb import Lamb
from shardwise.runtime.lion import Lion
from shardwise.runtime.shampoo import Shampoo
from shardwise.train.distribute import distribute
from shardwise.train.optimizers import choice_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - y).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 4, generator=generator), "y": torch.randn(6, 1, generator=generator)}


def trained(
    model: Any, optimizer: Any, steps: int, after: Callable[[], object] = lambda: None, begin: int = 0
) -> list[float]:
    """The losses of some steps of a loop; ``after`` is called behind each."""
    losses = []
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


class Renamed(torch.optim.AdamW):
    """It computes what its base does."""


class OtherStep(torch.optim.AdamW):
    """A step of its own, and a number in its state."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["taken"] = self.state[p].get("taken", 0) + 1
                p.data.mul_(1 - group["lr"] / self.state[p]["taken"])


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "decoupled": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3, decoupled_weight_decay=True),
    "subclass": lambda p: Renamed(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(None, 1e-2)),
    "lamb": lambda p: Lamb(p, lr=1e-2, weight_decay=0.1),
    "shampoo": lambda p: Shampoo(p, lr=1e-2),
    "own": lambda p: OtherStep(p, lr=1e-2),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_loop_gives_the_same_numbers(name: str) -> None:
    plain, ours = net(), net()
    expected = trained(plain, OPTIMIZERS[name](plain.parameters()), 8)
    plan = Plan.of(Mesh.of(dp=1), microbatches=2)
    model, optimizer = distribute(ours, OPTIMIZERS[name](ours.parameters()), plan)
    assert trained(model, optimizer, 8) == pytest.approx(expected, rel=2e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-4, atol=1e-6)


def test_an_evaluation_in_between() -> None:
    plain = net()
    model, optimizer = distribute(net(), OptimizerChoice("sgd", lr=0.1))
    model.eval()
    first = model(**batch(7)).item()
    assert first == pytest.approx(plain(**batch(7)).item(), rel=1e-5)
    model.train()
    model(batch(0)["x"], batch(0)["y"]).backward()  # also by position
    optimizer.step()
    assert model.eval()(**batch(7)).item() != first


def test_what_it_cannot_do_is_said() -> None:
    model, optimizer = distribute(net(), OptimizerChoice("sgd", lr=0.1))
    with pytest.raises(ShardwiseError, match="after loss.backward"):
        optimizer.step()
    loss = model(**batch(0))
    with pytest.raises(ShardwiseError, match="in place .*test_distribute.py"):
        loss.view(1).mul_(2)
    with pytest.raises(ShardwiseError, match="create_graph.*test_distribute.py"):
        loss.backward(create_graph=True)
    loss.backward()
    with pytest.raises(ShardwiseError, match="called twice before"):
        loss.backward()
    optimizer.step()
    assert float(loss) == loss.item() and f"{loss:.2f}" == f"{loss.item():.2f}"
    with pytest.raises(ShardwiseError, match="a step that is done"):
        loss.backward()
    with pytest.raises(ShardwiseError, match="gradients of the last step are still there"):
        model(**batch(0)).backward()
    with pytest.raises(ShardwiseError, match="a gradient is looked at .*test_distribute.py.* after optimizer.step"):
        _ = next(model.parameters()).grad
    with pytest.raises(ShardwiseError, match="model.first is not there .* a call of the whole model"):
        model.first(batch(0)["x"])
    with pytest.raises(ShardwiseError, match="optimizer.param_groups is not there .* an optimizer of torch's"):
        _ = optimizer.param_groups
    with torch.no_grad(), pytest.raises(ShardwiseError, match="after model.eval"):
        model(**batch(0))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda o: rates.StepLR(o, 1, gamma=0.5),
    "function": lambda o: rates.LambdaLR(o, lambda step: step / 3),
    "cosine": lambda o: rates.CosineAnnealingLR(o, 4),
    "one cycle": lambda o: rates.OneCycleLR(o, 0.2, total_steps=6, cycle_momentum=False),
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "one after the other": lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.ExponentialLR(o, 0.5)], [2]),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch(name: str, after: bool) -> None:
    """Made before or ``after`` distribute()."""
    plain, ours = net(), net()
    ours.load_state_dict(plain.state_dict())
    losses = []
    for index, module in enumerate((plain, ours)):
        theirs = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        schedule = None if after else SCHEDULES[name](theirs)
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        schedule = schedule or SCHEDULES[name](theirs)
        losses.append(trained(model, optimizer, 4, schedule.step))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's, whose step takes no closure."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_of_an_own_optimizer(after: bool) -> None:
    """A schedule that is made before puts a function in place of the optimizer's step."""
    losses = []
    for index, module in enumerate((net(), net())):
        theirs = Signs(module.parameters(), lr=0.01)
        schedule = None if after else rates.StepLR(theirs, 1, gamma=0.5)
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        schedule = schedule or rates.StepLR(theirs, 1, gamma=0.5)
        losses.append(trained(model, optimizer, 4, schedule.step))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_another_step_in_an_optimizer_is_refused() -> None:
    theirs = Signs((module := net()).parameters(), lr=0.01)
    theirs.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="optimizer Signs: its step is not that of its class"):
        distribute(module, theirs)[0](**batch(0)).backward()


@pytest.mark.parametrize("name", ["asgd", "rprop"])
def test_a_warm_up_after_distribute_of_state_that_begins_with_the_rate(name: str) -> None:
    """The state of these begins with the learning rate of their first step."""
    losses = []
    for index, module in enumerate((net(), net())):
        theirs = OPTIMIZERS[name](module.parameters())
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        schedule = rates.LambdaLR(theirs, lambda step: (step + 1) / 4)
        losses.append(trained(model, optimizer, 4, schedule.step))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def two_of(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for two groups of matrices and AdamW for the rest, as people have it."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    muon = torch.optim.Muon([{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.05}], lr=0.02, momentum=0.9)
    return [muon, torch.optim.AdamW([p for p in module.parameters() if p.dim() < 2], lr=1e-2)]


def test_several_optimizers_of_parameters_of_their_own() -> None:
    """Each with a schedule of its own, and their state in one state_dict."""
    plain, ours = net().double(), net().double()
    plain_pair, pair = two_of(plain), two_of(ours)
    rows = {k: v.double() for k, v in batch(0).items()}
    model, optimizer = distribute(ours, pair)
    schedules = [[rates.ExponentialLR(one, 0.5), rates.LambdaLR(other, lambda step: 1 / (step + 1))]
                 for one, other in (plain_pair, pair)]  # fmt: skip
    for _ in range(4):
        for one in plain_pair:
            one.zero_grad()
        plain(**rows).backward()
        for one in plain_pair:
            one.step()
        optimizer.zero_grad()
        model(**rows).backward()
        optimizer.step()
        for one in (*schedules[0], *schedules[1]):
            one.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-12, atol=1e-14)
    state = optimizer.state_dict()["state"]
    expected = [one.state[p] for one in plain_pair for group in one.param_groups for p in group["params"]]
    assert [set(state[i]) for i in range(4)] == [set(one) for one in expected]
    for i, one in enumerate(expected):
        for key, value in one.items():
            torch.testing.assert_close(state[i][key].double(), value.double(), rtol=1e-12, atol=1e-14)


def test_state_of_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    """It is saved, by state_dict and in checkpoints, and goes on as if nothing had happened."""
    found = []
    for how in ("whole", "state_dict", "checkpoint", "without"):
        module = net()
        model, optimizer = distribute(module, OtherStep(module.parameters(), lr=1e-2))
        if how == "whole":
            trained(model, optimizer, 2)
            state, weights = optimizer.state_dict(), model.state_dict()
            assert [one["taken"] for one in state["state"].values()] == [2] * 4
            with Checkpoints(model.trainer, tmp_path) as checkpoints:
                checkpoints.save()
        elif how in ("state_dict", "without"):
            model.load_state_dict(weights)
            if how == "state_dict":
                optimizer.load_state_dict(state)
        else:
            model.when_captured(lambda trainer: restored(trainer, tmp_path))
        found.append(trained(model, optimizer, 3, begin=2))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    assert found[3] != pytest.approx(found[0], rel=1e-3)


def restored(trainer: Any, folder: Path) -> None:
    with Checkpoints(trainer, folder) as checkpoints:
        checkpoints.restore()


def test_several_optimizers_that_do_not_fit() -> None:
    module = net()
    with pytest.raises(ConfigError, match="a parameter is in two of its groups, or in two optimizers"):
        distribute(module, [*two_of(module), torch.optim.SGD([module.first.weight], lr=0.1)])
    with pytest.raises(ConfigError, match="must have the parameters of the model"):
        distribute(module, two_of(module)[:1])


CYCLES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "groups": lambda m: torch.optim.SGD(groups_of(m), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_schedule_that_changes_momentum(name: str) -> None:
    """OneCycleLR changes momentum, or betas, at every step."""
    losses = []
    for index, module in enumerate((net(), net())):
        theirs = CYCLES[name](module)
        schedule = rates.OneCycleLR(theirs, 0.2, total_steps=8)
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        losses.append(trained(model, optimizer, 7, schedule.step))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """No weight decay on biases, another rate for the last layer, and a group of nothing."""
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    first, second = (one.weight for one in (module.first, module.second))
    return [
        {"params": [second], "lr": 0.03, "weight_decay": 0.2, "momentum": 0.5}, {"params": []},
        {"params": biases, "weight_decay": 0.0}, {"params": [first], "weight_decay": 0.1},
    ]  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
def test_groups_of_parameters(after: bool) -> None:
    """Each with its own rate, momentum and weight decay, each of which a loop may change."""
    found: list[dict[str, Tensor]] = []
    losses: list[list[float]] = []
    for index, module in enumerate((net(), net())):
        theirs = torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        schedule = rates.LambdaLR(theirs, [lambda s: 1 / (s + 1), lambda s: 1, lambda s: 0.5**s, lambda s: s / 3])
        losses.append(trained(model, optimizer, 3, schedule.step))
        if after:
            theirs.param_groups[0]["weight_decay"] = 0.5
            theirs.param_groups[3]["momentum"] = 0.3
        losses[index] += trained(model, optimizer, 2, schedule.step, begin=3)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7)


def test_what_an_optimizer_must_not_do() -> None:
    ours = net()
    theirs = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = distribute(ours, theirs)
    model(**batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    theirs.param_groups[0]["momentum"] = 0
    model(**batch(1)).backward()
    with pytest.raises(ShardwiseError, match="momentum changed after the first step; legal: the same groups"):
        optimizer.step()
    used = net()
    old = torch.optim.SGD(used.parameters(), lr=0.1, momentum=0.5)
    used(**batch(0)).backward()
    old.step()
    with pytest.raises(ConfigError, match="has taken steps already"):
        distribute(used, old)


def test_calls_that_plain_torch_refuses() -> None:
    ours = net()
    model, _ = distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    good = batch(0)
    with pytest.raises(ConfigError, match="too many positional arguments"):
        model(*good.values(), 1)
    first = next(iter(good))
    with pytest.raises(ConfigError, match="multiple values"):
        model(good[first], **good)


def test_optimizers_that_cannot_be_said() -> None:
    model = net()
    for optimizer, message in (
        (torch.optim.AdamW(model.first.parameters()), "parameters of the model that require gradients, and no others"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS: its step needs a closure"),
    ):
        with pytest.raises(ConfigError, match=message):
            choice_of(optimizer, model)
    assert choice_of(torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True), model) == OptimizerChoice(
        "adamw", lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decay="all"
    )


@pytest.mark.parametrize("frozen", ["statistics", "dropout", "all"])
def test_parts_in_evaluation_mode(frozen: str) -> None:
    """A frozen BatchNorm or dropout stays so; a model that is as a whole in evaluation mode evaluates."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.drop = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)
            self.last = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.last(self.drop(self.norm(self.first(x)))) - y).square().mean()

    torch.manual_seed(0)
    plain = Net()
    plain.drop.eval()
    if frozen == "statistics":
        plain.norm.eval()
    if frozen == "all":
        plain.drop.p = 0.0
        plain.eval()
    ours = copy.deepcopy(plain)
    if frozen == "all":
        plain.train()
    losses: list[list[float]] = [[], []]
    for index, module in enumerate((plain, ours)):
        theirs = torch.optim.SGD(module.parameters(), lr=0.1)
        model, optimizer = (module, theirs) if index == 0 else distribute(module, theirs)
        if index == 1 and frozen == "all":
            with pytest.raises(ShardwiseError, match="was in evaluation mode; legal: model.train"):
                model(x=torch.ones(6, 4), y=torch.ones(6, 1)).backward()
            model.train()
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x=torch.randn(6, 4, generator=generator), y=torch.randn(6, 1, generator=generator))
            loss.backward()
            optimizer.step()
            losses[index].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


LOOP = """
import json, os, sys
import torch
from shardwise import Plan
from shardwise.train.distribute import distribute
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.connect import connect

backend, tensor, schedule, (tp, pp, dp, zero) = *sys.argv[1:4], map(int, sys.argv[4:])
torch.set_num_threads(1)

def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 31, (9, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[step % 9, 3:] = -100
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}

def run(model, optimizer, schedule, clip):
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        clip()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 3:
            model.eval()
            with torch.no_grad():
                losses.append(model(**batch(99)).item())
            model.train()
    return losses

torch.manual_seed(0)
plain = GPT(vocabulary=31, width=16, layers=6, heads=2, context=12).double()
ours = GPT(vocabulary=31, width=16, layers=6, heads=2, context=12).double()
ours.load_state_dict(plain.state_dict())

def made(module):
    theirs = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    return theirs, torch.optim.lr_scheduler.StepLR(theirs, 2, gamma=0.5)

theirs, rates = made(plain)
expected = run(plain, theirs, rates, lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
theirs, rates = made(ours)
plan = tensor_parallel(Plan.of(precision="fp64", microbatches=4), tp, tensor)
plan = pipeline(data_parallel(plan, dp, zero), pp, schedule)
model, optimizer = distribute(ours, theirs, plan, clip_norm=0.3, comm=connect(plan.mesh, backend=backend))
found = run(model, optimizer, rates, lambda: None)
state = model.state_dict()
off = max(float((state[n] - v).abs().max() / v.abs().max()) for n, v in plain.state_dict().items())
print(json.dumps([expected, found, off]), flush=True)
model.trainer.comm.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "schedule", "dp", "zero"),
    [
        ("gloo", "zb-h1", 1, 0),
        pytest.param("shared", "1f1b", 1, 0, marks=pytest.mark.full),
        pytest.param("gloo", "zbv", 2, 3, marks=pytest.mark.full),
    ],
)
def test_the_same_loop_in_a_pipeline(tmp_path: Path, backend: str, schedule: str, dp: int, zero: int) -> None:
    """In processes: a tied GPT, clipping, a schedule of rates and an evaluation in between, in fp64 as plain torch has
    them.
    """
    the_same_loop(tmp_path, [backend, "1d", schedule], 1, 2, dp, zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tensor", "tp", "pp", "dp", "zero"),
    [
        ("gloo", "1d-sp", 2, 1, 1, 0),
        pytest.param("gloo", "2d", 4, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("gloo", "2.5d", 8, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("gloo", "3d", 8, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("shared", "2d", 4, 2, 1, 0, marks=pytest.mark.full),
        pytest.param("shared", "2.5d", 8, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("shared", "3d", 8, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("shared", "1d", 2, 1, 1, 0, marks=pytest.mark.full),
        pytest.param("gloo", "1d", 2, 1, 2, 3, marks=pytest.mark.full),
        pytest.param("shared", "1d-sp", 2, 2, 1, 0, marks=pytest.mark.full),
    ],
)
def test_the_same_loop_where_ranks_share_layers(
    tmp_path: Path, backend: str, tensor: str, tp: int, pp: int, dp: int, zero: int
) -> None:
    """The same; every rank of a layer gets the whole batch."""
    the_same_loop(tmp_path, [backend, tensor, "1f1b"], tp, pp, dp, zero)


def the_same_loop(folder: Path, words: list[str], tp: int, pp: int, dp: int, zero: int) -> None:
    script = folder / "loop.py"
    script.write_text(LOOP)
    for output in run_processes(tp * pp * dp, [str(script), *words, *map(str, (tp, pp, dp, zero))], 120):
        expected, found, off = json.loads(output.splitlines()[-1])
        assert len(set(expected)) == 7
        assert found == pytest.approx(expected, rel=1e-10, abs=0)
        assert off < 1e-10


def losses_of(module: nn.Module, theirs: torch.optim.Optimizer, distributed: bool) -> list[float]:
    """Of three steps."""
    model, optimizer = distribute(module, theirs) if distributed else (module, theirs)
    found = []
    for step in range(3):
        loss: Any = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_an_optimizer_with_frozen_parameters_and_a_rate_that_is_a_tensor() -> None:
    def losses(distributed: bool) -> list[float]:
        module = net()
        module.first.bias.requires_grad_(False)
        theirs = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-2))
        return losses_of(module, theirs, distributed)

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


class Recurrent(nn.Module):
    """Its LSTM holds its own parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.cell(x.view(-1, 2, 2))[0][:, -1]) - y).square().mean()


def test_a_model_that_holds_its_parameters_twice() -> None:
    def losses(distributed: bool) -> list[float]:
        module = Recurrent()
        return losses_of(module, torch.optim.SGD(module.parameters(), lr=0.1), distributed)

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)


@pytest.mark.filterwarnings("error")
def test_a_schedule_knows_of_the_steps() -> None:
    module = net()
    theirs = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = rates.StepLR(theirs, 1)
    model, optimizer = distribute(module, theirs)
    model(**batch(0)).backward()
    optimizer.step()
    schedule.step()  # warns where no step came before


def test_what_becomes_of_their_optimizer() -> None:
    def step(model: Any, optimizer: Any, *closure: Any) -> None:
        model(**batch(0)).backward()
        optimizer.step(*closure)
        optimizer.zero_grad()

    saved = net()
    other = torch.optim.AdamW(saved.parameters())
    step(saved, other)
    module = net()
    theirs = torch.optim.AdamW(module.parameters())
    model, optimizer = distribute(module, theirs)
    step(model, optimizer)
    with pytest.raises(ShardwiseError, match=r"step\(closure\)"):
        step(model, optimizer, lambda: None)
    optimizer.zero_grad()
    theirs.load_state_dict(other.state_dict())
    with pytest.raises(ShardwiseError, match="a state was loaded after distribute.*Checkpoints"):
        step(model, optimizer)


def test_several_backwards_of_which_the_loop_holds_the_last_loss() -> None:
    """The programs of a step are computed alike and keep different values."""
    plain, ours, found = net(), net(), []
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model, optimizer in ((plain, theirs), distribute(ours, OptimizerChoice("sgd", lr=0.1, momentum=0.0))):
        for turn in range(2):
            for number in range(3):
                loss = model(**batch(3 * turn + number))
                (loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[2:] == pytest.approx(found[:2], rel=1e-5)


def test_a_backward_is_taken_back() -> None:
    """Gradients that are set to zero before the step are those of the next backward alone."""
    plain, ours = net(), net()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model, optimizer in ((plain, theirs), distribute(ours, OptimizerChoice("sgd", lr=0.1, momentum=0.0))):
        model(**batch(0)).backward()
        optimizer.zero_grad()
        loss = model(**batch(1))
        loss.backward()
        optimizer.step()
        state = model.state_dict()
        if model is not plain:
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            assert loss * 2 == 2 * loss.item() and loss < 100 and not torch.isnan(loss)


def test_values_before_the_step_are_those_of_the_step() -> None:
    """The loop looks at a loss, scaled and summed, before backward and between backward and step."""
    plain, ours = net(), net()
    seen: list[list[float]] = [[], []]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for found, (model, optimizer) in zip(
        seen, ((plain, theirs), distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))), strict=True
    ):
        total = torch.zeros(())
        for step in range(3):
            optimizer.zero_grad()
            first = model(**batch(step))
            found.append(first.item())
            loss = 0.5 * first + model(**batch(step + 9)) ** 2
            loss.backward()
            found.append(float(loss.detach() * 2))
            optimizer.step()
            total = total + first.detach()
            found.append(total.item())
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    assert len(set(seen[0])) == 8  # the first total is the first loss


def test_what_a_loop_writes_to_parameters_and_gradients() -> None:
    """Weights are clamped, and gradients are set by hand, as a loop without a distributed model does."""
    plain, ours = net(), net()
    losses: list[list[float]] = [[], []]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for found, (model, optimizer) in zip(
        losses, ((plain, theirs), distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))), strict=True
    ):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(**batch(step))
            loss.backward()
            norms = [p.grad.norm().item() for p in model.parameters()]
            for p in model.parameters():
                p.grad.mul_(0.5).add_(0.01)
            optimizer.step()
            for p in model.parameters():
                p.data.clamp_(-0.2, 0.2)
            found += [loss.item(), *norms]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_backwards_that_add_up_have_random_numbers_of_their_own() -> None:
    class Dropped(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.dropout(self.first(x), 0.5).square().mean() + 0 * super().forward(x, y)

    torch.manual_seed(0)
    ours = Dropped()
    model, optimizer = distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.0))
    found = []
    for _ in range(3):
        loss = model(**batch(0))
        loss.backward()
        found.append(loss)
    optimizer.step()
    assert len({one.item() for one in found}) == 3


def test_a_schedule_over_what_distribute_returned() -> None:
    plain, ours = net(), net()
    losses: list[list[float]] = [[], []]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for found, (model, optimizer) in zip(
        losses, ((plain, theirs), distribute(ours, torch.optim.SGD(ours.parameters(), lr=0.1))), strict=True
    ):
        schedule = rates.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(4):
            optimizer.zero_grad()
            loss = model(**batch(step))
            loss.backward()
            optimizer.step()
            schedule.step()
            found.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_state_of_the_optimizer_goes_on_in_torch_and_back(name: str) -> None:
    def run(model: Any, optimizer: Any, steps: range) -> list[float]:
        found = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(**batch(step))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, first, second, third = net(), net(), net(), net()
    optimizer = OPTIMIZERS[name](plain.parameters())
    expected = run(plain, optimizer, range(6))
    model, ours = distribute(first, OPTIMIZERS[name](first.parameters()))
    assert run(model, ours, range(2)) == pytest.approx(expected[:2], rel=1e-5)
    second.load_state_dict(model.state_dict())
    theirs = OPTIMIZERS[name](second.parameters())
    theirs.load_state_dict(ours.state_dict())
    assert run(second, theirs, range(2, 4)) == pytest.approx(expected[2:4], rel=1e-5)
    model, ours = distribute(third, OPTIMIZERS[name](third.parameters()))
    model.load_state_dict(second.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert run(model, ours, range(4, 6)) == pytest.approx(expected[4:], rel=1e-5)
