"""Plans that a model does not allow: an error of ``train``, ``show`` and ``verify`` before a folder is touched or a
rank starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_commands import call

from shardwise.cli import train, verify

TINY = [
    "model.width=16",
    "model.layers=2",
    "model.heads=4",
    "data.sequence_length=16",
    "data.batch_size=4",
    "parallel.dp=1",
]
PINNED = ["parallel.tp=2", "parallel.tensor_plan=propagate"]
NOWHERE = 'parallel.pins={"*.nothing.weight" = "column"}'
MINE = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.mean() if x.sum().item() > 1e9 and locals() else y.square().mean()
def model(): return Net(3, 2)
def rows(): return [{"x": torch.ones(3)}] * 8
"""


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks start")

    for command in (train, verify):
        monkeypatch.setattr(command, "launch_local", start)


@pytest.mark.parametrize(("given", "words"), [
    ([*PINNED, NOWHERE],
    ['parallel.pins = {"*.nothing.weight" = "column"} (command line): legal: patterns of such names. ',
                          '"*.nothing.weight" matches no parameter that is read', 'Did you mean "*.norm.weight"?']),
    ([*PINNED, 'parallel.pins={"wpe.weight" = "2"}'],
     ["parallel.pins = ",
     '(command line): legal: 0, 1 and "whole". "wpe.weight" = "2": wpe.weight of [16, 16] has no dim 2']),
    (["parallel.tp=32", "parallel.tensor_plan=propagate", 'parallel.pins={"wpe.weight" = "0"}'],
     ['legal: "whole", or a dim with them. ', "which has no 1 equal parts with a piece for each of 32 ranks"]),
    (["parallel.tp=2", "parallel.tensor_plan=table", 'parallel.pins={"*.norm?.weight" = "whole"}'],
     ['legal: also "wpe.weight" = "column" or ', 'Under tensor_plan = "table" every parameter']),
    (["parallel.pp=9"], ["parallel.pp = 9 (command line): legal: at most ", ". 9 stages, but the model is cut into "]),
    (["parallel.pp=2", "parallel.stages=[7,1]"], ["parallel.stages = [7, 1] (command line): legal: ", "are 8 blocks"]),
], ids=lambda one: one[-1][-20:])  # fmt: skip
def test_a_plan_that_the_model_does_not_allow(given: list[str], words: list[str], tmp_path: Path, text: str) -> None:
    refused = call("train", *TINY, *given, text, f"train.run_dir={tmp_path}/run")
    assert refused.exit_code == 2 and not list(tmp_path.iterdir()), refused.output
    assert "starting" not in refused.stdout and all(word in refused.stderr for word in words), refused.stderr


def test_what_a_run_has_left_stays(tmp_path: Path, text: str) -> None:
    before = {tmp_path / name: name for name in ("sample.txt", "result.json", "config.toml", "rank_0.log")}
    for path, content in before.items():
        path.write_text(content)
    refused = call("train", *TINY, *PINNED, NOWHERE, text, f"train.run_dir={tmp_path}", "--json")
    failure = json.loads(refused.stdout)
    assert refused.exit_code == 2 and failure["cause"] == "config" and failure["error"].startswith("parallel.pins = ")
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("key", ["tp", "pp"])
def test_a_model_that_cannot_be_captured(key: str, tmp_path: Path) -> None:
    """Nothing inside it can be cut."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    given = [
        f"model.factory={file}:model",
        f"data.factory={file}:rows",
        "data.batch_size=4",
        "parallel.dp=1",
        f"parallel.{key}=2",
    ]
    for command in ("train", "show", "memory", "verify"):
        refused = call(command, *given, f"train.run_dir={tmp_path}/run")
        assert refused.exit_code == 2 and not (tmp_path / "run").exists(), refused.output
        assert f"parallel.{key} = 2 (command line): legal: {key} = 1. " in refused.stderr, refused.stderr
        assert "could not be captured" in refused.stderr


def test_the_config_in_which_it_stands_is_named(tmp_path: Path, text: str) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[parallel]\ntp = 2\ntensor_plan = 'propagate'\n[parallel.pins]\n'*.nothing.weight' = 'column'\n")
    for command in (["train"], ["show"], ["verify", "--ranks-as", "processes"]):
        refused = call(*command, str(config), *TINY, text, f"train.run_dir={tmp_path}/run")
        assert f"({config}): legal: patterns" in refused.stderr, refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
