"""Keep a user's own training loop as it is: a model, a loss and an optimizer stand for the steps of a :class:`Trainer`.

Forward, backward and update of a step are one program.  It runs in ``optimizer.step()``; the calls before it say on
which batch.
"""

from __future__ import annotations

import atexit
import inspect
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.capture.wrapped import rows_in
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, Batch
from shardwise.graph.torch_private import note_step
from shardwise.runtime.communicator import host_sum
from shardwise.train.habits import Watch
from shardwise.train.optimizers import choice_of, numbers_of
from shardwise.train.own_rows import check_fields
from shardwise.train.trainer import Trainer


def distribute(
    model: nn.Module, optimizer: torch.optim.Optimizer | OptimizerChoice, plan: Plan | None = None, **options: Any
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
        optimizer: one of torch's, over all parameters of the model; its hyperparameters are read now, the learning rate
            at every step, so that torch's schedules over it work.
        plan: the division of the step; by default it is data parallel over all ranks.
        options: further arguments of :class:`Trainer`: ``clip_norm``, ``seed``, ``loss``.
    """
    choice = optimizer if isinstance(optimizer, OptimizerChoice) else choice_of(optimizer, model)
    theirs = None if isinstance(optimizer, OptimizerChoice) else optimizer
    plan = plan or Plan.of(Mesh.of(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    steps = _Steps(model, choice, plan, options, Watch(model, theirs, options.get("loss")))
    return DistributedModel(steps), Optimizer(steps, theirs)


class Loss:
    """This is the loss of a batch; it has a value once the step is done."""

    def __init__(self, steps: _Steps, batch: Batch | None, value: Tensor | None = None) -> None:
        self._steps, self._batch, self._value = steps, batch, value

    def backward(self, *_: Any, **given: Any) -> None:
        """Make the next ``optimizer.step()`` train on this batch."""
        if _ or any(value for value in given.values()):
            raise ShardwiseError("loss.backward(...) with arguments; legal: loss.backward()")
        if self._batch is None:
            raise ShardwiseError("loss.backward(): the model was in evaluation mode; legal: model.train() before")
        if self._value is not None:
            raise ShardwiseError("loss.backward(): this loss is that of a step that is done; legal: once a step")
        if not self._steps.zeroed:
            raise ShardwiseError(
                "loss.backward(): the gradients of the last step are still there, and on one device this adds to them; "
                "legal: optimizer.zero_grad() after each step, and Plan.of(microbatches=...) to divide a batch"
            )
        if self._steps.due is not None:
            raise ShardwiseError(
                "loss.backward(): called twice before optimizer.step(); legal: one batch a step, and "
                "Plan.of(microbatches=...) to divide it"
            )
        self._steps.due = (self, self._batch)
        self._steps.waiting.remove(self)

    def detach(self) -> Tensor:
        """Return the value, on this rank's device; it is that of the whole batch on every rank."""
        if self._value is None:
            raise ShardwiseError(
                "the value of this loss is known after optimizer.step(): forward, backward and update run there"
            )
        return self._value

    def item(self) -> float:
        return float(self.detach().item())

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __iter__(self) -> NoReturn:
        _refuse_use("an iteration over it")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let torch's functions have the value, once there is one."""

        def value(one: Any) -> Any:
            return one.known(getattr(func, "__name__", "a function")) if isinstance(one, Loss) else one

        return func(*tree_map(value, args), **tree_map(value, dict(kwargs or {})))

    def known(self, use: str) -> Tensor:
        """Return the value for a ``use``; raise :class:`ShardwiseError` if there is none yet."""
        if self._value is None:
            _refuse_use(use)
        return self._value

    def __getattr__(self, name: str) -> NoReturn:
        _refuse("loss", name, "backward, item, detach and float; other terms of a loss belong into the model's forward")


def _refuse_use(use: str) -> NoReturn:
    legal = "that in the model's forward or in distribute(..., loss=...); its value after optimizer.step()"
    raise ShardwiseError(f"loss: {use} before optimizer.step(), which computes it; legal: {legal}")


def _arithmetic(name: str) -> Callable[..., Any]:
    def method(self: Loss, *others: Any) -> Any:
        value = self.known(name.strip("_"))
        return getattr(value, name)(*(one.detach() if isinstance(one, Loss) else one for one in others))

    return method


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "abs", "lt", "le", "gt", "ge",
    "bool",
):  # fmt: skip
    setattr(Loss, f"__{_name}__", _arithmetic(f"__{_name}__"))


