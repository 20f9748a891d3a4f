"""Metrics are written for Weights & Biases: https://docs.wandb.ai.

``WANDB_PROJECT``, ``WANDB_NAME``, ``WANDB_MODE`` and the other variables of wandb hold as they do in any script.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .loggers import flat, known_id, missing, numbers, remember_id

PROJECT = "shardwise"


class WandB:
    """Writes into a run of wandb; a run of ours that goes on from a checkpoint goes on there too."""

    def __init__(self, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("wandb", str(error)) from None
        self._wandb, self._run_dir = wandb, run_dir
        self._run: Any = None

    def on_start(self, run: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.environ.get("WANDB_NAME", self._run_dir.name),
            dir=str(self._run_dir), id=known_id(self._run_dir, "wandb"), resume="allow", config=flat(run["config"]),
        )  # fmt: skip
        remember_id(self._run_dir, "wandb", str(self._run.id))
        # wandb takes the steps of its own axis in order only, but metrics come a step later than evaluations.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": metrics["step"], **numbers(metrics)})

    def on_evaluation(self, values: Mapping[str, Any]) -> None:
        self._run.log({"step": values["step"], **numbers(values)})

    def on_sample(self, values: Mapping[str, Any]) -> None:
        self._run.log({"step": values["step"], "sample": self._wandb.Html(f"<pre>{_escaped(values['text'])}</pre>")})

    def on_end(self, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update({"status": values["status"], **numbers(values)})
            self._run.finish(exit_code=int(values["status"] == "failed"))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
