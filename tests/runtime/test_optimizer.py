"""The optimizer over flat buffers against torch.optim over parameters, and the schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.flat import FlatBuffer
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import WHOLE
from shardwise.runtime.optimizer import CLASSES, FlatOptimizer, Segment, check_optimizer

SHAPES = {"weight": (7, 5), "bias": (7,), "norm": (13,), "matrix": (3, 4, 5), "last": (11, 9)}

CHOICES = {
    "adamw": OptimizerChoice("adamw", lr=0.1, weight_decay=0.1, betas=(0.8, 0.95)),
    "adam": OptimizerChoice("adam", lr=0.1, weight_decay=0.1, eps=1e-6),
    "sgd": OptimizerChoice("sgd", lr=0.1, weight_decay=0.1),
    "sgd momentum": OptimizerChoice("sgd", lr=0.1, weight_decay=0.1, momentum=0.9),
    "sgd nesterov": OptimizerChoice("sgd", lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=True),
    "adagrad": OptimizerChoice("adagrad", lr=0.1, weight_decay=0.1),
    "rmsprop": OptimizerChoice("rmsprop", lr=0.1, weight_decay=0.1, alpha=0.9),
    "rmsprop momentum": OptimizerChoice("rmsprop", lr=0.1, weight_decay=0.1, momentum=0.5),
    "nadam": OptimizerChoice("nadam", lr=0.1, weight_decay=0.1, momentum_decay=0.01),
    "radam": OptimizerChoice("radam", lr=0.1, weight_decay=0.1),
    "adamw amsgrad": OptimizerChoice("adamw", lr=0.1, weight_decay=0.1, amsgrad=True),
    "adam maximize": OptimizerChoice("adam", lr=0.1, weight_decay=0.1, maximize=True),
    "sgd dampening": OptimizerChoice("sgd", lr=0.1, weight_decay=0.1, momentum=0.9, dampening=0.3),
    "sgd dampening maximize": OptimizerChoice("sgd", lr=0.1, momentum=0.9, dampening=0.3, maximize=True),
    "adagrad begun": OptimizerChoice("adagrad", lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "rmsprop centered": OptimizerChoice("rmsprop", lr=0.1, weight_decay=0.1, centered=True),
    "nadam decoupled": OptimizerChoice("nadam", lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "radam decoupled": OptimizerChoice("radam", lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": OptimizerChoice("adamax", lr=0.1, weight_decay=0.1, betas=(0.8, 0.95)),
    "adadelta": OptimizerChoice("adadelta", lr=0.9, weight_decay=0.1, rho=0.8),
    "asgd": OptimizerChoice("asgd", lr=0.1, weight_decay=0.1, t0=2, alpha=0.6, lambd=0.01),
    "rprop": OptimizerChoice("rprop", lr=0.1, etas=(0.4, 1.3), step_sizes=(1e-3, 1.0)),
    "lion": OptimizerChoice("lion", lr=0.1, weight_decay=0.1, betas=(0.9, 0.99)),
}


class Flat:
    """Parameters in one flat buffer of two groups, with a copy of them one by one for torch.optim."""

    def __init__(self, choice: OptimizerChoice, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.choice = choice
        items = [(name, shape, choice.group_of(name, shape)) for name, shape in SHAPES.items()]
        self.buffer = FlatBuffer.pack(items, parts=2, itemsize=dtype.itemsize)
        self.params = torch.zeros(self.buffer.numel, dtype=dtype)
        self.grads = torch.zeros(self.buffer.numel, dtype=dtype)
        self.single = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
        for name, value in self.single.items():
            self.view(self.params, name).copy_(value)
        self.segments = [
            Segment(self.params[start:stop], self.grads[start:stop], group, start)
            for group, start, stop in self.buffer.segments
        ]
        self.optimizer = FlatOptimizer(choice, self.segments)
        self.torch = self._plain()

    def _plain(self) -> torch.optim.Optimizer:
        """One of torch's optimizers over the parameters one by one; norms and biases have no weight decay."""
        every = self.choice.decay == "all"
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.single.values() if every or p.dim() >= 2]},
            {"params": [p for p in self.single.values() if not every and p.dim() < 2], "weight_decay": 0.0},
        ]
        return CLASSES[self.choice.name]([one for one in groups if one["params"]], foreach=False, **self.choice.numbers)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        entry = next(one for one in self.buffer.entries if one.name == name)
        return buffer[entry.offset : entry.offset + entry.numel].view(entry.shape)

    def state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of one parameter, in its shape."""
        entry = next(one for one in self.buffer.entries if one.name == name)
        segment, state = next(
            (s, v) for s, v in self.optimizer.states() if s.start <= entry.offset < s.start + s.param.numel()
        )
        first = entry.offset - segment.start
        found = {k: v[first : first + entry.numel].view(entry.shape) if v.dim() else v for k, v in state.items()}
        if self.choice.dampening:
            found.pop("step")  # torch does not count these
        return found

    def draw_gradients(self) -> None:
        for name, value in self.single.items():
            value.grad = torch.randn_like(value)
            self.view(self.grads, name).copy_(value.grad)

    def step(self, lr: float, *more: Tensor | None, **given: Tensor | None) -> None:
        self.optimizer.step(replace(self.choice, lr=lr).settings(0), *more, **given)

    def step_torch(self, lr: float, scale: float = 1.0) -> None:
        for value in self.single.values():
            assert value.grad is not None
            value.grad.mul_(scale)
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()

    def error(self) -> float:
        """The largest relative error of a parameter or a state tensor."""
        states = {name: self.state(name) for name in self.single}
        pairs = []
        for name, value in self.single.items():
            pairs.append((self.view(self.params, name), value))
            expected = {k: v for k, v in self.torch.state[value].items() if isinstance(v, Tensor)}
            assert set(states[name]) == set(expected)
            pairs += [(states[name][key], expected[key]) for key in expected]
        assert all(ours.shape == theirs.shape for ours, theirs in pairs)
        errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in pairs]
        return float(torch.stack(errors).max())  # of torch: NaN wins

    def everything(self) -> list[Tensor]:
        states = [tensor for _, state in self.optimizer.states() for tensor in state.values()]
        return [tensor.clone() for tensor in (self.params, *states)]


def is_padding(flat: Flat) -> Tensor:
    mask = torch.ones(flat.buffer.numel, dtype=torch.bool)
    for entry in flat.buffer.entries:
        mask[entry.offset : entry.offset + entry.numel] = False
    return mask


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_equals_torch_parameter_by_parameter(name: str, decay: str) -> None:
    numbers = {k: getattr(CHOICES[name], k) for k in OptimizerChoice.__dataclass_fields__}
    flat = Flat(OptimizerChoice(**numbers | {"decay": decay}))
    for step in range(5):  # no step has the rate of the choice: a schedule may begin with another
        flat.draw_gradients()
        flat.step(0.07 / (step + 1))
        flat.step_torch(0.07 / (step + 1))
    assert flat.error() < 1e-14
    assert len(flat.segments) == (1 if decay == "all" else 2)
    padding = is_padding(flat)
    assert int(padding.sum()) > 0
    assert not flat.params[padding].any()


def test_the_comparison_sees_decay_of_a_bias() -> None:
    flat = Flat(CHOICES["adamw"])
    flat.optimizer = FlatOptimizer(flat.choice, [segment._replace(group=0) for segment in flat.segments])
    flat.draw_gradients()
    flat.step(0.1)
    flat.step_torch(0.1)
    assert flat.error() > 1e-3


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_clipping_is_folded_in(name: str, dtype: torch.dtype, tolerance: float) -> None:
    flat = Flat(CHOICES[name], dtype)
    for scale in (0.3, 1.0, 0.01):
        flat.draw_gradients()
        grads = flat.grads.clone()
        flat.step(0.1, grad_scale=torch.tensor(scale, dtype=dtype), skip=torch.tensor(0.0))
        flat.step_torch(0.1, scale)
        assert torch.allclose(flat.grads, grads * scale, rtol=3e-7, atol=0)
    assert flat.error() < tolerance


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_changes_no_bit(name: str, dtype: torch.dtype, first: bool) -> None:
    flat = Flat(CHOICES[name], dtype)
    if not first:
        flat.draw_gradients()
        flat.step(0.1)
        flat.step_torch(0.1)
    before = flat.everything()
    assert len(before) > 1 or name == "sgd"
    for grad_scale in (None, torch.tensor(float("nan"), dtype=dtype)):
        flat.grads.fill_(float("nan"))
        flat.step(0.1, grad_scale, skip=torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, flat.everything(), strict=True))
    # And the next step is as if nothing had been.
    flat.grads.zero_()
    flat.draw_gradients()
    flat.step(0.1, skip=torch.tensor(0.0))
    flat.step_torch(0.1)
    assert flat.error() < (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("name", [one for one in CHOICES if one not in ("rprop", "lion")])  # they take signs alone
def test_without_the_flag_nan_goes_everywhere(name: str) -> None:
    flat = Flat(CHOICES[name])
    flat.grads.fill_(float("nan"))
    flat.step(0.1, skip=torch.tensor(0.0))
    assert all(segment.param.isnan().all() for segment in flat.segments)


@pytest.mark.parametrize("name", CHOICES)
def test_state_round_trip(name: str) -> None:
    flat, other = Flat(CHOICES[name]), Flat(CHOICES[name])
    for _ in range(2):
        flat.draw_gradients()
        flat.step(0.1)
    for (_, goal), (_, state) in zip(other.optimizer.states(), flat.optimizer.states(), strict=True):
        for key, tensor in state.items():
            goal[key].copy_(tensor)
    other.params.copy_(flat.params)
    flat.draw_gradients()
    other.grads.copy_(flat.grads)
    flat.step(0.1)
    other.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(flat.everything(), other.everything(), strict=True))


def test_no_segments() -> None:
    optimizer = FlatOptimizer(CHOICES["adamw"], [Segment(torch.zeros(0), torch.zeros(0))])
    optimizer.step(CHOICES["adamw"].settings(0))
    assert optimizer.states() == []


def test_the_callers_tensors_keep_their_gradients() -> None:
    param = torch.zeros(8, requires_grad=True)
    FlatOptimizer(CHOICES["adamw"], [Segment(param, torch.ones(8))]).step(CHOICES["adamw"].settings(0))
    assert param.grad is None
    assert torch.allclose(param, torch.full((8,), -0.1), atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd"])
def test_a_cycle_of_momentum_reaches_the_update(name: str) -> None:
    """OneCycle moves the learning rate and the momentum; the rest of a step is what it was."""
    own = {"momentum": 0.5} if name == "sgd" else {"betas": (0.6, 0.9)}
    flat = Flat(OptimizerChoice(name, lr=0.1, schedule="one_cycle", total_steps=12, **own))  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.OneCycleLR(flat.torch, max_lr=0.1, total_steps=12)
    for step in range(12):
        flat.draw_gradients()
        flat.optimizer.step(flat.choice.settings(step))
        flat.torch.step()
        schedule.step() if step < 11 else None
    assert flat.error() < 1e-12


def rates(**numbers: object) -> list[float]:
    choice = OptimizerChoice(lr=2.0, **numbers)  # type: ignore[arg-type]
    return [choice.learning_rate(step) for step in range(25)]


def test_constant_schedule() -> None:
    assert rates() == [2.0] * 25
    assert rates(warmup_steps=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_schedule() -> None:
    lr = rates(schedule="cosine", warmup_steps=4, total_steps=20, min_lr_ratio=0.1)
    assert lr[3] == lr[4] == 2.0
    assert lr[19] == pytest.approx(0.2, abs=1e-15)
    assert lr[24] == lr[19]
    assert lr[9] == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 3)), abs=1e-15)
    assert all(a > b for a, b in pairwise(lr[4:20]))
    assert rates(schedule="cosine", warmup_steps=9, total_steps=10, min_lr_ratio=0.1)[8:11] == [2.0, 0.2, 0.2]


def test_wsd_schedule() -> None:
    lr = rates(schedule="wsd", warmup_steps=4, total_steps=20, min_lr_ratio=0.1, decay_fraction=0.25)
    assert lr[3:15] == [2.0] * 12
    assert lr[15:20] == pytest.approx([1.64, 1.28, 0.92, 0.56, 0.2], abs=1e-15)
    assert lr[20:] == pytest.approx([0.2] * 5, abs=1e-15)
    touching = rates(schedule="wsd", warmup_steps=15, total_steps=20, min_lr_ratio=0.1, decay_fraction=0.25)
    assert touching[14:16] == pytest.approx([2.0, 1.64], abs=1e-15)


def test_decay_is_for_matrices() -> None:
    choice = OptimizerChoice()
    assert [choice.group_of(name, shape) for name, shape in SHAPES.items()] == [0, 1, 1, 0, 0]
    assert OptimizerChoice(decay="all").group_of("bias", (7,)) == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"name": "adamww"}, r"optimizer.name: 'adamww' is not legal.*Did you mean \"adamw\""),
        ({"schedule": "cosin"}, r"optimizer.schedule.*Did you mean \"cosine\""),
        ({"lr": -1.0}, "optimizer.lr: -1.0 is not legal; legal: a number of at least 0"),
        ({"lr": float("nan")}, "optimizer.lr: nan"),
        ({"lr": "fast"}, "optimizer.lr: 'fast'"),
        ({"betas": (0.9, 1.0)}, "optimizer.betas: 1.0 is not legal.*less than 1"),
        ({"betas": 0.9}, "optimizer.betas: 0.9 is not legal; legal: two numbers"),
        ({"momentum": 0.9}, 'optimizer.momentum: 0.9 is not legal for "adamw".*sgd, rmsprop'),
        ({"name": "sgd", "betas": (0.8, 0.9)}, 'optimizer.betas.*"sgd"'),
        ({"name": "sgd", "nesterov": True}, "optimizer.nesterov.*momentum above 0"),
        ({"schedule": "cosine"}, "optimizer.total_steps: 0 is not legal.*more than warmup_steps = 0"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps: -1"),
        (
            {"schedule": "wsd", "warmup_steps": 90, "total_steps": 100},
            "optimizer.warmup_steps: 90 is not legal with decay_fraction = 0.2; legal: at most 80",
        ),
        ({"min_lr_ratio": 1.5}, "optimizer.min_lr_ratio: 1.5.*at most 1"),
    ],
)
def test_wrong_choices_are_refused(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerChoice(**numbers)  # type: ignore[arg-type]


def test_optimizers_that_count_on_the_host_are_refused() -> None:
    """MPS has no counters of steps on the device but for fused kernels: a step could not be skipped without a wait."""
    for name in ("radam", "nadam", "rmsprop"):
        legal = ", ".join(sorted({"adagrad", "adam", "adamw", "sgd", *WHOLE}))
        with pytest.raises(ConfigError, match=f'"{name}" is not legal on devices of type mps.*legal: {legal}'):
            check_optimizer(OptimizerChoice(name), torch.device("mps"))
        for device in ("cpu", "cuda", "xpu"):
            check_optimizer(OptimizerChoice(name), torch.device(device))
    for name in ("adamw", "sgd", "adagrad"):
        check_optimizer(OptimizerChoice(name), torch.device("mps"))
