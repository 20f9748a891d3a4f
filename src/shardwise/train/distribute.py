"""Keep a user's own training loop as it is: a model, a loss and an optimizer stand for the steps of a :class:`Trainer`.

Forward, backward and update of a step are one program.  It runs in ``optimizer.step()``; the calls before it say on
which batch.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.capture.running import at_line
from shardwise.core.averaging import Averaging
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.local import refuse_islands
from shardwise.parallel.tables import table_gradients
from shardwise.train.habits import Watch
from shardwise.train.optimizer_state import load_optimizer_state, optimizer_state
from shardwise.train.optimizers import MAY_CHANGE, Followed, Several, choice_of, note_steps
from shardwise.train.own_loop import Steps
from shardwise.train.shown import Fixed, ShownGroup
from shardwise.train.trainer import Trainer


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerChoice,
    plan: Plan | None = None,
    *,
    rows: int = 0,
    **options: Any,
) -> tuple[DistributedModel, Optimizer]:
    """Return a model and an optimizer to use in place of these, in an ordinary loop on all ranks::

        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    Every rank reads the whole batch, as one device would, and takes its own rows (where reading is slow,
    :meth:`Trainer.loader` reads only those).  So the ranks' loaders must agree: give them one seed; every batch is
    compared.  Leave batches on the host, from where they are copied while the device computes: comparing a batch that
    is on a GPU waits for all that the GPU has to do.  ``loss`` has a value after ``optimizer.step()``.  The model is
    captured at the first batch.

    Args:
        model: any module that is called with the fields of a batch and returns the loss (or give ``loss``, see
        :class:`Trainer`).
        optimizer: one of torch's, over all parameters of the model, in any groups, or several that have them together,
            such as Muon and AdamW, for which one is returned; learning rates, betas and weight decay are read at every
            step, so that torch's schedules over them work.
        plan: the division of the step; by default it is data parallel over all ranks.
        options: further arguments of :class:`Trainer`: ``clip_norm``, ``clip_value``, ``seed``, ``loss``; and ``ema``,
            ``ema_start``, ``ema_every`` and ``ema_warmup`` of :class:`OptimizerChoice`, for an average of the weights.
    """
    if not isinstance(optimizer, torch.optim.Optimizer | OptimizerChoice):
        optimizer = Several(optimizer)
    theirs = None if isinstance(optimizer, OptimizerChoice) else optimizer
    average = {one.name: options.pop(one.name) for one in fields(Averaging) if one.name in options}

    def choose() -> OptimizerChoice:
        found = optimizer if isinstance(optimizer, OptimizerChoice) else choice_of(optimizer, model)
        return replace(found, **average)

    if plan is None:
        floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
        precision = "fp64" if floats == {torch.float64} else "fp32"
        plan = Plan.of(Mesh.of(dp=int(os.environ.get("WORLD_SIZE", "1"))), precision=precision)
        plan = table_gradients(plan, choose())
    refuse_islands(plan, "distribute")
    steps = Steps(model, choose, plan, options, Watch(model, theirs, options.get("loss")), rows)
    return DistributedModel(steps), Optimizer(steps, theirs)


class DistributedModel:
    """This stands for the module that is trained: ``model(x)`` is what the module returns."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns: in training tensors whose values the next step computes, or a look at one."""
        return self._steps.call(args, kwargs)

    @property
    def training(self) -> bool:
        return self._steps.module.training

    def train(self, mode: bool = True) -> Self:
        self._steps.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Say that the gradients of the last step are no longer needed."""
        self._steps.zero_grad(set_to_none)

    @property
    def trainer(self) -> Trainer:
        """Return the trainer, which exists after the first step, for :class:`shardwise.Checkpoints`."""
        return self._steps.trainer

    @property
    def captured(self) -> bool:
        """Whether there is a trainer."""
        return self._steps.made is not None

    def when_captured(self, function: Callable[[Trainer], object]) -> None:
        """Call ``function`` with the trainer, whose state it may set: now, or before the first step computes."""
        if self._steps.made is not None:
            function(self._steps.trainer)
            self._steps.changed()
        else:
            self._steps.when_made.append(function)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full single-device state; all ranks call it together."""
        steps = self._steps
        steps.watch.check_kept()
        steps.check_written("model.state_dict()")
        steps.check_open({call for loss in steps.due for call in loss.calls})
        steps.push()
        return steps.trainer.state_dict() if steps.made is not None else steps.module.state_dict()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the weights be their moving average in a context, for evaluations and :meth:`state_dict`; all ranks enter
        it together, after the first step."""
        steps = self._steps
        if steps.due:
            what = "loss.backward() without optimizer.step()"
            raise ShardwiseError(f"model.averaged() after {what}; legal: after the step")
        steps.push()
        with steps.trainer.averaged():
            steps.changed()
            try:
                yield
            finally:  # what was seen of the state inside is no longer so, even if an error ends the context
                steps.version, steps.known_state = steps.version + 1, None
        steps.changed()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Take parameters and buffers from a single-device state."""
        steps = self._steps
        if steps.made is None:
            steps.module.load_state_dict(state, strict)
            return
        steps.trainer.load_state_dict(state if strict else {**steps.state(), **state})
        steps.changed()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters: what the loop reads of them, writes to them, or does to their gradients acts."""
        yield from (one for _, one in self.named_parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names."""
        yield from ((name, one) for name, one in self._steps.seen.items() if isinstance(one, nn.Parameter))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers in the same way."""
        yield from (one for _, one in self.named_buffers())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with their names."""
        yield from ((name, one) for name, one in self._steps.seen.items() if not isinstance(one, nn.Parameter))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._steps.module, name)
        if isinstance(value, nn.Module | Tensor):
            _refuse("model", name, "a call of the whole model, and what is neither a part nor a tensor of it")
        return self._without_gradient(value, name) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_steps":
            super().__setattr__(name, value)
            return
        if isinstance(value, nn.Module | Tensor):
            raise ShardwiseError(f"model.{name} = ... under distribute(); legal: tensors and parts before distribute()")
        setattr(self._steps.module, name, value)
        self._steps.shapes.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        copied = "a copy of the module before distribute(), which takes model.state_dict()"
        legal = f"{copied}; for an average of the weights distribute(..., ema=0.999)"
        raise ShardwiseError(f"copy.deepcopy(model) under distribute(); legal: {legal}")

    def _without_gradient(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a method of the module that may not compute what is trained: calls of the whole model do."""

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            if found is self._steps.module:  # as apply() and to() return it
                return self
            if any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(found)):
                _refuse(
                    "model", name, "a call of the whole model where a gradient is needed; this one is not distributed"
                )
            return found

        return called


class Optimizer(torch.optim.Optimizer):
    """This stands for the optimizer: ``step`` runs the step.  It is one of torch's for torch's schedules."""

    def __init__(self, steps: Steps, theirs: torch.optim.Optimizer | None) -> None:
        self._steps, self._theirs = steps, theirs
        self._followed: Followed | None = None
        self._loaded: Mapping[str, Any] | None = None  # a state for the next step
        steps.when_made.append(self._follow)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run forward, backward and update for the losses since the last step whose ``backward()`` was called."""
        if closure is not None:
            raise ShardwiseError("optimizer.step(closure): it would run several times; legal: optimizer.step()")
        self._steps.step(self._prepare)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Let the step clip the gradients of all parameters to a norm, without putting them together; return their norm
        before that, a tensor whose value is known after the step."""
        return self._steps.clip(max_norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Let the step clip each element of the gradients of all parameters, without putting them together."""
        self._steps.clip_by_value(clip_value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's, whole and on the host; all ranks call it together."""
        theirs, steps = self._given("state_dict"), self._steps
        if steps.made is None:
            return theirs.state_dict() if self._loaded is None else dict(self._loaded)
        return optimizer_state(steps.trainer.engine, theirs, steps.module)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, with its hyperparameters, before the next step."""
        groups = self._given("load_state_dict").param_groups
        sizes = [[len(one["params"]) for one in every] for every in (state_dict["param_groups"], groups)]
        if sizes[0] != sizes[1]:
            wrong = f"groups of {sizes[0]} parameters"
            raise ConfigError.on("optimizer.load_state_dict", wrong, f"the {sizes[1]} of this optimizer")
        for group, given in zip(groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})
        self._loaded = state_dict if state_dict["state"] else None

    def _follow(self, trainer: Trainer) -> None:
        if self._theirs is not None:
            self._followed = Followed(self._theirs, trainer.compiled.buckets)

    def _prepare(self, trainer: Trainer) -> None:
        if self._theirs is None:
            return
        if self._loaded is not None:
            load_optimizer_state(trainer.engine, self._theirs, self._steps.module, self._loaded)
            self._loaded = None
        assert self._followed is not None
        trainer.engine.settings = self._followed.settings()
        note_steps(self._theirs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Say that the gradients of the last step are no longer needed; every step computes its own anew."""
        self._steps.zero_grad(set_to_none)

    @property  # type: ignore[override]
    def param_groups(self) -> list[ShownGroup]:
        """The groups of the optimizer that was given: a learning rate that is changed there acts, and what is done to
        its parameters acts as it does for ``model.parameters()``.  Groups are added by :meth:`add_param_group`."""
        every = self._given("param_groups").param_groups
        return Fixed("optimizer.param_groups", (ShownGroup(group, self._shown) for group in every))

    @param_groups.setter
    def param_groups(self, value: object) -> None:
        Fixed("optimizer.param_groups").refuse()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the optimizer a further group, before the first step."""
        theirs, seen = self._given("add_param_group"), self._steps.seen
        if self._steps.made is not None:
            raise ShardwiseError(f"optimizer.add_param_group(...){at_line()} after the first step; legal: {MAY_CHANGE}")
        if isinstance(theirs, Several):
            _refuse("optimizer", "add_param_group", "that of one of the optimizers that distribute() was given")
        own = {id(seen[name]): one for name, one in self._steps.module.named_parameters()}
        given = param_group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        theirs.add_param_group({**param_group, "params": [own.get(id(one), one) for one in members]})

    def _shown(self, parameter: Tensor) -> Tensor:
        names = {id(one): name for name, one in self._steps.module.named_parameters()}
        return self._steps.seen[names[id(parameter)]]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the optimizer that was given."""
        return self._given("defaults").defaults

    def _given(self, name: str) -> torch.optim.Optimizer:
        if self._theirs is None:
            _refuse("optimizer", name, "an optimizer of torch's for distribute(), whose learning rate may change")
        return self._theirs

    def __repr__(self) -> str:
        return f"distributed {self._steps.choice.name if self._theirs is None else self._theirs!r}"

    def __getattr__(self, name: str) -> NoReturn:
        if name == "_step_supports_amp_scaling":
            legal = 'GradScaler(enabled=False), with Plan.of(precision="fp16") where losses are scaled'
            raise ShardwiseError(f"a GradScaler{at_line()} under distribute(); legal: {legal}")
        _refuse("optimizer", name, "step, zero_grad, param_groups, state_dict and load_state_dict")


def _refuse(what: str, name: str, legal: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ShardwiseError(f"{what}.{name} is not there under distribute(); legal: {legal}.")
