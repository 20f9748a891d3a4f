"""The state of the engine's optimizer in the form of torch's ``optimizer.state_dict()``, for loops to save."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.optimizers import ROWS
from shardwise.runtime.communicator import host_sum
from shardwise.runtime.engine import Engine
from shardwise.runtime.optimizer import CLASSES
from shardwise.runtime.own_optimizer import Kept
from shardwise.train.optimizers import HOW
from shardwise.train.state import fill_state, held, owned


def _names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """Return the names of an optimizer's parameters, in the order in which its state dict numbers them."""
    known = {id(p): name for name, p in module.named_parameters()}
    return [known[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _keys(name: str, group: Mapping[str, Any], shape: tuple[int, ...] = (1,)) -> dict[str, Kept]:
    """Return what the optimizer called ``name`` keeps in torch of a parameter of this shape in this group."""
    dummy = nn.Parameter(torch.zeros(shape))
    dummy.grad = torch.zeros(shape).to_sparse() if name in ROWS else torch.zeros(shape)
    make: Any = CLASSES[name]
    made = make([{**{k: v for k, v in group.items() if k not in HOW}, "params": [dummy]}])
    made.step()
    return {key: Kept.of(value) for key, value in made.state[dummy].items() if isinstance(value, Tensor | int)}


def optimizer_state(engine: Engine, optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the whole state, on the host, in the form of ``optimizer.state_dict()``; all ranks call it together."""
    mine: dict[str, list[Any]] = {}
    for piece in owned(engine):
        mine.setdefault(piece.name, []).append(piece)
    shapes = {p.name: torch.Size(p.shape) for b in engine.compiled.buckets for p in b.parameters if b.learns}
    found: dict[int, dict[str, Any]] = {}
    wide = torch.float64 if engine.compiled.plan.numeric.precision == "fp64" else torch.float32
    choice = engine.optimizer
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for number, (name, group) in enumerate(zip(_names(optimizer, module), groups, strict=True)):
        if name not in shapes:
            continue
        part = choice.part_of(name, shapes[name])
        if part.own is not None:
            keys = part.own.kept(shapes[name])
        else:
            keys = _keys(part.name, group, shapes[name] if part.whole else (1,))
        for key, kept in keys.items():
            like = kept.empty(torch.zeros(()))
            shape = like.shape if part.whole or not like.dim() else shapes[name]
            whole = torch.zeros(shape, dtype=torch.float64)
            for piece in mine.get(f"optimizer.{name}.{key}", ()):
                whole[piece.box.slices] += piece.tensor.cpu()
            host_sum(engine.comm, whole, f"the optimizer's {key} of {name}")
            value = whole.to(wide if like.dim() else like.dtype) if kept.kind is None else kept.kind(whole.item())
            found.setdefault(number, {})[key] = value
    return {"state": found, "param_groups": optimizer.state_dict()["param_groups"]}


@torch.no_grad()
def load_optimizer_state(
    engine: Engine, optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Any]
) -> None:
    """Take the state of a state dict; raise :class:`ConfigError` where it lacks some."""
    names = _names(optimizer, module)
    values = {f"optimizer.{names[n]}.{key}": value for n, one in state["state"].items() for key, value in one.items()}
    without = {f"optimizer.{name}" for n, name in enumerate(names) if not state["state"].get(n)}
    with ExitStack() as stack:
        fill_state(engine, stack)
        _load(engine, values, without)


def _load(engine: Engine, values: Mapping[str, Any], without: Container[str]) -> None:
    """Fill the engine's state; parameters ``without`` one begin anew, as in torch."""
    # torch does not count the steps of an optimizer with dampening
    uncounted = {
        f"optimizer.{p.name}.step" for bucket in engine.compiled.buckets for p in bucket.parameters
        if bucket.learns and engine.optimizer.part_of(p.name, tuple(p.shape)).dampening
    }  # fmt: skip
    for piece in held(engine):
        if piece.name.startswith("optimizer."):
            if piece.name.rpartition(".")[0] in without:
                continue
            if piece.name in uncounted - values.keys():
                piece.tensor.fill_(1)
                continue
            if piece.name not in values:
                legal = "the state_dict() of the same optimizer over the same parameters, after a step"
                raise ConfigError.on("optimizer.load_state_dict", f"{piece.name} is not there", legal)
            piece.tensor.copy_(torch.as_tensor(values[piece.name])[piece.box.slices])
