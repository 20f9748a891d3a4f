"""What people's own loops do beside model(x), backward and step: it acts as in the plain loop, or an error names it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import Plan
from shardwise.core.errors import ShardwiseError
from shardwise.train.distribute import distribute

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[Any, Any]]
Log = list[Any]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net(norm: bool = False) -> nn.Sequential:
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(4, 8, bias=not norm), middle, nn.Linear(8, 3))


def sgd(module: nn.Module, **more: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, **more)


def batches(number: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(number)]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Any:
    return functional.cross_entropy(model(x), y)


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return float(loss)


def sharpness_aware(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        moves = [0.5 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        second = loss_of(model, x, y)
        second.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        log += [loss.item(), second.item()]


def decay_between_backward_and_step(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module, momentum=0.9))
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        for p in model.parameters():
            p.data.mul_(0.9)
        optimizer.step()
        log.append(loss.item())


def a_look_after_a_write(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        loss = loss_of(model, x, y)
        for p in model.parameters():
            p.data.mul_(0.9)
        log += [loss.item(), step(model, optimizer, x, y)]


def gradients_clipped_by_the_optimizers_groups(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module, momentum=0.9))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
        optimizer.step()
        schedule.step()
        log += [loss.item(), norm.item(), optimizer.param_groups[0]["lr"]]


def an_average_by_torchs_class(wrap: Wrap, log: Log) -> None:
    """Of a copy from before, which takes what the distributed model shows after each step."""
    average = AveragedModel(module := net(), multi_avg_fn=get_ema_multi_avg_fn(0.7))
    model, optimizer = wrap(module, sgd(module, momentum=0.9))
    for x, y in batches():
        loss = step(model, optimizer, x, y)
        average.update_parameters(model)
        log += [loss, *(float(p.square().sum()) for p in average.parameters())]


def gradients_clipped_by_value(wrap: Wrap, log: Log) -> None:
    """By torch's function, which looks at the gradients, and by the optimizer, which lets the step do it."""
    model, optimizer = wrap(module := net(), sgd(module, momentum=0.9))
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        if number % 2 and hasattr(optimizer, "clip_grad_value_"):
            optimizer.clip_grad_value_(0.02)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        log += [loss.item()]


def clipped_weights_of_another_model(wrap: Wrap, log: Log) -> None:
    first, one = wrap(module := net(), sgd(module))
    second, two = wrap(other := nn.Linear(3, 1), sgd(other))
    for x, _ in batches():
        two.zero_grad()
        second(first(x).detach()).square().mean().backward()
        two.step()
        for p in second.parameters():
            p.data.clamp_(-0.1, 0.1)
        one.zero_grad()
        loss = second(first(x)).mean()
        loss.backward()
        one.step()
        log.append(loss.item())


def frozen_before_the_first_step(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module, weight_decay=0.1))
    for p in list(model.parameters())[:2]:
        p.requires_grad = False
    log += [step(model, optimizer, x, y) for x, y in batches()]


def frozen_for_another_model(wrap: Wrap, log: Log) -> None:
    first, one = wrap(module := net(), sgd(module))
    second, two = wrap(other := nn.Linear(3, 1), sgd(other))
    for x, _ in batches():
        for p in second.parameters():
            p.requires_grad_(False)
        one.zero_grad()
        two.zero_grad()
        loss = second(first(x)).square().mean()
        loss.backward()
        one.step()
        for p in second.parameters():
            p.requires_grad_(True)
        other_loss = (second(first(x).detach()) - 1).square().mean()
        other_loss.backward()
        two.step()
        log += [loss.item(), other_loss.item()]


def an_attribute_and_a_method_that_returns_the_model(wrap: Wrap, log: Log) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = net(), 1.0

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * self.scale

    model, optimizer = wrap(module := Scaled(), sgd(module))
    model.scale = 0.5
    model = model.to("cpu")
    log += [step(model, optimizer, x, y) for x, y in batches()]


