"""What a user's loop does to the model beside the steps: it acts as on one device, or raises where it is done."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import distribute
from shardwise.core.errors import ShardwiseError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan

CASES = 300


class Net(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.second = nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(3))
        self.temperature, self.options = 1.0, SimpleNamespace(factor=1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.drop(self.first(x).tanh())
        return F.cross_entropy(self.second(hidden) * self.scale / self.temperature, y) * self.options.factor


class Branched(Net):
    """It cannot be captured, for a branch depends on what it computes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss * 2 if loss > 1e9 and locals() else loss


class Deciding(Net):
    """A branch of its forward depends on values of the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss * 2 if x.sum() > 1e9 else loss


class Normed(Net):
    """Its forward writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.norm(self.first(x))) * self.scale / self.temperature, y)


KINDS: dict[str, type[Net]] = {"captured": Net, "not captured": Branched, "BatchNorm": Normed}


@dataclass
class Loop:
    """A training loop: the user's module and optimizer, what stands for them, and the losses of evaluations."""

    net: Net
    theirs: torch.optim.Optimizer
    model: Any
    optimizer: Any
    average: nn.Module | None = None
    seen: list[Tensor] = field(default_factory=list)


def batch(step: int) -> dict[str, Tensor]:
    torch.manual_seed(10 + step)
    return {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}


def plain(kind: type[Net] = Net) -> Loop:
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Loop(net, optimizer, net, optimizer)


def distributed(kind: type[Net] = Net) -> Loop:
    net = kind()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = Plan.of(Mesh.of(dp=1), microbatches=1 if issubclass(kind, Normed) else 2)
    model, optimizer = distribute(net, theirs, plan)
    return Loop(net, theirs, model, optimizer)


