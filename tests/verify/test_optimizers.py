"""Every optimizer, and groups of parameters with hyperparameters of their own, under every kind of plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from covering import covering
from models import captured
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import APPLIES, OPTIMIZERS, ROWS, WHOLE
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tensor import tensor_parallel
from shardwise.units.share import Share, Span, Updated
from shardwise.verify.verify import verify

PLANS: dict[str, Plan] = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero-1": data_parallel(Plan.of(), 3, 1),
    "zero-2": data_parallel(Plan.of(microbatches=2), 2, 2),
    "zero-3": data_parallel(Plan.of(), 3, 3),
    "offload": data_parallel(Plan.of(offload="optimizer"), 2, 1),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "pp": pipeline(Plan.of(microbatches=3), 2, "1f1b"),
    "sync": parameter_server(data_parallel(Plan.of(), 3), 2),
    "async": asynchronous_server(Plan.of(), "async", 2, 2),
}

SIGNS = ("lion", "rprop")  # they make a step of a sign: where a gradient is 0 but for rounding, that is anybody's guess


def choice_of(name: str, **numbers: Any) -> OptimizerChoice:
    options = OPTIMIZERS[name].options
    given: dict[str, Any] = {"eps": 1e-4, "weight_decay": 0.1, "momentum": 0.9, **numbers}
    return OptimizerChoice(name, lr=1e-3, **{k: v for k, v in given.items() if k in options or k in numbers})  # type: ignore[arg-type]


CHOICES: dict[str, OptimizerChoice] = {n: choice_of(n) for n in OPTIMIZERS if n not in (*WHOLE, *ROWS)} | {
    "amsgrad": choice_of("adamw", amsgrad=True),
    "centered": choice_of("rmsprop", centered=True),
    "dampening": choice_of("sgd", dampening=0.3),
    "maximize": choice_of("adam", maximize=True),
    "decoupled": choice_of("nadam", decoupled_weight_decay=True),
    "several": choice_of(
        "adamw",
        groups=(
            ParameterGroup.of("blocks.0.*", name="rmsprop", eps=1e-4, centered=True),
            ParameterGroup.of("blocks.1.*weight", name="rmsprop", eps=1e-4, momentum=0.9),
            ParameterGroup.of("*bias", name="sgd", lr=1e-2),
        ),
    ),
    "adagrad begun": choice_of("adagrad", initial_accumulator_value=0.1, lr_decay=0.1),
    "some with momentum": choice_of(
        "sgd", nesterov=True, groups=(
            ParameterGroup.of("blocks.0.*", momentum=0.0), ParameterGroup.of("*bias", nesterov=False, maximize=True),
            ParameterGroup.of("blocks.1.mlp.*", momentum=0.5, nesterov=False, dampening=0.3),
        ),
    ),
    "some without": choice_of("sgd", momentum=0.0, groups=(ParameterGroup.of("*.mlp.*", momentum=0.9, nesterov=True),)),
    "some with amsgrad": choice_of(
        "adamw", groups=(ParameterGroup.of("blocks.0.*", amsgrad=True), ParameterGroup.of("*bias", maximize=True)),
    ),
    "some centered": choice_of(
        "rmsprop", groups=(
            ParameterGroup.of("blocks.0.*weight", centered=True, momentum=0.0),
            ParameterGroup.of("*bias", momentum=0.0),
        ),
    ),
    "some decoupled": choice_of("nadam", groups=(ParameterGroup.of("blocks.*", decoupled_weight_decay=True),)),
    "some begun": choice_of("adagrad", groups=(ParameterGroup.of("blocks.0.*", initial_accumulator_value=0.1),)),
}  # fmt: skip


def check(name: str, plan: Plan, choice: OptimizerChoice) -> Any:
    one, make, loss = captured(name)
    torch.manual_seed(3)
    return verify(one.module, [make(rows) for rows in (9, 8, 7)], plan, loss=loss, optimizer=choice, captured=one)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("choice", "plan"), list(covering(list(itertools.product(CHOICES, PLANS)))))
def test_every_optimizer(choice: str, plan: str) -> None:
    report = check("mlp" if CHOICES[choice].name in SIGNS else "gpt", PLANS[plan], CHOICES[choice])
    assert report.passed, (report.largest, report.worst[:3])


def grouped(name: str) -> OptimizerChoice:
    """Another rate and decay for some matrices, a decay for biases, and, where there is one, another momentum."""
    more = {"momentum": 0.5} if name == "sgd" else {"betas": (0.5, 0.8)} if name in APPLIES["betas"] else {}
    groups = (
        ParameterGroup.of("*.attention.*weight", lr=3e-3, weight_decay=0.4),
        ParameterGroup.of("*bias", weight_decay=0.2),
        ParameterGroup.of(["wte.weight", "blocks.1.mlp.up.*"], lr=5e-4, **more),
    )  # fmt: skip
    return choice_of(name, groups=groups, schedule="cosine", warmup_steps=2, total_steps=5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_groups(plan: str, by_layer: bool) -> None:
    choice = grouped(("sgd", "adamw", "rmsprop")[len(plan) % 3])
    choice = replace(choice, layer_decay=0.6) if by_layer else choice
    report = check("gpt", PLANS[plan], choice)
    assert report.passed, (report.largest, report.worst[:3])


def test_a_parameter_in_the_wrong_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Share.of

    def wrong(*args: Any) -> Share:
        share = of(*args)
        spans = [tuple(Span(s.start, s.stop, 0) for s in one.spans) for one in share.updates]
        updates = tuple(Updated(each, one.name) for each, one in zip(spans, share.updates, strict=True))
        return replace(share, updates=updates)

    monkeypatch.setattr(Share, "of", staticmethod(wrong))
    assert not check(
        "gpt", PLANS["zero-1"], OptimizerChoice("adamw", groups=(ParameterGroup.of("*bias", lr=0.1),))
    ).passed
