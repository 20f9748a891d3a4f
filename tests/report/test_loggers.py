"""What Weights & Biases and MLflow get: with modules that stand in for them and, where they are installed, offline."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.core.errors import ConfigError
from shardwise.report.loggers import LOGGERS, check_loggers, make_logger

RUN = {"config": {"train": {"steps": 4, "seed": 1}, "optimizer": {"lr": 0.1}}, "steps": 4, "first_step": 0}
STEPS = [
    {"step": 0, "loss": 3.0, "grad_norm": None, "lr": 0.1, "skipped": True},
    {"step": 1, "loss": 2.0, "grad_norm": float("inf"), "lr": 0.1},
]
EVALUATION = {"step": 2, "validation_loss": 2.5, "rows": 7, "seconds": 0.1}


def drive(logger: Any, status: str = "finished") -> None:
    logger.on_start(RUN)
    logger.on_step(STEPS[0])
    logger.on_evaluation(EVALUATION)
    logger.on_step(STEPS[1])
    logger.on_sample({"step": 2, "text": "a < b"})
    logger.on_end({"status": status, "loss_last": 2.0})


class FakeWandb(ModuleType):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[Any, ...]] = []
        self.ended: list[int] = []
        self.summary: dict[str, Any] = {}

    def init(self, **given: Any) -> Any:
        self.inits.append(given)
        return SimpleNamespace(
            id=given["id"] or "abc", log=self.logged.append, summary=self.summary,
            define_metric=lambda *names, **more: self.axes.append((*names, *more.items())),
            finish=lambda exit_code: self.ended.append(exit_code),
        )  # fmt: skip

    @staticmethod
    def Html(text: str) -> str:
        return text


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    logger = make_logger("wandb", tmp_path)
    assert not fake.inits and list(tmp_path.iterdir()) == []  # nothing before the first step has worked
    drive(logger)
    (given,) = fake.inits
    assert (given["project"], given["dir"], given["id"], given["resume"]) == ("mine", str(tmp_path), None, "allow")
    assert given["config"] == {"train.steps": 4, "train.seed": 1, "optimizer.lr": 0.1}
    assert fake.logged == [
        {"step": 0, "loss": 3.0, "lr": 0.1}, {"step": 2, "validation_loss": 2.5}, {"step": 1, "loss": 2.0, "lr": 0.1},
        {"step": 2, "sample": "<pre>a &lt; b</pre>"},
    ]  # fmt: skip
    assert ("*", ("step_metric", "step")) in fake.axes and fake.ended == [0]
    assert fake.summary == {"status": "finished", "loss_last": 2.0}
    drive(make_logger("wandb", tmp_path), "failed")  # the run goes on
    assert fake.inits[1]["id"] == "abc" and fake.ended == [0, 1]
    never = make_logger("wandb", tmp_path)
    never.on_end({"status": "failed", "error": "at the start"})
    assert len(fake.inits) == 2


class FakeClient:
    def __init__(self, tracking_uri: str) -> None:
        self.uri = tracking_uri
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.texts: list[tuple[str, str]] = []
        self.status: list[str] = []
        self.made = 0

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: str) -> str:
        return f"number of {name}"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.made += 1
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def update_run(self, run: str, status: str) -> None:
        self.status.append(status)

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100
        self.metrics += metrics
        self.params |= dict(params)

    def log_text(self, run: str, text: str, file: str) -> None:
        self.texts.append((text, file))

    def set_terminated(self, run: str, status: str) -> None:
        self.status.append(status)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[FakeClient] = []

    def client(tracking_uri: str) -> FakeClient:
        clients.append(FakeClient(tracking_uri))
        return clients[-1]

    package, tracking = ModuleType("mlflow"), ModuleType("mlflow.tracking")
    package.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Metric=lambda key, value, time, step: (key, value, step), Param=lambda key, value: (key, value)
    )
    tracking.MlflowClient = client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    drive(make_logger("mlflow", tmp_path), "stopped")
    (one,) = clients
    assert one.uri == f"sqlite:///{tmp_path}/mlflow.db" and one.params["optimizer.lr"] == "0.1"
    assert one.metrics == [
        ("loss", 3.0, 0),
        ("lr", 0.1, 0),
        ("validation_loss", 2.5, 2),
        ("loss", 2.0, 1),
        ("lr", 0.1, 1),
    ]
    assert one.texts == [("a < b", "samples/step_00000002.txt")] and one.status == ["KILLED"]
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"mlflow": f"number of mine/{tmp_path.name}"}
    again = make_logger("mlflow", tmp_path)
    again.on_start(RUN)
    for step in range(1200):
        again.on_step({"step": step, "loss": 1.0})
    again.on_end({"status": "finished"})
    assert clients[1].made == 0 and clients[1].params == {} and clients[1].status == ["RUNNING", "FINISHED"]
    assert [step for _, _, step in clients[1].metrics] == list(range(1200))


@pytest.mark.parametrize("name", LOGGERS)
def test_what_is_missing_is_said_before_anything_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one == name else find(one))
    with pytest.raises(
        ConfigError, match=rf'train.loggers = \["{name}"\]: {name} is not installed; legal: pip install'
    ):
        check_loggers([name])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an extra")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    drive(make_logger("wandb", tmp_path))
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert written.stat().st_size > 0 and json.loads((tmp_path / "loggers.json").read_text())["wandb"] in written.name


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mlflow", "sqlalchemy")), reason="mlflow is an extra"
)
def test_mlflow_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    drive(make_logger("mlflow", tmp_path))
    drive(make_logger("mlflow", tmp_path))  # the run goes on
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "shardwise"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.1"
    assert [one.path for one in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step_00000002.txt"]
    assert {one.step: one.value for one in client.get_metric_history(run.info.run_id, "loss")} == {0: 3.0, 1: 2.0}
