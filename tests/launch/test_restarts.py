"""Which failures ranks are started again after, and that wrong input is never one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Hardware, load_config
from shardwise.core.errors import ConfigError
from shardwise.launch import training
from shardwise.launch.local import RunFailed
from shardwise.launch.ready import Surroundings
from shardwise.launch.restarts import run_with_restarts
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.progress import Progress, record_path


@pytest.mark.parametrize(
    ("cause", "starts"),
    [("config", 1), ("other", 1), ("non-finite", 1), ("lost", 3), ("hang", 3), ("communication", 3)],
)
def test_a_configuration_error_is_never_restarted(tmp_path: Path, cause: str, starts: int) -> None:
    (tmp_path / "logs").mkdir()
    began, told = [], []

    def start() -> bool:
        began.append(cause)
        raise RunFailed("model.weights: other shapes", cause, 0, [], None)

    with pytest.raises(RunFailed, match="other shapes"):
        run_with_restarts(start, tmp_path, 2, told.append)
    assert len(began) == starts and len(told) == starts - 1
    assert (tmp_path / "logs" / "launcher.log").read_text().count("starting the ranks") == starts


def test_a_configuration_error_is_told_before_other_ranks_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving may take long, and what the others then fail with looks like a lost connection."""
    happened: list[Any] = []

    def build(*_: object) -> None:
        raise ConfigError("model.pretrained: other shapes")

    monkeypatch.setattr(training, "_build", build)
    monkeypatch.setattr(AloneCommunicator, "abort", lambda self: happened.append("abort"))
    config = load_config(None, ["train.devices=1", f"train.run_dir={tmp_path}"], hardware=Hardware(cores=1))
    side = Surroundings(Progress(record_path(tmp_path, 0)), failed=lambda error: happened.append(str(error)))
    with pytest.raises(ConfigError):
        training.train(config, side)
    assert happened == ["model.pretrained: other shapes", "abort"]
