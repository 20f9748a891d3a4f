"""An object in the place of Accelerate's ``Accelerator``, for loops that are written for it::

    from shardwise.integrations.accelerate import Accelerator   # in place of: from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

It stands on :func:`shardwise.distribute`: what the loop does with a model's outputs is recorded until
``optimizer.step()``, which runs forward, backward and update.  Accelerate itself need not be installed.
"""

from __future__ import annotations

import builtins
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from shardwise.backend import Backend
from shardwise.checkpoint.folder import latest
from shardwise.core.errors import ConfigError, ShardwiseError, check_choice, check_count
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.local import refuse_islands
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.rendezvous import rendezvous
from shardwise.train.checkpoints import Checkpoints

from .prepared import PreparedLoader, PreparedModel, PreparedOptimizer, PreparedScheduler

PRECISIONS = ("no", "bf16", "fp16")
STATE = "accelerator_{rank}.pt"  # of one rank, beside what shardwise saves
PATIENCE = 1800.0  # seconds that ranks wait for each other where there is no trainer yet


class Accelerator:
    """Stand for Accelerate's ``Accelerator`` on all ranks that ``shardwise launch`` or torchrun has started.

    Args:
        gradient_accumulation_steps: the number of batches whose gradients a step adds up; each loss is divided by it.
        mixed_precision: "no", "bf16" or "fp16": the precision of the plan, with masters in fp32.
        plan: the division of a step; by default data parallel over all ranks.
        options: further arguments of :func:`shardwise.distribute`: ``seed``, ``loss``.

    A prepared loader reads on every rank what all of them train on: as many of its batches as there are data-parallel
    ranks make one, in the order in which Accelerate deals them out.  So all ranks must draw the same random numbers
    for it: seed them alike.  Raises :class:`ShardwiseError` for what is not supported.
    """

    def __init__(
        self, *, gradient_accumulation_steps: int = 1, mixed_precision: str | None = None, plan: Plan | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        check_count("gradient_accumulation_steps", gradient_accumulation_steps)
        check_choice("mixed_precision", mixed_precision or "no", PRECISIONS)
        plan = plan or Plan.of(Mesh.of(dp=self.num_processes))
        refuse_islands(plan, "Accelerator")
        if plan.mesh.size != self.num_processes:
            wrong = f"its mesh {plan.mesh.shape} has {plan.mesh.size} ranks"
            raise ConfigError.on("plan", wrong, f"as many as there are processes, {self.num_processes}")
        if gradient_accumulation_steps > 1 and (plan.overlaps or plan.mesh.axis_size(PIPELINE) > 1):
            wrong = f"{gradient_accumulation_steps} under a pipeline, which takes one batch a step"
            legal = "1, with larger batches and as many microbatches in the plan"
            raise ConfigError.on("gradient_accumulation_steps", wrong, legal)
        if mixed_precision in ("bf16", "fp16"):
            plan = plan.replace(precision=mixed_precision)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.plan = plan
        self.sync_gradients = True
        self._options = options
        self._taken = 0  # batches since the last step
        self._loaders: list[PreparedLoader] = []
        self._schedulers: list[PreparedScheduler] = []
        self._kept: list[Any] = []  # objects of the user's that checkpoints save, too
        self._model: PreparedModel | None = None
        self._barriers = 0

    # ---- who and where -----------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.process_index))

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def device(self) -> torch.device:
        """Return this rank's device; batches are best left on the host, from where they are copied in time."""
        return Backend.here().device()

    @property
    def mixed_precision(self) -> str:
        return {"fp32": "no", "fp64": "no"}.get(self.plan.numeric.precision, self.plan.numeric.precision)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once on each host."""
        if self.is_local_main_process:
            builtins.print(*values, **options)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does nothing on other ranks than 0."""
        return function if self.is_main_process else lambda *_, **__: None

    def wait_for_everyone(self) -> None:
        """Wait until all ranks have come here."""
        if self._model is not None and self._model.trainer is not None:
            self._model.trainer.comm.barrier(what="wait_for_everyone")
        elif self.num_processes > 1:
            met = rendezvous("accelerator", PATIENCE)
            self._barriers += 1
            if met.store.add(f"here {self._barriers}", 1) == met.size:
                met.store.set(f"all {self._barriers}", "1")
            met.store.wait([f"all {self._barriers}"], timedelta(seconds=PATIENCE))

    # ---- training ----------------------------------------------------------------------------------------------------

    def prepare(self, *given: Any, **refused: Any) -> Any:
        """Return what to use in place of a model, its optimizer, data loaders and schedules, in their order."""
        if refused:
            _refuse(f"prepare({next(iter(refused))}=...)", "models, optimizers, loaders and schedules")
        found = [self._prepared(one) for one in given]
        return found[0] if len(found) == 1 else tuple(found)

    def _prepared(self, one: Any) -> Any:
        if isinstance(one, nn.Module):
            if self._model is not None and self._model.module is not one:
                _refuse("prepare() of a second model", "one model; several as submodules of one")
            self._model = self._model or PreparedModel(self, one, self._options)
            return self._model
        if isinstance(one, torch.optim.Optimizer):
            if self._model is None:
                _refuse("prepare() of an optimizer before its model", "prepare(model, optimizer, ...)")
            return self._model.bind(one)
        if isinstance(one, DataLoader):
            self._loaders.append(PreparedLoader(self, one))
            return self._loaders[-1]
        if isinstance(one, LRScheduler | ReduceLROnPlateau):
            self._schedulers.append(PreparedScheduler(self, one))
            return self._schedulers[-1]
        if not isinstance(one, PreparedModel | PreparedOptimizer | PreparedLoader | PreparedScheduler):
            _refuse(f"prepare() of {type(one).__name__}", "a model, an optimizer, a DataLoader, a schedule")
        return one

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Within this, a step is taken with every ``gradient_accumulation_steps``-th batch and with a loader's last."""
        self._taken += 1
        last = any(loader.at_end for loader in self._loaders)
        self.sync_gradients = last or self._taken % self.gradient_accumulation_steps == 0
        yield
        if self.sync_gradients:
            self._taken = 0

    def backward(self, loss: Any, **given: Any) -> None:
        """Make the next ``optimizer.step()`` train on this loss, divided by the number of batches of a step."""
        number = self.gradient_accumulation_steps
        (loss / number if number > 1 else loss).backward(**given)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the gradients of the next step to a norm; return their norm before, or None where no step follows.

        The Euclidean norm of all parameters has a value after the step; for others gradients are put together on each
        rank, now."""
        if not self.sync_gradients:
            return None
        if self._model is None:
            _refuse("clip_grad_norm_() before prepare()", "between backward and step")
        given = self._model.shown([parameters] if isinstance(parameters, Tensor) else parameters)
        model, optimizer = self._model.pair
        if norm_type == 2 and all(name in given for name, one in model.named_parameters() if one.requires_grad):
            return optimizer.clip_grad_norm_(float(max_norm))
        return nn.utils.clip_grad_norm_(list(given.values()), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients of the next step; if these are not of all parameters they are put together
        on each rank for it."""
        if self._model is None:
            _refuse("clip_grad_value_() before prepare()", "between backward and step")
        if not self.sync_gradients:
            return
        given = self._model.shown([parameters] if isinstance(parameters, Tensor) else parameters)
        model, optimizer = self._model.pair
        if all(name in given for name, one in model.named_parameters() if one.requires_grad):
            optimizer.clip_grad_value_(float(clip_value))
        else:
            nn.utils.clip_grad_value_(list(given.values()), clip_value)

    def autocast(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing: the plan says which dtype computes."""
        return nullcontext()

    # ---- values ------------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return ``tensor`` with the rows of all ranks, which here every rank has."""
        if isinstance(tensor, Tensor):
            return tensor.detach().reshape(1) if not tensor.dim() else tensor.detach()
        if isinstance(tensor, dict):
            return {name: self.gather(one) for name, one in tensor.items()}
        if isinstance(tensor, list | tuple):
            return type(tensor)(self.gather(one) for one in tensor)
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all samples, none of them twice, which here every rank has."""
        return input_data if use_gather_object else self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> NoReturn:
        _refuse("reduce()", "the value itself, which is that of the whole batch on every rank")

    def unwrap_model(self, model: Any, **_: Any) -> nn.Module:
        """Return the module; its values are in the engine: :meth:`get_state_dict` has them."""
        return model.module if isinstance(model, PreparedModel) else model

    def get_state_dict(self, model: Any) -> dict[str, Tensor]:
        """Return the full state of the model, on the host; all ranks call it together."""
        state: dict[str, Tensor] = model.state_dict()
        return state

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let checkpoints save further objects, which have ``state_dict`` and ``load_state_dict``."""
        for one in objects:
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                _refuse(f"register_for_checkpointing({type(one).__name__})", "objects with state_dict, load_state_dict")
            self._kept.append(one)

    def save_state(self, output_dir: str | Path, **refused: Any) -> str:
        """Save model, optimizer, schedules and random numbers; any number of ranks can go on from there."""
        if refused:
            _refuse(f"save_state({next(iter(refused))}=...)", "save_state(folder)")
        if self._model is None or self._model.trainer is None:
            _refuse("save_state() before a batch", "after the first step")
        folder, failed = Path(output_dir), list[str]()
        with Checkpoints(self._model.trainer, folder, keep_last=1, warn=failed.append) as checkpoints:
            checkpoints.save()
            checkpoints.wait()
        if failed:
            raise ShardwiseError(f"{folder}: the checkpoint could not be written: {failed[0]}")
        own = {
            "schedulers": [one.state_dict() for one in self._schedulers],
            "rates": self._model.rates(),
            "kept": [one.state_dict() for one in self._kept],
            "generators": (random.getstate(), np.random.get_state(), torch.get_rng_state()),  # noqa: NPY002
        }
        torch.save(own, folder / STATE.format(rank=self.process_index))
        self.wait_for_everyone()
        return str(folder)

    def load_state(self, input_dir: str | Path, **refused: Any) -> None:
        """Go on from what :meth:`save_state` saved: before the first batch, or between steps."""
        if refused:
            _refuse(f"load_state({next(iter(refused))}=...)", "load_state(folder)")
        folder = Path(input_dir)
        path = latest(folder)
        mine = folder / STATE.format(rank=self.process_index)
        mine = mine if mine.exists() else folder / STATE.format(rank=0)
        if path is None or not mine.exists():
            raise ConfigError.on(str(folder), "has no state that save_state() wrote", "the folder of one")
        if self._model is None:
            _refuse("load_state() before prepare()", "after it")
        own = torch.load(mine, weights_only=False)
        if len(own["schedulers"]) != len(self._schedulers) or len(own["kept"]) != len(self._kept):
            wrong = f"of {len(own['schedulers'])} schedules and {len(own['kept'])} registered objects"
            raise ConfigError.on(str(folder), wrong, f"{len(self._schedulers)} and {len(self._kept)}, as prepared here")
        for one, state in zip([*self._schedulers, *self._kept], [*own["schedulers"], *own["kept"]], strict=True):
            one.load_state_dict(state)
        python, numpy, pytorch = own["generators"]
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(pytorch)
        self._model.restore(path, own["rates"])

    def end_training(self) -> None:
        """Leave the other ranks; the module gets the values of the last step."""
        if self._model is not None:
            self._model.close()

    free_memory = end_training

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(name, "what the documentation of shardwise.integrations.accelerate.Accelerator lists")


def _refuse(what: str, legal: str) -> NoReturn:
    raise ShardwiseError(f"accelerator.{what} is not there under shardwise; legal: {legal}")