def set_rate_there(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5


def ema(loop: Loop) -> None:
    if loop.average is None:
        loop.average = copy.deepcopy(loop.net)
    with torch.no_grad():
        for own, new in zip(loop.average.parameters(), loop.net.parameters(), strict=True):
            own.mul_(0.9).add_(new, alpha=0.1)


def clamp(loop: Loop) -> None:
    with torch.no_grad():
        loop.net.first.weight.clamp_(-0.1, 0.1)


def set_rate(loop: Loop) -> None:
    loop.theirs.param_groups[0]["lr"] *= 0.5


def evaluated(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.seen.append(loop.model(**batch(9)).detach().clone())
    loop.model.train()


def evaluated_in_inference_mode(loop: Loop) -> None:
    loop.model.eval()
    with torch.inference_mode():
        found = loop.model(**batch(9)).detach()
    loop.seen.append(found.clone())
    loop.model.train()


def evaluated_by_their_module(loop: Loop) -> None:
    loop.net.eval()
    with torch.no_grad():
        loop.seen.append(loop.model(**batch(9)).detach().clone())
    loop.net.train()


HABITS: dict[str, Callable[[Loop], object]] = {
    "nothing": lambda loop: None,
    "another learning rate": set_rate,
    "another learning rate in what is stepped": set_rate_there,
    "sizes": lambda loop: sum(p.numel() for p in loop.net.parameters() if p.requires_grad),
    "print the module": lambda loop: str(loop.net),
    "names": lambda loop: [name for name, _ in loop.net.named_parameters()],
    "an attribute": lambda loop: setattr(loop.net, "temperature", 0.5),
    "clamped weights": clamp,
    "weights by .data": lambda loop: loop.net.second.weight.data.mul_(0.5),
    "weights by initial values": lambda loop: nn.init.zeros_(loop.net.second.bias),
    "frozen": lambda loop: loop.net.first.weight.requires_grad_(False),
    "frozen by the attribute": lambda loop: setattr(loop.net.first.bias, "requires_grad", False),
    "a part in evaluation mode": lambda loop: loop.net.drop.eval(),
    "clipped gradients": lambda loop: nn.utils.clip_grad_norm_(loop.net.parameters(), 0.01),
    "gradients to zero by hand": lambda loop: loop.net.zero_grad(),
    "theirs to zero": lambda loop: loop.theirs.zero_grad(),
    "their step": lambda loop: loop.theirs.step(),
    "another state": lambda loop: loop.net.load_state_dict(type(loop.net)().state_dict()),
    "a buffer": lambda loop: loop.net.scale.mul_(2),
    "a new buffer": lambda loop: setattr(loop.net, "scale", torch.full((3,), 2.0)),
    "an average of weights": ema,
    "a copy of the module": lambda loop: copy.deepcopy(loop.net),
    "weights to a list": lambda loop: loop.net.second.bias.tolist(),
    "an evaluation": evaluated,
    "an evaluation by their module's mode": evaluated_by_their_module,
    "an evaluation in inference mode": evaluated_in_inference_mode,
    "their state again": lambda loop: loop.theirs.load_state_dict(loop.theirs.state_dict()),
    "the state": lambda loop: loop.seen.extend(v.clone() for _, v in sorted(loop.model.state_dict().items())),
    "the buffers": lambda loop: loop.seen.extend(one.clone() for one in loop.model.buffers()),
    "their buffers": lambda loop: loop.seen.extend(one.clone() for one in loop.net.buffers()),
    "the parameters": lambda loop: loop.seen.extend(one.detach().clone() for one in loop.model.parameters()),
    "other buffers": lambda loop: [one.mul_(2) for one in loop.model.buffers()],
    "a forward for nothing": lambda loop: loop.model(**batch(8)),
    "a hook on a part": lambda loop: loop.net.first.register_forward_hook(lambda *_: None),
    "another part": lambda loop: setattr(loop.net, "drop", nn.Dropout(0.5)),
    "an attribute in an attribute": lambda loop: setattr(loop.net.options, "factor", 2.0),
    "further parameters": lambda loop: loop.theirs.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "a hook on their step": lambda loop: loop.theirs.register_step_pre_hook(lambda *_: None),
}
ACTS = (
    "nothing", "another learning rate", "another learning rate in what is stepped", "sizes", "print the module",
    "names", "an evaluation", "an evaluation by their module's mode", "their state again", "a forward for nothing",
    "an evaluation in inference mode", "the state", "the buffers", "the parameters", "other buffers",
)  # fmt: skip


def run(loop: Loop, habits: list[tuple[int, str, str]], autocast: int = -1, no_zero: int = -1) -> list[Tensor]:
    """Three steps, with habits as (step, place, name); return the losses, and the weights at the end."""
    losses = []
    for step in range(3):

        def do(place: str, step: int = step) -> None:
            for at, where, name in habits:
                if (at, where) == (step, place):
                    HABITS[name](loop)

        do("before")
        with torch.autocast("cpu", torch.bfloat16, enabled=step == autocast):
            loss = loop.model(**batch(step))
        do("forward")
        loss.backward()
        do("backward")
        loop.optimizer.step()
        do("step")
        if step != no_zero:
            loop.optimizer.zero_grad()
        losses.append(loss.detach().clone())
    state = loop.model.state_dict()
    return [*losses, *loop.seen, *(state[name] for name in sorted(state))]


def same_or_raised(habits: list[tuple[int, str, str]], kind: type[Net] = Net, **more: int) -> str:
    """Run both loops; return what the distributed one raised, or "" where it came out as the plain one."""
    try:
        expected = run(plain(kind), habits, **more)
    except RuntimeError:
        return "the plain loop itself fails"
    try:
        ours = run(distributed(kind), habits, **more)
    except (ShardwiseError, RuntimeError) as error:  # torch's load_state_dict puts errors together
        if not isinstance(error, ShardwiseError) and "under distribute()" not in str(error):
            raise
        return str(error)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an evaluation", "an evaluation in inference mode", "a forward for nothing"])
def test_habits_with_a_forward_that_decides(name: str) -> None:
    assert same_or_raised([(1, "before", name)], Deciding) == ""


@pytest.mark.quick(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HABITS)
def test_each_habit(name: str, kind: str) -> None:
    """After the first step: what acts is as in the plain loop, all else raises."""
    found = same_or_raised([(1, "before", name)], KINDS[kind])
    # A forward without a backward writes to the buffers of a BatchNorm; which ones a model writes to that is not
    # captured, nobody knows.
    writes = name == "a forward for nothing" and kind != "captured"
    assert bool(found) == (name not in ACTS or writes), found
    assert not found or "legal" in found or "under distribute()" in found


@pytest.mark.slow
def test_before_the_first_batch_everything_acts() -> None:
    for name in ("an attribute", "clamped weights", "another state", "frozen by the attribute", "a new buffer"):
        if name == "frozen by the attribute":
            continue  # the optimizer would have a parameter without a gradient, which distribute refuses
        assert same_or_raised([(0, "before", name)]) == "", name


@pytest.mark.quick(3)
@pytest.mark.few(40)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", HABITS)
def test_each_habit_within_a_step(name: str, step: int, where: str, kind: str) -> None:
    """Also before anything is captured, in the first step; what needs gradients that are there on one device raises."""
    found = same_or_raised([(step, where, name)], KINDS[kind])
    gradients = name in ("clipped gradients", "gradients to zero by hand", "theirs to zero", "their step")
    assert not (gradients and where == "backward") or "gradients" in found


@pytest.mark.slow
def test_around_the_step() -> None:
    assert "torch.autocast" in same_or_raised([], autocast=1)
    assert "gradients of the last step are still there" in same_or_raised([], no_zero=0)
    assert same_or_raised([], no_zero=2) == ""


def test_weights_come_back_at_the_end() -> None:
    """After close() the user's own module has the trained values, as after a plain loop, and is an ordinary module."""
    loop, expected = distributed(Normed), plain(Normed)
    run(expected, [])
    run(loop, [])
    loop.model.trainer.close()
    assert type(loop.net.first.weight) is nn.Parameter and type(loop.net.scale) is Tensor
    for name, value in expected.net.state_dict().items():
        torch.testing.assert_close(loop.net.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    loop.net.first.weight.data.mul_(2)  # it may be used as before


def test_a_loss_that_is_used_twice() -> None:
    loop = distributed()
    loss = loop.model(**batch(0))
    loss.backward()
    with pytest.raises(ShardwiseError, match="called twice before optimizer.step"):
        loss.backward()


@pytest.mark.quick(3)
@pytest.mark.few(12)
@pytest.mark.parametrize("seed", range(CASES))
def test_random_habits(seed: int) -> None:
    """Some habits at random places: equal or raised, never different."""
    choice = random.Random(seed)
    habits = [
        (choice.randrange(3), choice.choice(["before", "forward", "backward", "step"]), choice.choice(sorted(HABITS)))
        for _ in range(choice.choice([1, 1, 2, 4]))
    ]
    more = {"autocast": choice.choice([-1, -1, -1, 0, 2]), "no_zero": choice.choice([-1, -1, -1, 0, 1])}
    same_or_raised(habits, KINDS[choice.choice(sorted(KINDS))], **more)


SCALE = [1.0]


def scaled(output: Tensor, fields: Any) -> Tensor:
    return output * SCALE[0]


def test_what_a_loss_function_reads() -> None:
    net = Net()
    model, optimizer = distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=scaled)
    model(**batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    SCALE[0] = 2.0
    try:
        with pytest.raises(ShardwiseError, match=r"test_habits.SCALE\[0\] \(from 1.0 to 2.0\) changed after"):
            model(**batch(1))
    finally:
        SCALE[0] = 1.0


class Settings:
    factor = 1.0

    class Inner:
        factor = 1.0

    @classmethod
    def read(cls) -> float:
        return TABLE["factor"]


TABLE, CRITIC = {"factor": 1.0}, nn.Linear(3, 1)


class Schedule:
    """Its method reads a class, which no attribute shows."""

    def __call__(self) -> float:
        return Settings.factor


class Criterion:
    def __init__(self) -> None:
        self.factor, self.steps = 1.0, 0

    def __call__(self, output: Tensor, fields: Any) -> Tensor:
        return F.cross_entropy(output, fields["y"]) * self.factor

    def method(self, output: Tensor, fields: Any) -> Tensor:
        return self(output, fields) * self.scale()

    def scale(self) -> float:
        return self.factor


class Scores(Net):
    """A forward without targets, which the loss alone reads; ``mask`` has a default."""

    schedule = Schedule()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.second(self.first(x).tanh() if mask is None else self.first(x * mask))


CRITERION = Criterion()
ELSEWHERE: dict[str, tuple[Callable[[Tensor, Any], Tensor], Callable[[], object], str]] = {
    "the class of an object's method": (
        lambda z, f: F.cross_entropy(z, f["y"]) * Scores.schedule(),
        lambda: setattr(Settings, "factor", 2.0),
        "Settings.factor",
    ),
    "a class in a class": (
        lambda z, f: F.cross_entropy(z, f["y"]) * Settings.Inner.factor,
        lambda: setattr(Settings.Inner, "factor", 2.0),
        "Settings.Inner.factor",
    ),
    "what a class method reads": (
        lambda z, f: F.cross_entropy(z, f["y"]) * Settings.read(),
        lambda: TABLE.update(factor=2.0),
        r"TABLE\['factor'\]",
    ),
    "another network": (
        lambda z, f: CRITIC(z).mean() + f["y"].sum() * 0,
        lambda: nn.init.ones_(CRITIC.weight),
        r"CRITIC._parameters\['weight'\]",
    ),
    "another network by .data": (
        lambda z, f: CRITIC(z).mean() + f["y"].sum() * 0,
        lambda: setattr(CRITIC.weight, "data", torch.zeros(1, 3)),
        r"CRITIC._parameters\['weight'\]",
    ),
    "another network in place by .data": (
        lambda z, f: CRITIC(z).mean() + f["y"].sum() * 0,
        lambda: CRITIC.weight.data.add_(1.0),
        r"CRITIC._parameters\['weight'\]",
    ),
    "the loss itself": (CRITERION, lambda: setattr(CRITERION, "factor", 2.0), "Criterion.factor"),
    "a method as a loss": (CRITERION.method, lambda: setattr(CRITERION, "factor", 3.0), "method.factor"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_read_elsewhere(name: str) -> None:
    loss, change, named = ELSEWHERE[name]
    net = Scores()
    model, optimizer = distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=loss)
    for step in range(2):
        model(**batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        CRITERION.steps += name == "a method as a loss"  # which that does not read
    change()
    with pytest.raises(ShardwiseError, match=f"{named} .*changed after the first batch"):
        model(**batch(1))


def test_fields_of_the_loss_alone_and_arguments_that_are_none() -> None:
    losses = dict[str, list[float]]()
    for kind in ("plain", "ours"):
        net = Scores()
        theirs = torch.optim.SGD(net.parameters(), lr=0.1)
        weigh = lambda z, f: F.cross_entropy(z, f["y"], weight=torch.tensor([1.0, 2.0, 5.0]))  # noqa: E731
        model, optimizer = (
            (net, theirs) if kind == "plain" else distribute(net, theirs, Plan.of(microbatches=2), loss=weigh)
        )
        found = losses.setdefault(kind, [])
        for step in range(3):
            given = batch(step)
            loss = weigh(net(given["x"]), given) if kind == "plain" else model(given["x"], mask=None, y=given["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-5)


def test_an_optimizer_and_a_logger_that_the_model_holds() -> None:
    """Their state is no state of the forward."""
    net = Net()
    theirs = torch.optim.SGD(net.parameters(), lr=0.1)
    net.log, net.optimizer = logging.getLogger("some"), theirs
    model, optimizer = distribute(net, theirs)
    for step in range(2):
        model(**batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.param_groups[0]["lr"] *= 0.5
        net.log.setLevel(10 + step)
