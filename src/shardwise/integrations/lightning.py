"""Train a module that is written for Lightning, by its ``training_step`` and ``configure_optimizers``::

from shardwise.integrations.lightning import fit

fit(module, train_loader, val_loader, max_epochs=3, gradient_clip_val=1.0, precision="bf16-mixed")
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.plan import Plan

from .accelerate import Accelerator

PRECISIONS: Mapping[str, str] = {
    "32": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "64": "fp64", "64-true": "fp64",
}  # fmt: skip
LIBRARIES = ("lightning", "pytorch_lightning", "torch")
UNCALLED = (
    "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping",
    "configure_callbacks", "configure_model", "configure_sharded_model", "transfer_batch_to_device", "prepare_data",
    "setup", "teardown",
)  # fmt: skip


@dataclass
class Fitted:
    """What a training gave: the loss of each step, which is the sum of its batches' divided by
    ``accumulate_grad_batches``, and the loss of each validation."""

    losses: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)


def fit(
    module: Any, train_dataloaders: DataLoader[Any], val_dataloaders: DataLoader[Any] | None = None, *,
    max_epochs: int | None = None, max_steps: int = -1, accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None,
    precision: str | int = "32-true", plan: Plan | None = None, seed: int = 0,
) -> Fitted:  # fmt: skip
    """Train ``module`` on all ranks as if they were one device; afterwards it has the trained values.

    Args:
        module: has ``training_step(batch, batch_index)``, which returns the loss or a dict with it, and
            ``configure_optimizers()`` of one optimizer, with a schedule or without; with ``val_dataloaders`` also
            ``validation_step``, which returns its loss.
        train_dataloaders: a loader of dicts, tuples or lists of tensors.  As many of its batches as there are
            data-parallel ranks make one; all ranks must draw the same order: seed them alike.
        max_epochs, max_steps, accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm, precision: as of
            Lightning's ``Trainer``.
        plan: the division of a step; by default data parallel over all ranks.
        seed: the key of dropout and other random ops.

    What ``self.log`` is given in a step goes nowhere.  Raises :class:`ConfigError` where the module overrides a hook
    that is not called here.
    """
    _check(module, max_epochs, max_steps)
    word = str(precision)
    if word not in PRECISIONS:
        raise ConfigError.on("precision", f"{precision!r} is not legal", ", ".join(PRECISIONS))
    optimizer, schedule = _optimizers(module.configure_optimizers())
    if gradient_clip_algorithm not in (None, "norm", "value"):
        raise ConfigError.on(
            "gradient_clip_algorithm", f"{gradient_clip_algorithm!r} is not legal", '"norm" or "value"'
        )
    by = "clip_value" if gradient_clip_algorithm == "value" else "clip_norm"
    clipping: dict[str, Any] = {} if not gradient_clip_val else {by: gradient_clip_val}
    accelerator = Accelerator(gradient_accumulation_steps=accumulate_grad_batches, plan=plan, seed=seed, **clipping)
    accelerator.plan = accelerator.plan.replace(precision=PRECISIONS[word])
    step = _Step(module)
    model, ours, loader = accelerator.prepare(step, optimizer, train_dataloaders)
    validation = None if val_dataloaders is None else accelerator.prepare(val_dataloaders)
    found, epoch = Fitted(), 0
    due: list[Tensor] = []  # the losses of the batches since the last step
    while (max_epochs is None or epoch < max_epochs) and (max_steps < 0 or len(found.losses) < max_steps):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**step.fields(batch))
                accelerator.backward(loss)
                ours.step()
                ours.zero_grad()
            due.append(loss.detach())
            if accelerator.sync_gradients:
                found.losses.append(sum(one.item() for one in due) / accumulate_grad_batches)
                due = []
                schedule.after(len(found.losses), "step")
            if 0 <= max_steps <= len(found.losses):
                break
        epoch += 1
        if validation is not None:
            found.validation_losses.append(_validated(model, step, validation))
        schedule.after(epoch, "epoch", found.validation_losses)
    accelerator.end_training()
    return found


def _validated(model: Any, step: _Step, loader: Any) -> float:
    """Return the mean loss of a loader's batches, by their rows."""
    model.eval()
    total, rows = 0.0, 0
    with torch.no_grad():
        for batch in loader:
            fields = step.fields(batch)
            size = next(iter(fields.values())).shape[0]
            total, rows = total + float(model(**fields)) * size, rows + size
    return total / max(rows, 1)


