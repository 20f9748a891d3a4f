"""The engine behind a Trainer of transformers: made from its model and arguments at the first batch, and its data."""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.parallel.local import refuse_islands
from shardwise.train.trainer import Trainer as ShardedTrainer

from ..collated import RankBatches, Shapes, first_batch, longest, padding
from .arguments import check_arguments, plan_of
from .choices import ComputedLoss

OVERRIDDEN = ("training_step", "prediction_step", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
IDLE = OptimizerChoice("sgd", lr=0.0)  # of a model that is only evaluated


class Base(Trainer):
    """A Trainer of transformers with shardwise's engine, which it makes at the first batch."""

    def __init__(
        self, *given: Any, plan: Plan | None = None, pad_to: Mapping[str, Tensor] | None = None, **named: Any
    ) -> None:
        bound = inspect.signature(Trainer.__init__).bind(self, *given, **named).arguments
        args = bound.get("args") or TrainingArguments(output_dir="tmp_trainer")
        self.notes = check_arguments(args)
        changed = [name for name in OVERRIDDEN if getattr(type(self), name) is not getattr(Trainer, name)]
        if changed:
            legal = "compute_loss, callbacks, data_collator, optimizers and plan"
            raise ConfigError.on(f"{type(self).__name__}.{changed[0]}", "the engine does not call it", legal)
        super().__init__(**{name: one for name, one in bound.items() if name != "self"} | {"args": args})
        args._n_gpu = min(args.n_gpu, 1)  # a process is one rank
        self._train_batch_size = args.train_batch_size
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self._shapes = Shapes(padding(tokenizer, getattr(self.model, "config", None)))
        if pad_to is not None:
            self._shapes.fit(pad_to)
        self.plan = plan_of(args, plan, self.model)
        refuse_islands(self.plan, "transformers.Trainer")
        self._sharded: ShardedTrainer | None = None
        self._choice, self._ahead = IDLE, False
        self._losses = torch.zeros((), dtype=torch.float64)
        atexit.register(self.close)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which here only knows the processes: the plan has the precision."""
        self.args.mixed_precision = "no"
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model on the host, from where each rank reads its part."""

    def _get_num_items_in_batch(self, *given: Any, **named: Any) -> None:
        """Return None: a loss is a mean, which the engine makes that of the whole batch."""

    # ---- the engine --------------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> ShardedTrainer:
        """Return shardwise's own trainer, which exists once there has been a batch."""
        if self._sharded is None:
            raise ShardwiseError("the model is not captured yet; legal: after the first batch")
        return self._sharded

    def close(self) -> None:
        """Leave the other ranks; ``model`` gets the values of the last step."""
        if self._sharded is not None:
            self._sync()
            self._sharded.close()
            self._sharded = None

    def _capture(self, dataset: Any, choice: OptimizerChoice) -> ShardedTrainer:
        """Return shardwise's trainer with this optimizer, made from ``model`` where there is none."""
        if self._sharded is not None and (choice is IDLE or choice.without_rates() == self._choice.without_rates()):
            return self._sharded
        self.close()
        legal = "tensors; remove_unused_columns keeps only what forward names"
        example = self._example(dataset)
        if not example:
            raise ConfigError.on("data", "a batch has no fields", legal)
        norm = self.args.max_grad_norm
        self._choice = choice
        self._sharded = ShardedTrainer(
            self.model, choice, self.plan, example, loss=self._loss(), clip_norm=norm if norm and norm > 0 else None,
            seed=self.args.seed,
        )  # fmt: skip
        if self.is_world_process_zero():
            for note in [*self.notes, *self._sharded.notes]:
                print(f"note: {note}", file=sys.stderr)
        return self._sharded

    def _example(self, dataset: Any) -> dict[str, Tensor]:
        dataset, collate = self._read(dataset, "training")
        more: list[int] = []
        if not self._shapes.like and not isinstance(dataset, IterableDataset):
            more = longest(dataset)
            others = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
            for other in (self.train_dataset, *others.values()):
                self._grow(other, dataset)
        return first_batch(dataset, collate, max(len(more), self._rows), self._shapes, more)

    def _grow(self, other: Any, dataset: Any) -> None:
        """Let batches be as long as the longest samples of another dataset, too."""
        if other is None or isinstance(other, IterableDataset):
            return
        read, collate = self._read(other, "evaluation")
        if read is not dataset and (more := longest(read)):
            shapes = Shapes(self._shapes.pads)
            first_batch(read, collate, len(more), shapes, more)
            for name, shape in shapes.like.items():
                known = self._shapes.like.get(name, shape)
                longer = known[:1] < shape[:1] and known[1:] == shape[1:]
                self._shapes.like[name] = shape if longer else known

    def _loss(self) -> Callable[[Any, Mapping[str, Tensor]], Tensor] | None:
        """Return the loss function, or None where the model's output has the loss."""
        own = type(self).compute_loss is not Trainer.compute_loss
        if own or self.compute_loss_func is not None or self.label_smoother is not None:
            return ComputedLoss(self)
        return None

    def _sync(self) -> None:
        """Give ``model`` the values of the engine; all ranks call it together."""
        if self._ahead:
            self.model.load_state_dict(self.sharded.state_dict())
            self._ahead = False

    # ---- data --------------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> int:
        return self.plan.mesh.axis_size(AXES)

    @property
    def _rows(self) -> int:
        """Return the rows of a step, over all ranks and accumulations."""
        return self.args.per_device_train_batch_size * self._parts * self.args.gradient_accumulation_steps

    def _read(self, dataset: Any, what: str) -> tuple[Any, Any]:
        """Return a dataset and a collator without the columns that the model does not take."""
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset, description=what), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=what)

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> RankBatches:  # fmt: skip
        """Return this rank's rows of the batches of an epoch."""
        args = self.args
        trainer = self._capture(dataset, IDLE)
        read, collate = self._read(dataset, description)
        rows = self._rows if is_training else args.per_device_eval_batch_size * self._parts
        whole = args.per_device_train_batch_size * self._parts if is_training and args.dataloader_drop_last else 1
        loading: dict[str, Any] = {"num_workers": args.dataloader_num_workers, "pin_memory": args.dataloader_pin_memory}
        if args.dataloader_num_workers:
            loading |= {
                "prefetch_factor": args.dataloader_prefetch_factor, "in_order": args.dataloader_in_order,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
            }  # fmt: skip
        stream = isinstance(read, IterableDataset)
        order = None if stream else partial(self._order, len(read), is_training)
        return RankBatches(
            read, collate, order, rows, self.plan.mesh, trainer.comm.rank, self.plan.microbatches, self._shapes,
            whole=whole, masks=trainer.compiled.masks, loading=loading, seed=args.seed,
        )  # fmt: skip

    def _order(self, size: int, training: bool, epoch: int) -> Sequence[int]:
        """Return the order of an epoch: transformers and Accelerate draw it from the seed and the epoch alone."""
        if not training or self.args.train_sampling_strategy == "sequential":
            return range(size)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