def a_metric_before_backward(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        output = model(x)
        log += [(output.argmax(1) == y).float().mean().item(), *output.flatten().tolist()]
        optimizer.zero_grad()
        torch.autograd.backward([functional.cross_entropy(output, y), output.mean()])
        optimizer.step()


def tensors_made_of_values(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        log += torch.tensor([loss.detach(), loss.item()]).tolist() + [torch.tensor(loss.detach()).item()]


def noise_like_the_output(wrap: Wrap, log: Log) -> None:
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        output = model(x)
        log.append(torch.zeros_like(output).sum().item())
        optimizer.zero_grad()
        functional.cross_entropy(output + torch.zeros_like(output), y).backward()
        optimizer.step()


def functions_of_a_mean(wrap: Wrap, log: Log) -> None:
    """With microbatches, each of them has a part of the mean."""
    model, optimizer = wrap(module := net(), sgd(module))
    for x, y in batches():
        optimizer.zero_grad()
        output = model(x)
        loss, other = functional.cross_entropy(output, y), output.abs().mean()
        (loss + other).backward()
        perplexity, ratio = loss.exp(), loss / other
        if len(log) % 8:
            log += [(loss * loss).item(), other.exp().item()]
        optimizer.step()
        log += [perplexity.item(), ratio.item(), loss.item(), other.item(), output.softmax(0).amax().item()]


def written_through_numpy(wrap: Wrap, log: Log) -> None:
    """Torch does not count such a write, between two uses of one tensor in a step."""
    model, optimizer = wrap(module := nn.Linear(4, 3), sgd(module))
    x = torch.zeros(6, 4)
    for number, (_, y) in enumerate(batches()):
        x.numpy()[:] = number + 1
        first = model(x).detach()
        x.numpy()[:] = -number
        loss = functional.cross_entropy(model(x.clone()), y) + (model(x) * first).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())


LOOPS = [
    gradients_clipped_by_the_optimizers_groups, gradients_clipped_by_value, an_average_by_torchs_class,
    sharpness_aware, decay_between_backward_and_step, a_look_after_a_write, clipped_weights_of_another_model,
    frozen_before_the_first_step, frozen_for_another_model, an_attribute_and_a_method_that_returns_the_model,
    a_metric_before_backward, tensors_made_of_values, noise_like_the_output,
    functions_of_a_mean, written_through_numpy,
]  # fmt: skip


def ran(loop: Callable[[Wrap, Log], None], microbatches: int | None) -> tuple[Log, list[dict[str, Tensor]]]:
    """Return what a loop logs and the states of its models, plain where ``microbatches`` is None."""
    torch.manual_seed(0)
    log: Log = []
    models: list[Any] = []

    def wrap(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        if microbatches is None:
            models.append(module)
            return module, optimizer
        made = distribute(module, optimizer, Plan.of(precision="fp64", microbatches=microbatches))
        models.append(made[0])
        return made

    loop(wrap, log)
    return log, [{name: value.clone() for name, value in model.state_dict().items()} for model in models]


@pytest.mark.quick(1)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_numbers_of_the_plain_loop(loop: Callable[[Wrap, Log], None], microbatches: int) -> None:
    (expected, plain), (found, ours) = ran(loop, None), ran(loop, microbatches)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10) and len(found) > 3
    for one, other in zip(plain, ours, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-10)


def test_statistics_of_backwards_that_add_up() -> None:
    """Each forward has its backward, and writes its statistics; the loop holds every loss until the step."""

    def run(distributed: bool) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        module: Any = net(norm=True)
        model, optimizer = distribute(module, sgd(module)) if distributed else (module, sgd(module))
        found = []
        for x, y in batches(2):
            optimizer.zero_grad()
            losses = [loss_of(model, x + shift, y) / 2 for shift in (0, 1)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            found += [loss.item() for loss in losses]
        return found, model.state_dict()["1.running_mean"].tolist()

    expected = run(False)
    for found, one in zip(run(True), expected, strict=True):
        assert found == pytest.approx(one, rel=1e-10, abs=1e-10)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return -gradients[0]


def penalty(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return loss_of(model, x, y) + sum(p.square().sum() for p in model.parameters())


def penalty_by_itself(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    sum(p.square().sum() for p in model.parameters()).backward()
    return loss


def learned_weight(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return loss_of(model, x, y) * torch.zeros((), requires_grad=True).exp()


def adversarial(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return loss_of(model, x.requires_grad_(), y)


def reversed_gradient(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return loss_of(model, x, y) + Reversed.apply(model(x)).mean()  # type: ignore[no-untyped-call]


def filled(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    outputs = torch.zeros(6, 4)
    outputs[:, :3] = model(x)
    return outputs.mean() + loss_of(model, x, y)


def total(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    found = torch.zeros(())
    found += loss_of(model, x, y)
    return found


def gradient_penalty(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))[0].sum()


def hook(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    output = model(x)
    output.register_hook(print)
    return output.sum()


def vectorised(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return torch.func.vmap(lambda one: one.square().sum())(model(x)).mean()


def copied(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return copy.deepcopy(model)(x).sum()


def scaled(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(loss_of(model, x, y))
    loss.backward()
    scaler.step(optimizer)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (penalty, "a tensor that requires a gradient is used with .*weight_decay"),
        (penalty_by_itself, "gradients of parameters were set beside"),
        (learned_weight, "a tensor that requires a gradient is used"),
        (adversarial, "a tensor that requires a gradient is used"),
        (reversed_gradient, r"autograd.Function \(Reversed\) is applied"),
        (filled, "__setitem__ .* writes a model's output into a tensor of the loop"),
        (total, "writes a model's output into a tensor of the loop.*total = total"),
        (gradient_penalty, r"grad of a model's output .*legal: loss.backward\(\)"),
        (hook, "register_hook of a model's output"),
        (vectorised, "where nothing records it"),
        (copied, r"copy.deepcopy\(model\) under distribute"),
        (scaled, r"GradScaler.*enabled=False"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_gradient_that_would_be_missing_is_an_error(made: Callable[..., Any], message: str, steps: int) -> None:
    """In the first step, and after one."""
    torch.manual_seed(0)
    model, optimizer = distribute(module := net(), sgd(module))
    for x, y in batches(steps):
        step(model, optimizer, x, y)
    optimizer.zero_grad()

    def last() -> None:
        made(model, optimizer, *batches(1)[0]).backward()
        optimizer.step()

    with pytest.raises(ShardwiseError, match=message):
        last()


def test_parameters_are_not_frozen_in_part_after_the_first_step() -> None:
    model, optimizer = distribute(module := net(), sgd(module))
    (x, y), *_ = batches()
    step(model, optimizer, x, y)
    next(model.parameters()).requires_grad = False
    with pytest.raises(
        ShardwiseError, match=r"requires_grad of 0.weight is False.*test_own_habits|test_own_habits.*0.w"
    ):
        model(x)


def test_a_forward_before_the_first_step_that_writes_statistics() -> None:
    model, optimizer = distribute(module := net(norm=True), sgd(module))
    (x, y), *_ = batches()
    model(x)
    with pytest.raises(
        ShardwiseError, match="a forward in training without backward and step writes to 1.running_mean"
    ):
        step(model, optimizer, x, y)


def test_values_of_which_each_microbatch_has_its_own() -> None:
    """A loss in which rows meet differs with microbatches: a warning says so, and no value stands for the batch's."""
    torch.manual_seed(0)
    module = net()
    model, optimizer = distribute(module, sgd(module), Plan.of(precision="fp64", microbatches=2))
    (x, _), *_ = batches()
    output = model(x)
    first, second = output.square().mean(), output.abs().mean()
    (first * second).backward()
    with pytest.warns(UserWarning, match="test_own_habits.*2 microbatches are not the step of the whole batch"):
        optimizer.step()
    torch.testing.assert_close(output.square().mean(), net_of(x).square().mean(), rtol=1e-10, atol=1e-10)
    with pytest.raises(ShardwiseError, match="not computed: each microbatch has one of its own"):
        first.item()


def test_a_model_that_is_not_captured_is_told_of() -> None:
    """Where each microbatch or rank has a part of the rows, by which forward decides."""

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return (
                torch.stack([row * 2 if float(row.detach().sum()) > 0 and locals() else row for row in h])
                .square()
                .mean()
            )

    for microbatches in (1, 2):
        module = Decides()
        model, optimizer = distribute(module, sgd(module), Plan.of(precision="fp64", microbatches=microbatches))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(torch.randn(6, 4, dtype=torch.float64)).backward()
            optimizer.step()
        told = [str(one.message) for one in found if "not captured, trains as one unit" in str(one.message)]
        assert len(told) == (microbatches > 1) and all("test_own_habits.py" in one for one in told), told


def net_of(x: Tensor) -> Any:
    torch.manual_seed(0)
    return net()(x).detach()


def test_targets_that_number_the_rows_with_microbatches() -> None:
    torch.manual_seed(0)
    module = net()
    model, optimizer = distribute(module, sgd(module), Plan.of(precision="fp64", microbatches=2))
    (x, _), *_ = batches()
    one, other = model(x), model(x + 0.1)
    functional.cross_entropy(one @ other.t(), torch.arange(6)).backward()
    with pytest.raises(ShardwiseError, match="is not possible on a part of the rows, and each microbatch is by itself"):
        optimizer.step()
