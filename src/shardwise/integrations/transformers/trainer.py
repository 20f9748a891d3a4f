"""The training loop: transformers' callbacks, logs, evaluations and checkpoints around shardwise's steps."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerState
from transformers.trainer_utils import SaveStrategy, TrainOutput, sort_checkpoints, speed_metrics

from shardwise.capture.wrapped import rows_in
from shardwise.core.errors import ConfigError
from shardwise.data.loader import Batch
from shardwise.train.optimizers import Followed, choice_of, note_steps

from ..collated import RankBatches
from .checkpoints import STATE, Saving


class ShardwiseTrainer(Saving):
    """Train a model as ``transformers.Trainer`` does, with the same arguments, on all ranks that ``shardwise launch``
    or torchrun has started, as if they were one device.

    Args:
        plan: the division of a step, such as ``data_parallel(Plan.of(), ranks, zero=3)``; by default data parallel.
            Precision, microbatches and recomputation follow from the ``TrainingArguments``.
        pad_to: samples of different lengths are padded to the longest, for which the datasets are read once, or to the
            shapes of this example, a dict of collated fields.

    All ranks make it and call its methods together.  A batch has ``per_device_train_batch_size`` rows for each
    data-parallel rank and each accumulation step, in the order in which one process of transformers would read them,
    and its loss is the mean over all of them.  ``trainer.model`` has the values of the last ``train()``,
    ``evaluate()`` of predictions or ``predict()``; what is written to it meanwhile is not seen.

    Raises :class:`ConfigError` for a ``TrainingArguments`` that is not supported, with what is legal.
    """

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:  # fmt: skip
        """Train, from the beginning or from a checkpoint that a ShardwiseTrainer has saved, on any number of ranks."""
        if trial is not None:
            raise ConfigError("train(trial=...): hyperparameter search is not supported; legal: None")
        args, resumed = self.args, self._checkpoint(resume_from_checkpoint)
        if self.train_dataset is None:
            raise ConfigError.on("train_dataset", "None", "a dataset to train on")
        self.is_in_train = True
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._capture(self.train_dataset, choice_of(self.create_optimizer(), self.model))
        self._followed = Followed(self.optimizer, self.sharded.compiled.buckets)
        batches = self.get_train_dataloader()
        updates, epochs, steps = self._lengths(batches)
        example = dict(self.sharded.compiled.example)
        self._flops = float(self.floating_point_ops(example)) / rows_in(example)  # of a row
        self.create_scheduler(num_training_steps=steps)
        first, skipped = self._begin(steps, epochs, updates, resumed)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = batches
        started, self._started_at = time.time(), self.state.global_step
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self.evaluate(ignore_keys=ignore_keys_for_eval)
        if resumed is not None:
            self._load_rng_state(resumed)
        for epoch in range(first, epochs):
            self.control = handler.on_epoch_begin(args, self.state, self.control)
            batches.start(epoch, skipped if epoch == first else 0)
            self._epoch(batches, epoch, skipped if epoch == first else 0, ignore_keys_for_eval)
            if self.control.should_training_stop:
                break
        return self._finish(started, steps)

    def _lengths(self, batches: RankBatches) -> tuple[int, int, int]:
        """Return the steps of an epoch, the epochs, and the steps of the training."""
        args = self.args
        if batches.order is None:
            if args.max_steps <= 0:
                raise ConfigError.on("TrainingArguments.max_steps", "not given for an iterable dataset", "1 or more")
            self._substeps = args.max_steps * args.gradient_accumulation_steps
            return args.max_steps, sys.maxsize, args.max_steps
        updates = len(batches)
        self._substeps = -(-batches.samples // (args.per_device_train_batch_size * self._parts))
        if args.max_steps > 0:
            return updates, -(-args.max_steps // updates), args.max_steps
        return updates, math.ceil(args.num_train_epochs), math.ceil(args.num_train_epochs * updates)

    def _begin(self, steps: int, epochs: int, updates: int, resumed: str | None) -> tuple[int, int]:
        """Set up the state, from a checkpoint if there is one; return the first epoch and its steps that are done."""
        exported = [one for one in [*self.callback_handler.callbacks, self.control] if hasattr(one, "state")]
        self.state = TrainerState(stateful_callbacks=exported)
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, steps)
        first = skipped = 0
        if resumed is not None:
            self.state = TrainerState.load_from_json(os.path.join(resumed, STATE))
            if self.state.best_model_checkpoint and not os.path.isdir(self.state.best_model_checkpoint):
                self.state.best_model_checkpoint = None
            self._load_callback_state()
            self._restore(resumed)
            first, skipped = divmod(self.state.global_step, updates)
            skipped = 0 if self.args.ignore_data_skip else skipped
        self.state.max_steps, self.state.num_train_epochs = steps, epochs
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self._losses = torch.zeros((), dtype=torch.float64)
        self._logged_at, self._loss_before, self._result = self.state.global_step, 0.0, None
        return first, skipped

    def _epoch(self, batches: RankBatches, epoch: int, done: int, ignore_keys: list[str] | None) -> None:
        args, control = self.args, self.callback_handler
        size = args.per_device_train_batch_size * self._parts
        substep = done * args.gradient_accumulation_steps
        taken = done
        for batch in batches:
            parts = -(-batch.rows // size)  # as many as transformers would accumulate
            self.control = control.on_step_begin(args, self.state, self.control)
            for _ in range(parts - 1):
                self.control = control.on_substep_end(args, self.state, self.control)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
            self.control = control.on_pre_optimizer_step(args, self.state, self.control)
            self._take(batch)
            self.control = control.on_optimizer_step(args, self.state, self.control)
            self._rate = float(self.optimizer.param_groups[0]["lr"])
            if not _by_metrics(self.lr_scheduler):
                self.lr_scheduler.step()
            substep, taken = substep + parts, taken + 1
            self.state.global_step += 1
            self.state.epoch = epoch + substep / self._substeps
            self.control = control.on_step_end(args, self.state, self.control)
            self._log_evaluate_save(ignore_keys)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if not taken:
            self.control.should_training_stop = True  # a stream that has ended
        self.control = control.on_epoch_end(args, self.state, self.control)
        self._log_evaluate_save(ignore_keys)

    def _take(self, batch: Batch) -> None:
        """Take a step; the host waits for nothing."""
        self.sharded.engine.settings = self._followed.settings()
        note_steps(self.optimizer)
        self._result, self._ahead = self.sharded.step(batch), True
        loss = self._result.loss.detach()
        if self._losses.device != loss.device or self._losses.dtype != loss.dtype:
            self._losses = self._losses.to(loss.device, loss.dtype)
        self._losses += loss
        self.state.total_flos += self._flops * batch.rows

    def _log_evaluate_save(self, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save where the callbacks ask for it, in transformers' order."""
        if self.control.should_log and self.state.global_step > self._logged_at and self._result is not None:
            total, steps = float(self._losses), self.state.global_step - self._logged_at
            self._losses.zero_()
            self._loss_before += total
            self._logged_at = self.state.global_step
            norm = float(self._result.grad_norm)
            self.log({"loss": total / steps, "grad_norm": norm, "learning_rate": self._rate})
        if self.control.should_evaluate:
            metrics = self._evaluate(None, ignore_keys)
            best = self._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _finish(self, started: float, steps: int) -> TrainOutput:
        args, state = self.args, self.state
        self.sharded.finish()
        done = state.global_step - self._started_at
        loss = (self._loss_before + float(self._losses)) / max(done, 0.001)
        metrics = speed_metrics("train", started, num_samples=done * self._rows, num_steps=done)
        metrics |= {"total_flos": state.total_flos, "train_loss": loss}
        self.log(metrics)
        self._sync()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
            self.sharded.load_state_dict(self.model.state_dict())
        if self.is_world_process_zero() and state.best_model_checkpoint is not None and args.save_total_limit == 1:
            for one in sort_checkpoints(args.output_dir, best_model_checkpoint=state.best_model_checkpoint):
                if not os.path.samefile(one, state.best_model_checkpoint):
                    shutil.rmtree(one, ignore_errors=True)
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        self.is_in_train = False
        return TrainOutput(state.global_step, loss, metrics)


def _by_metrics(scheduler: Any) -> bool:
    """Return whether a schedule takes its steps after evaluations."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"
