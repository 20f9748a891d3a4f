"""What :class:`shardwise.integrations.accelerate.Accelerator` prepares: a model, its optimizer, loaders and schedules,
which behave as Accelerate's do, on :func:`shardwise.distribute`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from shardwise.checkpoint.weights import fit_weights
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.distribute import DistributedModel, Optimizer, distribute
from shardwise.train.trainer import Trainer


class Steps(Protocol):
    """What an accelerator says of the steps."""

    plan: Plan
    sync_gradients: bool


class PreparedModel:
    """This stands for the model: called with a batch it returns what the model returns, as under ``distribute``."""

    def __init__(self, accelerator: Steps, module: nn.Module, options: Mapping[str, Any]) -> None:
        self.module, self._accelerator, self._options = module, accelerator, options
        self._optimizer: PreparedOptimizer | None = None
        self._pair: tuple[DistributedModel, Optimizer] | None = None

    def bind(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Train this model by ``optimizer``."""
        if self._pair is not None or self._optimizer is not None:
            raise ShardwiseError("accelerator.prepare() of a second optimizer; legal: one, before the first batch")
        self._optimizer = PreparedOptimizer(self._accelerator, self, optimizer)
        return self._optimizer

    @property
    def pair(self) -> tuple[DistributedModel, Optimizer]:
        """Return what ``distribute`` makes of the model and its optimizer, or of a model that is only evaluated."""
        if self._pair is None:
            theirs = OptimizerChoice("sgd", lr=0.0) if self._optimizer is None else self._optimizer.theirs
            self._pair = distribute(self.module, theirs, self._accelerator.plan, **self._options)
        return self._pair

    @property
    def trainer(self) -> Trainer | None:
        """The trainer, once there is one."""
        return self._pair[0].trainer if self._pair is not None and self._pair[0].captured else None

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Return what the model returns: in training tensors whose values the step computes, or a look at one."""
        return self.pair[0](*args, **fields)

    def rates(self) -> list[float]:
        """Return the learning rates of the optimizer's groups."""
        return [] if self._optimizer is None else [float(g["lr"]) for g in self._optimizer.param_groups]

    def restore(self, path: Path, rates: list[float]) -> None:
        """Go on from a checkpoint: now, or as soon as the first step has shown what the model computes."""
        if self._optimizer is not None:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if self.trainer is None:  # for evaluations before the first step
            self.module.load_state_dict(dict(fit_weights(path, self.module, "load_state")))

        def restore(trainer: Trainer) -> None:
            with Checkpoints(trainer, path.parent) as checkpoints:
                checkpoints.restore(path=path)

        self.pair[0].when_captured(restore)

    def train(self, mode: bool = True) -> PreparedModel:
        self.module.train(mode)
        return self

    def eval(self) -> PreparedModel:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters: those of the module for its optimizer, and later what ``distribute`` shows of them."""
        yield from (one for _, one in self.named_parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names."""
        yield from self.module.named_parameters() if self._pair is None else self._pair[0].named_parameters()

    def shown(self, given: Iterable[Tensor]) -> dict[str, nn.Parameter]:
        """Return by name what ``distribute`` shows of those of the model's parameters that are given."""
        shown, known = dict(self.pair[0].named_parameters()), {id(one) for one in given}
        own = dict(self.module.named_parameters())
        found = {name: one for name, one in shown.items() if id(one) in known or id(own[name]) in known}
        if len(found) < len(known):
            raise ShardwiseError("a parameter is given that the prepared model does not have; legal: its parameters()")
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self.pair[0].zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full state; all ranks call it together."""
        return dict(self.module.state_dict()) if self._pair is None else self._pair[0].state_dict()

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "main_input_name", "num_parameters"):
            return getattr(self.module, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwiseError(
            f"model.{name} is not there under shardwise; legal: a call, train, eval, parameters, named_parameters, "
            f"zero_grad, state_dict, and accelerator.unwrap_model(model).{name} for what needs no values"
        )


class PreparedOptimizer:
    """This stands for the optimizer: its step is one where gradients are in sync."""

    def __init__(self, accelerator: Steps, model: PreparedModel, theirs: torch.optim.Optimizer) -> None:
        self._accelerator, self._model, self.theirs = accelerator, model, theirs

    def step(self, closure: None = None) -> None:
        """Run the step, if this batch is the last that it accumulates."""
        if closure is not None:
            raise ShardwiseError("optimizer.step(closure): it would run several times; legal: optimizer.step()")
        if self._accelerator.sync_gradients:
            self._model.pair[1].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self._model.pair[1].zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's, whole and on the host; all ranks call it together."""
        return self._model.pair[1].state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, with its learning rate, before the next step."""
        self._model.pair[1].load_state_dict(state_dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that was prepared: a learning rate that is changed there acts."""
        return self.theirs.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwiseError(
            f"optimizer.{name} is not there under shardwise; legal: step, zero_grad, param_groups, state_dict, "
            "load_state_dict, and accelerator.save_state"
        )


class PreparedScheduler:
    """This stands for a schedule, which goes one step on for each rank's batch of a step, as Accelerate's does."""

    def __init__(self, accelerator: Steps, theirs: Any) -> None:
        self._accelerator, self.theirs = accelerator, theirs

    def step(self, *given: Any) -> None:
        """Go on, if a step was taken."""
        if not self._accelerator.sync_gradients:
            return
        times = 1 if isinstance(self.theirs, ReduceLROnPlateau) else self._accelerator.plan.mesh.axis_size(AXES)
        for _ in range(times):
            self.theirs.step(*given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "theirs":
            raise AttributeError(name)
        return getattr(self.theirs, name)


class PreparedLoader:
    """The batches of a loader, of which as many as there are data-parallel ranks make one; every rank reads all."""

    def __init__(self, accelerator: Steps, theirs: DataLoader[Any]) -> None:
        self.theirs, self.at_end = theirs, False
        self._parts = accelerator.plan.mesh.axis_size(AXES)

    @property
    def dataset(self) -> Any:
        return self.theirs.dataset

    def __len__(self) -> int:
        return -(-len(self.theirs) // self._parts)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.theirs)
        self.at_end = False
        due = self._next(batches)
        while due:
            following = self._next(batches)
            self.at_end = not following
            yield _joined(due)
            due = following
        self.at_end = False

    def _next(self, batches: Iterator[Any]) -> list[Any]:
        return [one for _, one in zip(range(self._parts), batches, strict=False)]


def _joined(batches: list[Any]) -> Any:
    """Return the rows of batches one after the other."""
    if len(batches) == 1:
        return batches[0]
    columns = [tree_flatten(dict(one) if isinstance(one, Mapping) else one) for one in batches]
    leaves = []
    for column in zip(*(found for found, _ in columns), strict=True):
        if not all(isinstance(one, Tensor) and one.dim() for one in column):
            raise ConfigError.on("loader", f"a batch has {type(column[0]).__name__}", "batches of tensors with rows")
        if len({one.shape[1:] for one in column}) > 1:
            shapes = ", ".join(str(tuple(one.shape)) for one in column)
            raise ConfigError.on("loader", f"batches have the shapes {shapes}", "rows of one shape in all batches")
        leaves.append(torch.cat(column))
    return tree_unflatten(leaves, columns[0][1])
