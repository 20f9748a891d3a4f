"""Optimizers that need whole tensors, under every kind of plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import captured
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tensor import tensor_parallel
from shardwise.units.share import Share
from shardwise.verify.verify import verify

PLANS: dict[str, Plan] = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero-1": data_parallel(Plan.of(), 3, 1),
    "zero-2": data_parallel(Plan.of(microbatches=2), 2, 2),
    "zero-3": data_parallel(Plan.of(), 5, 3),
    "hybrid": data_parallel(Plan.of(), 4, 3, 2),
    "offload": data_parallel(Plan.of(offload="optimizer"), 3, 1),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "tp and zero-3": tensor_parallel(data_parallel(Plan.of(), 3, 3), 2, "1d-sp"),
    "2d": tensor_parallel(Plan.of(), 4, "2d"),
    "pp": pipeline(Plan.of(microbatches=3), 2, "1f1b"),
    "pp, zero-1 and tp": pipeline(tensor_parallel(data_parallel(Plan.of(microbatches=2), 2, 1), 2, "1d"), 2, "1f1b"),
    "2bw": pipeline(Plan.of(microbatches=2), 2, "pipedream-2bw"),
    "sync": parameter_server(data_parallel(Plan.of(), 3), 2),
}

CHOICES: dict[str, OptimizerChoice] = {
    # A bias of keys has a gradient of 0 but for rounding: what divides an update must not be small against that.
    "muon": OptimizerChoice("muon", lr=1e-2, weight_decay=0.1, beside=(("eps", 1e-4), ("lr", 1e-3))),
    "muon without Nesterov": OptimizerChoice(
        "muon", lr=1e-2, nesterov=False, momentum=0.5, ns_steps=3, adjust_lr_fn="match_rms_adamw",
        beside=(("name", "sgd"), ("momentum", 0.9)),
    ),
    "muon in a group": OptimizerChoice(
        "adamw", lr=1e-3, eps=1e-4, groups=(ParameterGroup.of("*.mlp.*", name="muon", lr=1e-2),),
    ),
    "adafactor": OptimizerChoice("adafactor", lr=1e-2, eps=(1e-4, 1e-3), weight_decay=0.1),
    "adafactor maximize": OptimizerChoice(
        "adafactor", lr=1e-2, eps=(1e-4, 1e-2), d=2.0, beta2_decay=-0.5, maximize=True
    ),
    "lamb": OptimizerChoice("lamb", lr=1e-2, eps=1e-4, weight_decay=0.1, schedule="cosine", total_steps=5),
    "shampoo": OptimizerChoice("shampoo", lr=1e-2, eps=1e-2, weight_decay=0.1),
    "shampoo and adafactor": OptimizerChoice(
        "shampoo", lr=1e-2, eps=1e-2,
        groups=(ParameterGroup.of("wte.*", name="adafactor", eps=(1e-4, 1e-3)), ParameterGroup.of("*bias", lr=1e-3)),
    ),
}  # fmt: skip


def check(name: str, plan: Plan, choice: OptimizerChoice) -> Any:
    one, make, loss = captured(name)
    torch.manual_seed(3)
    sizes = (8, 8, 8) if plan.asynchronous else (9, 8, 7)
    return verify(one.module, [make(rows) for rows in sizes], plan, loss=loss, optimizer=choice, captured=one)


CASES = [(name, plan) for i, plan in enumerate(PLANS) for name in [*CHOICES, *CHOICES][3 * i % 8 : 3 * i % 8 + 3]]
"""Three of the choices under each plan, in turn."""


@pytest.mark.quick(3)
@pytest.mark.parametrize(("choice", "plan"), CASES)
def test_the_step_is_that_of_one_device(choice: str, plan: str) -> None:
    report = check("gpt", PLANS[plan], CHOICES[choice])
    assert report.passed, (report.largest, report.worst[:3])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("model", "choice", "plan"),
    [
        ("data-dependent", "lamb", PLANS["zero-1"]),  # which is not captured: parameters are updated one by one
        ("gpt", "lamb", data_parallel(Plan.of(precision="bf16"), 3, 3)),
        ("mixtral", "shampoo", tensor_parallel(data_parallel(Plan.of(), 2, 3), 2, "1d")),  # with stacked experts
        ("mlp", "shampoo", data_parallel(Plan.of(), 3, 3)),  # with frozen, unused and tied parameters
        ("gpt", "lamb", local_training(data_parallel(Plan.of(), 2, 1), 2, 2)),
    ],
    ids=["not captured", "bf16", "experts", "tied", "islands"],
)
def test_other_models_and_plans(model: str, choice: str, plan: Plan) -> None:
    report = check(model, plan, CHOICES[choice])
    assert report.passed, (report.largest, report.worst[:3])


def test_muon_takes_hidden_matrices() -> None:
    """Those in numbered modules and those that a group gives it; AdamW takes the rest."""
    choice = OptimizerChoice("muon", groups=(ParameterGroup.of("blocks.0.*", lr=0.1),))
    named = OptimizerChoice("adamw", groups=(ParameterGroup.of(["wte.weight", "*bias"], name="muon"),))

    def taker(one: OptimizerChoice, name: str, *shape: int) -> tuple[str, float]:
        part = one.parts[one.group_of(name, shape) // 2]
        return part.name, part.lr

    assert taker(choice, "blocks.0.mlp.up.weight", 4, 3) == ("muon", 0.1)
    assert taker(choice, "blocks.1.mlp.up.weight", 4, 3) == ("muon", 1e-3)
    for name, shape in {"blocks.0.norm.weight": (4,), "blocks.1.experts.up": (2, 4, 3), "wte.weight": (9, 3)}.items():
        assert taker(choice, name, *shape) == ("adamw", 1e-3)
    assert [taker(named, "wte.weight", 9, 3)[0], taker(named, "blocks.0.mlp.up.weight", 4, 3)[0]] == ["muon", "adamw"]
    assert taker(named, "blocks.0.mlp.up.bias", 4)[0] == "adamw"


def test_owners_have_about_as_much_to_do() -> None:
    one, _, _ = captured("gpt")
    choice, plan = OptimizerChoice("lamb"), data_parallel(Plan.of(updates="tensors"), 3, 1)
    shares = [[Share.of(b, plan, choice, rank) for b in one.general.buckets] for rank in range(3)]
    owned = [sum(t.numel for share in each for t in share.owned) for each in shares]
    largest = max(p.numel for b in one.general.buckets for p in b.parameters)
    assert sum(owned) == sum(p.numel for b in one.general.buckets for p in b.parameters)
    assert max(owned) - min(owned) <= largest, owned


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: asynchronous_server(Plan.of(), "async", 2, 2), 'needs whole tensors.*server = "async"'),
        (lambda: pipeline(Plan.of(microbatches=2, norm="post-validate"), 2, "1f1b"), 'needs whole.*"post-validate"'),
    ],
)
def test_plans_that_cannot(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("gpt", make(), CHOICES["lamb"])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"name": "muon", "layer_decay": 0.5}, 'layer_decay: 0.5.*none with "muon"'),
        ({"name": "adamw", "beside": (("lr", 1.0),)}, 'beside.*none with "adamw"'),
        ({"name": "muon", "beside": (("name", "muon"),)}, "beside.name: .muon. is not legal"),
        ({"name": "muon", "beside": (("alpha", 0.5),)}, "beside muon: optimizer.alpha: 0.5 is not legal for .adamw"),
        ({"name": "muon", "adjust_lr_fn": "own"}, 'adjust_lr_fn.*"original", "match_rms_adamw"'),
        ({"name": "muon", "ns_steps": 100}, "ns_steps: 100.*1 to 99"),
        ({"name": "adafactor", "eps": 1e-8}, "eps: 1e-08.*two numbers with adafactor"),
        ({"name": "adafactor", "beta2_decay": 0.8}, "beta2_decay"),
        ({"name": "adamw", "groups": (ParameterGroup.of("*", name="lamp"),)}, 'name = .lamp.*Did you mean "lamb"'),
        ({"name": "adamw", "groups": (ParameterGroup.of("*", name="lamb", momentum=0.5),)}, "momentum of the group of"),
    ],
)
def test_choices_that_cannot(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerChoice(**numbers)


def test_muon_with_nothing_to_do() -> None:
    with pytest.raises(ConfigError, match='"muon" has nothing to update: no parameter is in a numbered module'):
        OptimizerChoice("muon").resolved(["wte.weight", "head.weight"])
