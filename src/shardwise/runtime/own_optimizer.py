"""An optimizer whose step is the user's own: its class runs as it is, on whole tensors, one at a time.

A trial on small random tensors shows whether that is the same as on all parameters together, and what state it keeps.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.graph.schema import tensors_in
from shardwise.measure.storage_tracker import StorageTracker

STEPS = 3
SIZES = (5, 4, 3, 2)
"""No dim of a parameter in a trial is longer than that, the first the longest."""


class Kept(NamedTuple):
    """What an optimizer keeps of a parameter under one key: a tensor, or a Python number (0-d, of ``kind``)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Callable[[Any], Any] | None = None

    @staticmethod
    def of(value: Any) -> Kept:
        if isinstance(value, Tensor):
            return Kept(tuple(value.shape), value.dtype)
        return Kept((), torch.tensor(value).dtype if isinstance(value, bool | int) else torch.float64, type(value))

    @staticmethod
    def tensor(value: Any) -> Tensor:
        """Return a value that is kept as a tensor: itself, or a copy of a number."""
        return value if isinstance(value, Tensor) else torch.tensor(value, dtype=Kept.of(value).dtype)

    def empty(self, like: Tensor) -> Tensor:
        """Return memory for it, beside a parameter."""
        wide = self.dtype.is_floating_point and self.kind is None
        device = like.device if self.shape else "cpu"
        return torch.zeros(self.shape, dtype=like.dtype if wide and self.shape else self.dtype, device=device)