class _Step(nn.Module):
    """The steps of a module as a forward of named fields, which are the tensors of a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.form: TreeSpec | None = None

    def fields(self, batch: Any) -> dict[str, Tensor]:
        """Return the tensors of a batch by names."""
        leaves, form = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        if self.form is None:
            self.form = form
        elif form != self.form:
            raise ConfigError.on("loader", "a batch has another structure than the first", "the same in all batches")
        return {f"tensor_{number}": leaf for number, leaf in enumerate(leaves)}

    def forward(self, **fields: Tensor) -> Tensor:
        """Return the loss of a batch."""
        assert self.form is not None
        batch = tree_unflatten(list(fields.values()), self.form)
        name = "training_step" if self.training else "validation_step"
        function = getattr(self.module, name)
        index = [_Index(name)] if len(inspect.signature(function).parameters) > 1 else []
        found = function(batch, *index)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise ConfigError.on(name, f"it returned {type(loss).__name__}", 'the loss, or a dict with "loss"')
        return loss


class _Index:
    """This stands for the index of a batch, which a captured step does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError.on(self._name, "it reads the index of the batch", "a field of the batch, if it needs one")

    __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __add__ = __radd__ = _refuse
    __sub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __bool__ = __format__ = __str__ = __hash__ = _refuse


@dataclass
class _Schedule:
    """A schedule, and when it goes on: every so many steps, or epochs."""

    theirs: Any = None
    interval: str = "epoch"
    frequency: int = 1

    def after(self, number: int, interval: str, measured: list[float] | None = None) -> None:
        """Go on if it is time after so many steps or epochs."""
        if self.theirs is None or self.interval != interval or number % self.frequency:
            return
        if not isinstance(self.theirs, ReduceLROnPlateau):
            self.theirs.step()
        elif measured:
            self.theirs.step(measured[-1])
        else:
            raise ConfigError.on("configure_optimizers", "ReduceLROnPlateau without validations", "val_dataloaders")


def _optimizers(given: Any) -> tuple[torch.optim.Optimizer, _Schedule]:
    """Return the only optimizer and its schedule, in any of the forms in which Lightning takes them."""
    scheduler: Any = None
    if isinstance(given, Mapping):
        given, scheduler = given.get("optimizer"), given.get("lr_scheduler")
    elif isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], tuple | list):
        given, scheduler = given
    if isinstance(given, tuple | list) and len(given) == 1:
        given = given[0]
    if isinstance(scheduler, tuple | list):
        if len(scheduler) > 1:
            raise ConfigError.on("configure_optimizers", f"it returned {len(scheduler)} schedules", "one")
        scheduler = scheduler[0] if scheduler else None
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError.on("configure_optimizers", f"it returned {type(given).__name__}", "one optimizer of torch's")
    if not isinstance(scheduler, Mapping):
        return given, _Schedule(scheduler)
    interval, frequency = scheduler.get("interval", "epoch"), int(scheduler.get("frequency", 1))
    if interval not in ("epoch", "step") or frequency < 1:
        wrong = f"interval {interval!r}, frequency {frequency}"
        raise ConfigError.on("configure_optimizers", wrong, '"epoch" or "step", and 1 or more')
    return given, _Schedule(scheduler.get("scheduler"), interval, frequency)


def _check(module: Any, max_epochs: int | None, max_steps: int) -> None:
    """Raise :class:`ConfigError` for what would not be called."""
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        raise ConfigError.on("module", f"{type(module).__name__} has no training_step", "a LightningModule")
    if max_epochs is None and max_steps < 0:
        raise ConfigError("fit(...): neither max_epochs nor max_steps; legal: one of them, or both")
    if not getattr(module, "automatic_optimization", True):
        raise ShardwiseError("module.automatic_optimization is False; legal: True, and shardwise.distribute for a loop")
    own = {name for one in type(module).__mro__ if not one.__module__.startswith(LIBRARIES) for name in vars(one)}
    for name in sorted(own):
        if name in UNCALLED or name.startswith("on_"):
            raise ConfigError.on(f"{type(module).__name__}.{name}", "fit(...) does not call it", "shardwise.distribute")
