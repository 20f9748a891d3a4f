"""Groups of parameters of a loop's optimizer: they may differ in every option, and what a loop does to them after
``distribute`` is as on one device, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from shardwise import Mesh, Plan
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.train.distribute import distribute

SGD = torch.optim.SGD
STEPS = 6
Groups = Sequence[dict[str, Any]]


class Renamed(AdamW):
    """Its constructor does not name the options that it takes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.second(self.first(x).tanh()).tanh()) - y).square().mean()


def net(frozen: Sequence[str] = ()) -> Net:
    torch.manual_seed(0)
    made = Net().double()
    for name in frozen:
        getattr(made, name).requires_grad_(False)
    return made


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(6, n, generator=generator, dtype=torch.float64) for name, n in (("x", 4), ("y", 1))}


def members(model: Any, *names: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(names)]


def trained(model: Any, optimizer: Any, steps: Sequence[int]) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        model(**batch(step)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def both(module: Net, optimizer: Optimizer, ours: bool) -> tuple[Any, Any]:
    plan = Plan.of(Mesh.of(dp=1), microbatches=2, precision="fp64")
    return distribute(module, optimizer, plan) if ours else (module, optimizer)


def check(found: Sequence[dict[str, Tensor]]) -> None:
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-14)


UNLIKE: dict[str, tuple[type[Optimizer], dict[str, Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "momentum": (SGD, {"momentum": 0.9, "nesterov": True}, ({"momentum": 0.0}, {"nesterov": False})),
    "no momentum": (SGD, {}, ({"momentum": 0.9}, {"momentum": 0.5, "dampening": 0.4})),
    "dampening": (SGD, {"momentum": 0.9, "dampening": 0.2}, ({"dampening": 0.0}, {"momentum": 0.0})),
    "maximize": (AdamW, {}, ({"maximize": True}, {})),
    "amsgrad": (AdamW, {"amsgrad": True}, ({"amsgrad": False}, {})),
    "in a subclass": (Renamed, {"amsgrad": True}, ({}, {"amsgrad": False})),
    "centered": (RMSprop, {}, ({"centered": True}, {"momentum": 0.9})),
    "decoupled": (NAdam, {"weight_decay": 0.1}, ({"decoupled_weight_decay": True}, {})),
    "decoupled adam": (Adam, {"weight_decay": 0.1}, ({"decoupled_weight_decay": True}, {})),
    "begun": (Adagrad, {}, ({"initial_accumulator_value": 0.3}, {"lr_decay": 0.1})),
}


def unlike(name: str, module: nn.Module) -> Optimizer:
    kind, options, (first, second) = UNLIKE[name]
    parts = [members(module, one) for one in ("head", "first", "second")]
    groups = [{"params": p, **own} for p, own in zip(parts, ({}, first, second), strict=True)]
    return kind(groups, lr=1e-2, **options)  # type: ignore[call-arg]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", UNLIKE)
def test_groups_that_differ_in_any_option(name: str) -> None:
    """Their state has in each group what torch has there, and goes on in torch and back."""
    found, optimizers, modules = [], [], [net(), net()]
    for ours, module in enumerate(modules):
        model, optimizer = both(module, unlike(name, module), bool(ours))
        found.append(trained(model, optimizer, range(3)))
        optimizers.append(optimizer)
    check(found)
    state, expected = (copy.deepcopy(one.state_dict()) for one in optimizers[::-1])
    assert {n: set(one) for n, one in state["state"].items() if one} == {
        n: {key for key, value in one.items() if isinstance(value, Tensor)}
        for n, one in expected["state"].items() if any(isinstance(value, Tensor) for value in one.values())
    }  # fmt: skip
    whole = trained(modules[0], optimizers[0], range(3, STEPS))

    def went_on(ours: bool, state: dict[str, Any]) -> dict[str, Tensor]:
        module = net()
        model, optimizer = both(module, unlike(name, module), ours)
        model.load_state_dict(found[0])
        optimizer.load_state_dict(state)
        return trained(model, optimizer, range(3, STEPS))

    check([whole, went_on(True, expected)])
    # Once torch has loaded NAdam's mu_product it is more exact.
    check([went_on(False, expected), went_on(False, state)])


def group(number: int, **options: Any) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: optimizer.param_groups[number].update(options)


def thawed(model: Any, optimizer: Any) -> None:
    """Layers begin to learn, with a rate of their own."""
    new = members(model, "first")
    for p in new:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": new, "lr": 1e-3})


def froze(model: Any, optimizer: Any) -> None:
    for p in members(model, "first"):
        p.requires_grad_(False)


def two(kind: type[Optimizer], **options: Any) -> Callable[[Net], Optimizer]:
    def make(module: Net) -> Optimizer:
        parts = [{"params": members(module, *names)} for names in (("head",), ("first", "second"))]
        return kind(parts, lr=1e-2, **options)  # type: ignore[call-arg]

    return make


ACTS: dict[str, tuple[Callable[[Net], Optimizer], Callable[[Any, Any], None], tuple[int, ...]]] = {
    "eps": (two(AdamW), group(0, eps=1e-2), (0, 2)),
    "weight decay": (two(SGD), group(0, weight_decay=0.3), (0, 2)),
    "maximize": (two(AdamW), group(1, maximize=True), (0, 2)),
    "nesterov": (two(SGD, momentum=0.9), group(1, nesterov=True), (0, 2)),
    "nesterov alone": (two(SGD), group(1, nesterov=True), (0, 2)),
    "decoupled": (two(RAdam, weight_decay=0.1), group(1, decoupled_weight_decay=True), (0, 2)),
    "decoupled adam": (two(Adam, weight_decay=0.1), group(1, decoupled_weight_decay=True), (0,)),
    "no momentum": (two(SGD, momentum=0.9), group(1, momentum=0.0), (0,)),
    "amsgrad": (two(AdamW), group(1, amsgrad=True), (0,)),
    "begun": (two(Adagrad), group(1, initial_accumulator_value=0.5), (0, 2)),
    "frozen": (lambda m: AdamW(m.parameters(), lr=1e-2), froze, (0,)),
    "thawed": (lambda m: AdamW(members(m, "second", "head"), lr=1e-2), thawed, (0,)),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "at"), [(name, at) for name, one in ACTS.items() for at in one[2]])
def test_changes_that_act(name: str, at: int) -> None:
    """Before the first step all may change, later all that adds nothing to the state."""
    make, change, _ = ACTS[name]
    found = []
    for ours in (False, True):
        module = net(["first"] if name == "thawed" else [])
        model, optimizer = both(module, make(module), ours)
        trained(model, optimizer, range(at))
        change(model, optimizer)
        found.append(trained(model, optimizer, range(at, STEPS)))
    check(found)


LATER = "after the first step; legal: the same groups of the same parameters, .*may change before the first step"
WRITTEN = r"is written to \(.*\) under distribute\(\); legal: the same groups"
REFUSED: dict[str, tuple[Callable[[Net], Optimizer], Callable[[Any, Any], object], str]] = {
    "momentum": (two(SGD, momentum=0.9), group(1, momentum=0.0), f"momentum of group 1 changed {LATER}"),
    "amsgrad": (two(AdamW), group(1, amsgrad=True), f"amsgrad of group 1 changed {LATER}"),
    "decoupled": (two(Adam), group(0, decoupled_weight_decay=True), f"decoupled_weight_decay changed {LATER}"),
    "further group": (
        two(AdamW),
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        rf"optimizer.add_param_group\(...\) \(.*\) {LATER}",
    ),
    "appended": (two(AdamW), lambda m, o: o.param_groups.append({}), f"optimizer.param_groups {WRITTEN}"),
    "removed": (two(AdamW), lambda m, o: o.param_groups.pop(), f"optimizer.param_groups {WRITTEN}"),
    "deleted": (two(AdamW), lambda m, o: o.param_groups.__delitem__(1), f"optimizer.param_groups {WRITTEN}"),
    "replaced": (two(AdamW), lambda m, o: setattr(o, "param_groups", []), f"optimizer.param_groups {WRITTEN}"),
    "emptied": (two(AdamW), lambda m, o: o.param_groups[1]["params"].clear(), rf"group\['params'\] {WRITTEN}"),
    "other parameters": (two(AdamW), group(1, params=[]), rf"group\['params'\] {WRITTEN}"),
    "frozen": (two(AdamW), froze, "requires_grad of first.weight is False, unlike when the model was captured"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", REFUSED)
def test_changes_after_the_first_step_that_are_refused(name: str) -> None:
    make, change, message = REFUSED[name]
    module = net()
    model, optimizer = both(module, make(module), True)
    trained(model, optimizer, range(1))

    def changed() -> None:
        change(model, optimizer)
        trained(model, optimizer, range(1, 2))

    with pytest.raises(ShardwiseError, match=message):
        changed()


def test_groups_of_the_optimizer_that_was_given() -> None:
    """The loop may also add to that, which is not the one that it has now."""
    found = []
    for ours in (False, True):
        module = net(["first"])
        theirs = AdamW(members(module, "second", "head"), lr=1e-2)
        model, optimizer = both(module, theirs, ours)
        module.first.requires_grad_(True)
        theirs.add_param_group({"params": members(module, "first"), "weight_decay": 0.5})
        found.append(trained(model, optimizer, range(2)))
    check(found)
    theirs.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ShardwiseError, match=f"its groups of parameters changed {LATER}"):
        trained(model, optimizer, range(1))


def test_groups_of_several_optimizers() -> None:
    module = net(["first"])
    each = [SGD(members(module, "second"), lr=0.1), AdamW(members(module, "head"), lr=1e-2)]
    model, optimizer = distribute(module, each)
    with pytest.raises(ShardwiseError, match=r"add_param_group.*legal: that of one of the optimizers that distribute"):
        optimizer.add_param_group({"params": members(module, "first")})
    module.first.requires_grad_(True)
    each[0].add_param_group({"params": members(module, "first")})
    plain = net()
    pair = [SGD(members(plain, "second", "first"), lr=0.1), AdamW(members(plain, "head"), lr=1e-2)]
    trained(model, optimizer, range(2))
    for step in range(2):
        for one in pair:
            one.zero_grad()
        plain(**batch(step)).backward()
        for one in pair:
            one.step()
    check([plain.state_dict(), model.state_dict()])
    each[1].param_groups.pop()
    with pytest.raises(ShardwiseError, match=f"its groups of parameters changed {LATER}"):
        trained(model, optimizer, range(1))


def test_layers_that_learn_in_no_group() -> None:
    """Before the first step they begin to learn, and the optimizer has not got them."""
    module = net(["first"])
    model, optimizer = both(module, AdamW(members(module, "second", "head"), lr=1e-2), True)
    for p in members(model, "first"):
        p.requires_grad_(True)
    with pytest.raises(ConfigError, match="it must have the parameters of the model that require gradients"):
        trained(model, optimizer, range(1))


def test_a_state_of_other_groups_is_refused() -> None:
    module = net()
    _, optimizer = both(module, two(AdamW)(module), True)
    state = AdamW(net().parameters()).state_dict()
    with pytest.raises(ConfigError, match=r"groups of \[6\] parameters; legal: the \[2, 4\] of this optimizer"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_layers_that_learn_from_the_middle_of_a_run(kind: str) -> None:
    """``distribute`` again takes the trained values and the state of the optimizer; the new group has none yet."""

    def made(module: Net) -> Optimizer:
        old = members(module, "second", "head")
        return AdamW(old, lr=1e-2) if kind == "adamw" else SGD(old, lr=1e-2, momentum=0.9)

    plain, ours = net(["first"]), net(["first"])
    theirs, (model, optimizer) = made(plain), both(ours, made(ours), True)
    trained(plain, theirs, range(3))
    trained(model, optimizer, range(3))
    thawed(plain, theirs)
    state = optimizer.state_dict()["state"]
    model.trainer.close()
    again = made(ours)
    thawed(ours, again)
    model, optimizer = both(ours, again, True)
    optimizer.load_state_dict({"state": state, "param_groups": again.state_dict()["param_groups"]})
    check([trained(plain, theirs, range(3, 7)), trained(model, optimizer, range(3, 7))])