class DistributedModel:
    """This stands for the module that is trained: ``model(**batch)`` is its loss."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Loss:
        """Return the loss of a batch; it has a value at once in evaluation mode, else after ``optimizer.step()``."""
        training = self._steps.module.training
        self._steps.watch.check(training)
        try:
            fields = self._steps.fields(args, kwargs)
        except TypeError as error:
            raise ConfigError(f"model(...): {error}; legal: the arguments of the model's forward") from None
        batch = self._steps.part(fields)
        if not training:
            self._steps.check_waiting()
            return Loss(self._steps, None, self._steps.trainer.evaluate_batch(batch).loss)
        if not torch.is_grad_enabled():
            raise ShardwiseError("model(...) without gradients in training mode; legal: after model.eval()")
        self._steps.waiting.append(loss := Loss(self._steps, batch))
        return loss

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
        self._steps.zero_grad()

    @property
    def trainer(self) -> Trainer:
        """Return the trainer, which exists after the first batch, for :class:`shardwise.Checkpoints`."""
        return self._steps.trainer

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full single-device state; all ranks call it together."""
        self._steps.watch.check_kept()
        self._steps.check_waiting()
        return self._steps.trainer.state_dict()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(
            "model",
            name,
            "a call, train, eval, zero_grad, state_dict and trainer; gradients are clipped by distribute(..., "
            "clip_norm=...)",
        )


class Optimizer:
    """This stands for the optimizer: ``step`` runs the step."""

    def __init__(self, steps: _Steps, theirs: torch.optim.Optimizer | None) -> None:
        self._steps, self._theirs = steps, theirs
        self._numbers = {} if theirs is None else numbers_of(theirs)

    def step(self, closure: None = None) -> None:
        """Run forward, backward and update on the batch of the last ``loss.backward()``."""
        if closure is not None:
            raise ShardwiseError("optimizer.step(closure): it would run several times; legal: optimizer.step()")
        if self._steps.due is None:
            raise ShardwiseError(
                "optimizer.step() without a backward since the last step or zero_grad; legal: after loss.backward()"
            )
        self._steps.watch.check_kept()
        self._steps.check_waiting()
        (loss, batch), self._steps.due = self._steps.due, None
        engine = self._steps.trainer.engine
        if self._theirs is not None:
            now = numbers_of(self._theirs)
            changed = [key for key in now if now[key] != self._numbers.get(key)]
            if changed:
                raise ShardwiseError(
                    f"optimizer: {', '.join(changed)} changed after distribute(); legal: lr alone, by a schedule of "
                    "torch's"
                )
            engine.optimizer = replace(engine.optimizer, lr=float(self._theirs.param_groups[0]["lr"]))
            note_step(self._theirs)
        loss._value = self._steps.trainer.step(batch).loss
        self._steps.zeroed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Say that the gradients of the last step are no longer needed; every step computes its own anew."""
        self._steps.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that was given: a learning rate that is changed there acts."""
        if self._theirs is None:
            _refuse(
                "optimizer", "param_groups", "an optimizer of torch's for distribute(), whose learning rate may change"
            )
        return self._theirs.param_groups

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(
            "optimizer", name, "step, zero_grad and param_groups; state_dict by shardwise.Checkpoints(model.trainer)"
        )


