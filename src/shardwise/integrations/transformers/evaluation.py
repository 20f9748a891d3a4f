"""Evaluations and predictions. The engine computes losses alone: for predictions each rank runs the whole model on its
rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shardwise.core.mesh import Mesh
from shardwise.data.loader import AXES, Batch
from shardwise.runtime.communicator import Communicator, host_gather

from ..collated import RankBatches
from .base import Base

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Predictions:
    """The outputs, labels and inputs of the batches that were added, in the order of their rows.

    It holds the whole model on the device of each rank while it is used."""

    def __init__(self, trainer: Any, batches: RankBatches, ignore_keys: list[str] | None) -> None:
        self._trainer, self._batches, self._ignored = trainer, batches, ignore_keys
        self._found: list[list[Any]] = []
        self._form: Any = None
        self._comm: Communicator = trainer.sharded.comm
        trainer._sync()
        self._model = trainer.model.to(self._comm.device)
        self._training = self._model.training
        self._model.eval()

    def add(self, batch: Batch) -> None:
        """Run the model on this rank's rows of a batch, and give what it says to all ranks."""
        trainer, own = self._trainer, sum(batch.counts)
        # A rank without rows runs a row of zeros, for the kinds and shapes of what it has none of.
        fields = {
            name: (value if own else value.new_zeros((1, *value.shape[1:]))).to(self._comm.device)
            for name, value in batch.fields.items()
        }
        precision = trainer.plan.numeric.precision
        with torch.autocast(self._comm.device.type, AUTOCAST.get(precision), enabled=precision in AUTOCAST):
            _, outputs, labels = trainer.prediction_step(self._model, fields, False, ignore_keys=self._ignored)
        main = fields.get(getattr(self._model, "main_input_name", "input_ids"))
        inputs = main if "inputs" in trainer.args.include_for_metrics else None
        if outputs is not None and trainer.preprocess_logits_for_metrics is not None:
            outputs = trainer.preprocess_logits_for_metrics(outputs, labels)
        leaves, self._form = tree_flatten((outputs, labels, inputs))
        self._found.append([None if one is None else self._all(one[:own], batch.rows) for one in leaves])

    def _all(self, mine: Tensor, rows: int) -> np.ndarray[Any, Any]:
        """Return the rows of all ranks, from those of this one."""
        mine = mine.detach().cpu()
        if mine.dtype in (torch.bfloat16, torch.float16):
            mine = mine.float()
        mesh = self._comm.mesh
        parts = self._batches.rows_of(rows)
        padded = mine.new_zeros((max(map(len, parts)), *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        number = padded.to(torch.uint8) if padded.dtype == torch.bool else padded
        gathered = host_gather(self._comm, number, "predictions").to(padded.dtype)
        whole = mine.new_empty((rows, *mine.shape[1:]))
        for part, own in enumerate(parts):
            whole[own] = gathered[_first(mesh, part)][: len(own)]
        return whole.numpy()

    def whole(self) -> tuple[Any, Any, Any]:
        """Return outputs, labels and inputs of all rows as arrays, or None for what there is not; the model goes back
        to the host."""
        self._model.to("cpu").train(self._training)
        if not self._found:
            return None, None, None
        columns = zip(*self._found, strict=True)
        joined = [None if column[0] is None else np.concatenate(column) for column in columns]
        outputs, labels, inputs = tree_unflatten(joined, self._form)
        return outputs, labels, inputs


def _first(mesh: Mesh, part: int) -> int:
    """Return the first rank that has a part of the rows."""
    return next(rank for rank in range(mesh.size) if mesh.index(rank, AXES) == part)


class Evaluating(Base):
    """Evaluate and predict."""

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Return the mean loss of a dataset and, unless ``prediction_loss_only``, what the model predicts for it."""
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self.callback_handler.eval_dataloader = dataloader
        predictions = None if only else Predictions(self, dataloader, ignore_keys)
        losses, rows = [], []
        for batch in dataloader:
            if batch.fields.keys() == self.sharded.compiled.example.keys():
                losses.append(self.sharded.evaluate_batch(batch).loss)
            rows.append(batch.rows)
            if predictions is not None:
                predictions.add(batch)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        found: dict[str, Any] = {}
        outputs, labels, inputs = (None, None, None) if predictions is None else predictions.whole()
        if self.compute_metrics is not None and outputs is not None and labels is not None:
            more = {"losses": None, "inputs": inputs} if self.args.include_for_metrics else {}
            found = self.compute_metrics(EvalPrediction(predictions=outputs, label_ids=labels, **more))
        metrics = denumpify_detensorize(found)
        if losses:
            mean = torch.stack(losses).double() * torch.tensor(rows, device=losses[0].device)
            metrics[f"{metric_key_prefix}_loss"] = float(mean.sum()) / sum(rows)
        named = {key if key.startswith(f"{metric_key_prefix}_") else f"{metric_key_prefix}_{key}": value
                 for key, value in metrics.items()}  # fmt: skip
        return EvalLoopOutput(outputs, labels, named, sum(rows))
