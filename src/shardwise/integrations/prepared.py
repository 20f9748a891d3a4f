"""What :class:`shardwise.integrations.accelerate.Accelerator` prepares: a model, its optimizer, loaders and schedules,
which behave as Accelerate's do, on :func:`shardwise.distribute`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.distribute import DistributedModel, Loss, Optimizer, distribute
from shardwise.train.trainer import Trainer


class Steps(Protocol):
    """What an accelerator says of the steps."""

    plan: Plan
    gradient_accumulation_steps: int
    sync_gradients: bool


class OutputLoss(Loss):
    """The loss of a batch, also in the place of a model's output that has it: ``outputs.loss``, ``outputs["loss"]``."""

    @property
    def loss(self) -> OutputLoss:
        return self

    def __getitem__(self, key: object) -> OutputLoss:
        if key in ("loss", 0):
            return self
        raise ShardwiseError(f"outputs[{key!r}] is not there under shardwise, which computes the loss; legal: the loss")


class Accumulated:
    """The loss of a batch that is part of a step: it has the value of the step's loss, once that is done."""

    def __init__(self, model: PreparedModel, fields: Mapping[str, Tensor]) -> None:
        self._model, self.fields, self.whole = model, fields, None

    whole: OutputLoss | None

    @property
    def loss(self) -> Accumulated:
        return self

    def __getitem__(self, key: object) -> Accumulated:
        if key in ("loss", 0):
            return self
        raise ShardwiseError(f"outputs[{key!r}] is not there under shardwise, which computes the loss; legal: the loss")

    def backward(self, **given: Any) -> None:
        """Make the step train on this batch, too."""
        self._model.add(self, given)

    def detach(self) -> Tensor:
        """Return the loss of the whole step: the mean over all of its batches."""
        if self.whole is None:
            raise ShardwiseError("the value of this loss is known after the step that its batch is part of")
        return self.whole.detach()

    def item(self) -> float:
        return float(self.detach())

    __float__ = item

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwiseError(
            f"loss.{name} is not there under shardwise; legal: backward, and item, detach after the step"
        )


class PreparedModel:
    """This stands for the model: called with a batch it returns the loss, which is also its own ``.loss``."""

    def __init__(self, accelerator: Steps, module: nn.Module, options: Mapping[str, Any]) -> None:
        self.module, self._accelerator, self._options = module, accelerator, options
        self._optimizer: PreparedOptimizer | None = None
        self._pair: tuple[DistributedModel, Optimizer] | None = None
        self._due: list[Accumulated] = []
        self._restore: tuple[Path, list[float]] | None = None
        self.trainer: Trainer | None = None

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

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Return the loss of a batch; in training it has a value after the step."""
        if self.module.training and self._accelerator.gradient_accumulation_steps > 1:
            if args:
                raise ConfigError("model(...): with gradient_accumulation_steps; legal: fields by keyword")
            return Accumulated(self, fields)
        return self._forward(*args, **fields)

    def _forward(self, *args: Any, **fields: Any) -> Any:
        model = self.pair[0]
        found = model(*args, **fields)
        if self.trainer is None:
            self.trainer = model.trainer
        if self._restore is not None:
            self._restored()
            if not self.module.training:
                found = model(*args, **fields)
        if type(found) is Loss:
            found.__class__ = OutputLoss
        return found

    def add(self, one: Accumulated, given: Mapping[str, Any]) -> None:
        """Take a batch into the step; with the last, forward and backward of all of them are those of one batch."""
        if given:
            raise ShardwiseError("accelerator.backward(...) with arguments; legal: accelerator.backward(loss)")
        self._due.append(one)
        if self._accelerator.sync_gradients:
            names = self._due[0].fields.keys()
            if any(other.fields.keys() != names for other in self._due):
                raise ConfigError.on("batch", "the batches of a step have different fields", "the same in all")
            whole = self._forward(**{name: torch.cat([other.fields[name] for other in self._due]) for name in names})
            whole.backward()
            for other in self._due:
                other.whole = whole
            self._due = []

    def clip(self, norm: float | None) -> None:
        """Let the next step clip gradients to a norm."""
        assert self.trainer is not None
        self.trainer.engine.interpreter.clip_norm = norm

    def rates(self) -> list[float]:
        """Return the learning rates of the optimizer's groups."""
        return [] if self._optimizer is None else [float(g["lr"]) for g in self._optimizer.param_groups]

    def restore(self, path: Path, rates: list[float]) -> None:
        """Go on from a checkpoint: now, or as soon as the first batch has shown what the model computes."""
        self._restore = path, rates
        if self._optimizer is not None:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if self.trainer is not None:
            self._restored()

    def _restored(self) -> None:
        assert self.trainer is not None and self._restore is not None
        path, self._restore = self._restore[0], None
        with Checkpoints(self.trainer, path.parent) as checkpoints:
            checkpoints.restore(path=path)

    def train(self, mode: bool = True) -> PreparedModel:
        self.module.train(mode)
        return self

    def eval(self) -> PreparedModel:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters of the module, for ``clip_grad_norm_``; their values are in the engine."""
        return self.module.parameters(recurse)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full state; all ranks call it together."""
        if self.trainer is None:
            return dict(self.module.state_dict())
        return self.pair[0].state_dict()

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "main_input_name", "num_parameters"):
            return getattr(self.module, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwiseError(
            f"model.{name} is not there under shardwise; legal: a call, train, eval, parameters, state_dict, and "
            f"accelerator.unwrap_model(model).{name} for what needs no values"
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
            self._model.clip(self._model._options.get("clip_norm"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._accelerator.sync_gradients:
            self._model.pair[1].zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that was prepared: a learning rate that is changed there acts."""
        return self.theirs.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwiseError(
            f"optimizer.{name} is not there under shardwise; legal: step, zero_grad, param_groups, and "
            "accelerator.save_state"
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