class _Steps:
    """Model, loss and optimizer share this: the trainer, made at the first batch, and the batch of the next step."""

    def __init__(
        self, module: nn.Module, choice: OptimizerChoice, plan: Plan, options: Mapping[str, Any], watch: Watch
    ) -> None:
        self.module, self.plan = module, plan
        self.due: tuple[Loss, Batch] | None = None
        self.waiting: list[Loss] = []  # of forwards in training without a backward
        self.zeroed = True  # whether the gradients of the last step have been set to zero
        self.watch = watch
        self._choice, self._options = choice, options
        self._trainer: Trainer | None = None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise ShardwiseError("the model is not captured yet; legal: after the first batch")
        return self._trainer

    def _give_back(self) -> None:
        self.watch.end(self.trainer.state_dict())

    def _leave(self) -> None:
        """Close the trainer at the end of the process: nobody sees the module any more."""
        if self._give_back in self.trainer.before_close:
            self.trainer.before_close.remove(self._give_back)
        self.trainer.close()

    def fields(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the model by name; with a loss function, those that it alone reads, too."""
        signature = inspect.signature(self.module.forward)
        every = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        beside = set() if every or not self._options.get("loss") else kwargs.keys() - signature.parameters.keys()
        bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in beside})
        return _flat(bound) | {name: kwargs[name] for name in kwargs if name in beside}

    def zero_grad(self) -> None:
        """Take back the last ``loss.backward()``, if its step was not run, as setting its gradients to zero does."""
        if self.due is not None:
            self.waiting.append(self.due[0])
            self.due = None
        self.zeroed = True

    def check_waiting(self) -> None:
        """Raise :class:`ShardwiseError` where a forward without a backward, which does not run here, would have written
        to a buffer."""
        if self.waiting and self._trainer is not None:
            written = dict.fromkeys(name for unit in self._trainer.compiled.general.units for name in unit.updates)
            if written:
                what = f"a forward in training without backward and step writes to {next(iter(written))}"
                raise ShardwiseError(
                    f"model(...): {what} on one device, and is not run here; legal: model.eval() for it"
                )
        self.waiting.clear()

    def part(self, whole: Mapping[str, Tensor]) -> Batch:
        """Return this rank's rows of a batch."""
        check_fields(whole)
        if self._trainer is None:
            with torch.inference_mode(False):
                self._trainer = Trainer(self.module, self._choice, self.plan, whole, **self._options)
            self.watch.begin()
            self._trainer.before_close.append(self._give_back)
            atexit.register(self._leave)
        _compare(self._trainer, whole)
        mesh, rows = self.plan.mesh, rows_in(whole)
        rank = self._trainer.comm.rank
        ranges = rank_rows(rows, self.plan.microbatches, mesh.axis_size(AXES), mesh.index(rank, AXES))
        mine = {name: torch.cat([value[a:b] for a, b in ranges]) for name, value in whole.items()}
        return Batch(mine, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return arguments by name, those of ``**kwargs`` among them, but none that is ``None`` as by default."""
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"model(...): forward(*{name}) has no names for the fields of a batch; legal: named arguments"
            )
        found |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    by_default = {name for name, parameter in bound.signature.parameters.items() if parameter.default is None}
    return {name: value for name, value in found.items() if value is not None or name not in by_default}


def _compare(trainer: Trainer, batch: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` on all ranks unless all have read the same batch, by a checksum of its bytes."""
    if trainer.plan.mesh.size == 1:
        return
    word = 0
    for name in sorted(batch):
        word = zlib.crc32(batch[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), word)
    word %= 1 << 20  # so that the sums below stay within 64 bits
    total, squares = host_sum(trainer.comm, torch.tensor([word, word * word]), "the comparison of the batch").tolist()
    if total * total != trainer.plan.mesh.size * squares:  # equal only if all words are
        raise ConfigError(
            "the ranks have read different batches; legal: the same on all, for example after torch.manual_seed(0)."
        )


def _refuse(what: str, name: str, legal: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ShardwiseError(f"{what}.{name} is not there under distribute(); legal: {legal}.")
