"""Checkpoints in the folders and the form of transformers, with what a run of shardwise needs to go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from shardwise.checkpoint.folder import latest
from shardwise.checkpoint.reader import Checkpoint
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.train.checkpoints import Checkpoints

from .evaluation import Evaluating

OWN = "shardwise"  # the folder in a checkpoint of transformers' form that has what a run needs to go on
STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"


class Saving(Evaluating):
    """Save and restore what is trained."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in transformers' form, on rank 0; all ranks call it together."""
        state = self.sharded.state_dict(0) if self._ahead else None
        if self.is_world_process_zero():
            if state is not None:  # masters are wider than the model under bf16 and fp16
                like = self.model.state_dict()
                state = {name: value.to(like[name].dtype) for name, value in state.items()}
            self._save(output_dir or self.args.output_dir, state_dict=state)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the model in transformers' form and beside it what a run needs to go on, on any number of ranks."""
        args, state = self.args, self.state
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self.save_model(folder, _internal_call=True)
        if not args.save_only_model:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            self._write(Path(folder) / OWN, {"learning_rates": rates})
            self._save_rng_state(folder)
        if state.best_global_step:
            best = os.path.join(args.output_dir, f"checkpoint-{state.best_global_step}")
            self.sharded.comm.barrier(what="the checkpoint of the best model")
            state.best_model_checkpoint = best if os.path.exists(best) else state.best_model_checkpoint
        if self.is_world_process_zero():
            if not args.save_only_model:
                torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER))
            for one in [*self.callback_handler.callbacks, self.control]:
                if (name := type(one).__name__) in state.stateful_callbacks:
                    known = state.stateful_callbacks[name]
                    known.append(one.state()) if isinstance(known, list) else state.stateful_callbacks.update(
                        {name: one.state()}
                    )
            state.save_to_json(os.path.join(folder, STATE))
            rotate_checkpoints(
                output_dir=args.output_dir, save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint, use_mtime=True,
            )  # fmt: skip
        self.sharded.comm.barrier(what="the checkpoint")

    def _write(self, folder: Path, meta: Mapping[str, Any]) -> None:
        failed: list[str] = []
        with Checkpoints(self.sharded, folder, keep_last=1, meta=meta, warn=failed.append) as checkpoints:
            checkpoints.save()
            checkpoints.wait()
        if failed:
            raise ShardwiseError(f"{folder}: the checkpoint could not be written: {failed[0]}")

    def _checkpoint(self, given: str | bool | None) -> str | None:
        """Return the checkpoint to go on from; raise :class:`ConfigError` where there is none of a ShardwiseTrainer."""
        if given is None or given is False:
            return None
        path = get_last_checkpoint(self.args.output_dir) if given is True else str(given)
        if path is None:
            raise ConfigError.on("resume_from_checkpoint", f"no checkpoint in {self.args.output_dir}", "None")
        if latest(Path(path) / OWN) is None:
            wrong = f"{path} has no folder {OWN} of a ShardwiseTrainer's state"
            legal = (
                "a checkpoint that it saved without save_only_model, or a model of from_pretrained(PATH) to begin with"
            )
            raise ConfigError.on("resume_from_checkpoint", wrong, legal)
        return path

    def _restore(self, path: str) -> None:
        found = latest(Path(path) / OWN)
        assert found is not None
        with Checkpoints(self.sharded, Path(path) / OWN) as checkpoints:
            checkpoints.restore(path=found)
        self._ahead = True
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(path, SCHEDULER), weights_only=False))
        rates = Checkpoint.open(found).meta["learning_rates"]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
