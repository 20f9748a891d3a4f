"""Metrics are written for MLflow: https://mlflow.org.

``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` hold as they do in any script; without the first, MLflow's
database is ``mlflow.db`` in the folder of the run, for ``mlflow ui --backend-store-uri sqlite:///…/mlflow.db``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .loggers import flat, known_id, missing, numbers, remember_id

EXPERIMENT = "shardwise"
DATABASE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"  # in the folder of the run
FLUSH_SECONDS = 10.0  # the seconds for which metrics are collected before they are sent
MOST = 1000  # metrics in one request, which is MLflow's limit
MOST_PARAMETERS = 100
LONGEST = 6000  # characters of a parameter
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Writes into a run of MLflow; a run of ours that goes on from a checkpoint goes on there too."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from mlflow import entities
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise missing("mlflow", str(error)) from None
        self._entities, self._make, self._run_dir = entities, MlflowClient, run_dir
        self._client: Any = None
        self._run = ""
        self._metrics: list[Any] = []
        self._sent = time.monotonic()

    def on_start(self, run: Mapping[str, Any]) -> None:
        uri, folder = os.environ.get("MLFLOW_TRACKING_URI"), self._run_dir.absolute()
        self._client = self._make(tracking_uri=uri or f"sqlite:///{folder / DATABASE}")
        known = known_id(self._run_dir, "mlflow")
        if known is not None:
            self._run = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            place = {} if uri else {"artifact_location": (folder / ARTIFACTS).as_uri()}
            number = self._client.create_experiment(name, **place)
        else:
            number = experiment.experiment_id
        self._run = self._client.create_run(number, run_name=self._run_dir.name).info.run_id
        remember_id(self._run_dir, "mlflow", self._run)
        parameters = [self._entities.Param(key, str(value)[:LONGEST]) for key, value in flat(run["config"]).items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + MOST_PARAMETERS])

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self._add(metrics["step"], numbers(metrics))

    def on_evaluation(self, values: Mapping[str, Any]) -> None:
        self._add(values["step"], numbers(values))

    def on_sample(self, values: Mapping[str, Any]) -> None:
        self._client.log_text(self._run, values["text"], f"samples/step_{values['step']:08d}.txt")

    def on_end(self, values: Mapping[str, Any]) -> None:
        if self._run:
            self._send()
            self._client.set_terminated(self._run, status=STATUS[values["status"]])

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(key, float(value), now, step) for key, value in values.items()]
        if len(self._metrics) >= MOST or time.monotonic() > self._sent + FLUSH_SECONDS:
            self._send()

    def _send(self) -> None:
        metrics, self._metrics, self._sent = self._metrics, [], time.monotonic()
        for first in range(0, len(metrics), MOST):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST])