@dataclass(frozen=True, eq=False)
class OwnOptimizer:
    """The group number ``group`` of the user's ``prototype``, which has taken no step and never does."""

    prototype: torch.optim.Optimizer
    group: int

    @property
    def name(self) -> str:
        return type(self.prototype).__name__

    @property
    def numbers(self) -> dict[str, Any]:
        """The hyperparameters of the group as they are now."""
        return {key: value for key, value in self.prototype.param_groups[self.group].items() if key != "params"}

    def over(self, groups: Mapping[int, Sequence[Tensor]]) -> torch.optim.Optimizer:
        """Return a new one of the same class over other parameters, by the number of their group."""
        mine = self.prototype
        memo: dict[int, Any] = {id(p): torch.zeros(()) for group in mine.param_groups for p in group["params"]}
        found = type(mine).__new__(type(mine))
        own = {key: value for key, value in vars(mine).items() if key != "step"}  # a scheduler's, bound to ``mine``
        found.__dict__.update({key: copy.deepcopy(value, memo) for key, value in own.items()})
        found.param_groups = [{**found.param_groups[n], "params": list(members)} for n, members in groups.items()]
        found.state = defaultdict(dict)
        return found

    @cached_property
    def _tried(self) -> dict[tuple[int, ...], tuple[dict[str, Kept], int]]:
        return {}

    def kept(self, shape: tuple[int, ...]) -> dict[str, Kept]:
        """Return the state of a parameter of this shape."""
        return self._try(shape)[0]

    def elements(self, shape: tuple[int, ...]) -> int:
        """Return the elements of all temporaries of an update of a parameter of this shape."""
        return self._try(shape)[1]

    def _try(self, shape: tuple[int, ...]) -> tuple[dict[str, Kept], int]:
        if shape not in self._tried:
            parameter = torch.zeros(shape)
            parameter.grad = torch.ones(shape)
            optimizer = self.over({self.group: [parameter]})
            optimizer.step()
            kept = {key: Kept.of(value) for key, value in optimizer.state[parameter].items()}
            with StorageTracker() as tracker:
                optimizer.step()
            self._tried[shape] = kept, -(-tracker.peak // parameter.itemsize)
        return self._tried[shape]


def own_optimizers(prototype: torch.optim.Optimizer) -> list[OwnOptimizer]:
    """Return one for each group of the user's optimizer; raise :class:`ConfigError` where its step cannot be taken
    tensor by tensor, which a trial shows."""
    found = [OwnOptimizer(prototype, number) for number in range(len(prototype.param_groups))]
    where = f"optimizer {type(prototype).__name__}"
    step = type(prototype).step
    if inspect.unwrap(vars(prototype).get("step", step)) is not inspect.unwrap(step):
        raise ConfigError.on(where, "its step is not that of its class", "a subclass with a step of its own")
    _, *parameters = inspect.signature(step).parameters.values()  # without self
    if any(one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        raise ConfigError.on(where, "its step needs a closure, which would run the model several times", _LEGAL)
    groups = {
        number: _samples(group["params"]) for number, group in enumerate(prototype.param_groups) if group["params"]
    }
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            generator = torch.get_rng_state()
            together = _trained(found[0], groups)
            if not torch.equal(generator, torch.get_rng_state()):
                raise ConfigError.on(where, "its step draws random numbers, which ranks would draw differently", _LEGAL)
            alone = [_trained(found[n], {n: [shape]}, [at]) for at, (n, shape) in enumerate(_listed(groups))]
    except ConfigError:
        raise
    except Exception as error:
        wrong = f"its step fails in a trial on small tensors ({type(error).__name__}: {error})"
        raise ConfigError.on(where, wrong, _LEGAL) from error
    for whole, (single,) in zip(together, alone, strict=True):
        if not torch.allclose(whole, single, rtol=1e-11, atol=1e-13, equal_nan=True):
            raise ConfigError.on(where, "its step of one parameter depends on other parameters", _LEGAL)
    return found


_LEGAL = "a step that updates each parameter by its own gradient and state alone"


def _samples(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return shapes of small tensors for parameters: one for each number of dims, and two of the first."""
    found = {p.dim(): tuple(min(size, SIZES[min(i, 3)]) for i, size in enumerate(p.shape)) for p in parameters}
    shapes = list(found.values())
    return [shapes[0], *shapes]


def _listed(groups: Mapping[int, Sequence[tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    return [(number, shape) for number, shapes in groups.items() for shape in shapes]


def _trained(
    own: OwnOptimizer, groups: Mapping[int, Sequence[tuple[int, ...]]], places: Sequence[int] | None = None
) -> list[Tensor]:
    """Return parameters of these shapes after some steps; those at the same of ``places`` have the same numbers."""
    every = _listed(groups)
    draws = [torch.Generator().manual_seed(place) for place in places or range(len(every))]

    def draw(at: int) -> Tensor:
        return torch.randn(every[at][1], dtype=torch.float64, generator=draws[at])

    parameters = [draw(at) for at in range(len(every))]
    members: dict[int, list[Tensor]] = {}
    for (number, _), parameter in zip(every, parameters, strict=True):
        members.setdefault(number, []).append(parameter)
    optimizer = own.over(members)
    before = _besides(optimizer)
    for _ in range(STEPS):
        for at, parameter in enumerate(parameters):
            parameter.grad = draw(at)
        optimizer.step()
        _check_kept(optimizer, before)
    return parameters


def _check_kept(optimizer: torch.optim.Optimizer, before: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` where an optimizer keeps what a checkpoint would not."""
    where, after = f"optimizer {type(optimizer).__name__}", _besides(optimizer)
    if changed := [key for key in {**before, **after} if before.get(key) != after.get(key)]:
        wrong = f"its step changes {changed[0]}, which is not in the state of a parameter and would not be saved"
        raise ConfigError.on(where, wrong, "state of each parameter, self.state[p]")
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, state in optimizer.state.items():
        if id(parameter) not in known:
            raise ConfigError.on(where, "it keeps state of no parameter", "state of each parameter, self.state[p]")
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float):
                wrong = f"it keeps a {type(value).__name__} under {key!r}"
                raise ConfigError.on(where, wrong, "tensors and numbers")


def _besides(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return what an optimizer has besides state and parameters, in words that change with it."""
    found = {
        f"group[{key!r}]": repr(value)
        for group in optimizer.param_groups for key, value in group.items() if key != "params"
    }  # fmt: skip
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and not k.startswith("_opt")}
    tensors = {k: [t.tolist() for t in tensors_in(v)] for k, v in own.items()}
    return found | {f"self.{key}": f"{value!r} {tensors[key]!r}" for key, value in own.items()}
