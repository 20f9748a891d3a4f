"""``train.deterministic``: what it sets in the environment, its end, and what is said of ops that cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.backend import Backend
from shardwise.cli import train as command
from shardwise.config import load_config
from shardwise.core.errors import ConfigError
from shardwise.launch import training
from shardwise.launch.folder import _changes
from shardwise.launch.repeatable import repeatable, same_bits

TINY = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16", "data.batch_size=4"]
CUDA = Backend("cuda")


def test_the_environment_of_a_deterministic_run() -> None:
    given = {"NCCL_ALGO": "Tree", "HOME": "/root"}
    CUDA.prepare_repeatable(given)
    assert given == {"NCCL_ALGO": "Tree", "HOME": "/root", "NCCL_PROTO": "Simple", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert CUDA.repeats(given) == {name: given[name] for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")}
    other = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    CUDA.prepare_repeatable(other)
    assert other["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    nothing: dict[str, str] = {}
    Backend("cpu").prepare_repeatable(nothing)
    assert nothing == {} == Backend("cpu").repeats(given)


def test_a_workspace_that_lets_cublas_choose_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train.deterministic: CUBLAS_WORKSPACE_CONFIG=:0:0 .*legal: :4096:8 or :16:8"
    ):
        CUDA.prepare_repeatable({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


@pytest.mark.parametrize("before", [False, True])
def test_it_ends_with_the_run(before: bool) -> None:
    memory: Any = torch.utils.deterministic
    try:
        torch.use_deterministic_algorithms(before, warn_only=before)
        fill = memory.fill_uninitialized_memory
        with suppress(KeyError), same_bits():
            assert (
                torch.are_deterministic_algorithms_enabled()
                and not torch.is_deterministic_algorithms_warn_only_enabled()
            )
            assert not memory.fill_uninitialized_memory and not torch.backends.cudnn.benchmark
            raise KeyError
        assert (
            torch.are_deterministic_algorithms_enabled()
            == torch.is_deterministic_algorithms_warn_only_enabled()
            == before
        )
        assert memory.fill_uninitialized_memory == fill
    finally:
        torch.use_deterministic_algorithms(False)


def test_compilers_are_told_that_it_has_ended() -> None:
    from torch._inductor import config  # which torch.use_deterministic_algorithms sets as well

    before = config.deterministic
    with same_bits():
        assert config.deterministic
    assert config.deterministic == before


def test_tf32_ends_with_the_run() -> None:
    before = torch.get_float32_matmul_precision()
    with suppress(KeyError), CUDA.allow_tf32():
        assert torch.get_float32_matmul_precision() == "high" and CUDA.tf32
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("put_", lambda: torch.zeros(5).put_(torch.tensor([0, 0]), torch.ones(2))),
        ("median CUDA with indices output", lambda: torch.zeros(3, device="meta").median(0)),
        ("_histc_cuda with floating point input", lambda: torch.zeros(3, device="meta").histc(3)),
    ],
)
def test_an_op_is_named_as_torch_names_it(op: str, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as found, repeatable(torch.device("cpu"), True):
        call()
    assert str(found.value).startswith(
        f"train.deterministic: {op}, an op of the model, gives other bits each time on devices of type cpu"
    )


def test_an_error_of_another_kind_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="something else"), repeatable(torch.device("cpu"), True):
        raise RuntimeError("something else")
    with repeatable(torch.device("cpu"), False):
        assert not torch.are_deterministic_algorithms_enabled()


class Begun(Exception):
    """A rank would run now."""


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
SLURM = {
    "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node07", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip


@pytest.mark.parametrize("variables", [{}, TORCHRUN, SLURM], ids=["local", "torchrun", "slurm"])
@pytest.mark.parametrize("wanted", [True, False])
def test_every_launcher_gives_ranks_the_environment(
    variables: dict[str, str], wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with CUDA: what is in the environment when ranks start, or when this process begins to be one."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO")
    for name in (*names, *TORCHRUN, "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: dict[str, str] = {}

    def begin(*arguments: Any, **more: Any) -> bool:
        found.update({name: os.environ[name] for name in names if name in os.environ})
        raise Begun

    prepare = Backend.prepare_repeatable
    monkeypatch.setattr(Backend, "prepare_repeatable", lambda self, environment: prepare(CUDA, environment))
    monkeypatch.setattr(command, "launch_local", begin)
    monkeypatch.setattr(training, "train", begin)
    monkeypatch.setattr(command, "stop_on", lambda signals, then: lambda: False)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    keys = [*TINY, f"data.source={tmp_path / 'text.txt'}", f"train.run_dir={tmp_path / 'run'}", "train.threads=1"]
    with pytest.raises(Begun):
        command.run(
            None,
            [*keys, f"train.devices={1 + bool(variables is SLURM)}", f"train.deterministic={str(wanted).lower()}"],
            json=True,
        )
    assert found == (
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"} if wanted else {}
    )


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))

    def forward(self, x, y):  # put_ is one of the few ops that torch refuses on a CPU too
        return ((torch.zeros(7).put_(torch.tensor([0, 0]), self.table[:2]).sum() + (x @ self.table) - y) ** 2).mean()

def points():
    return [{"x": torch.randn(3), "y": torch.randn(())} for _ in range(32)]
"""


def test_an_op_that_gives_other_bits_each_time_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    given = [
        f"model.factory={tmp_path / 'net.py'}:Net",
        f"data.factory={tmp_path / 'net.py'}:points",
        "data.batch_size=4",
        "train.steps=2",
    ]
    done = shardwise(*given, f"train.run_dir={tmp_path / 'run'}", "train.devices=2", "train.deterministic=true")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert said.startswith("error: train.deterministic: put_, an op of the model, "), said
    assert said.endswith("legal: false, or a model without it") and "Traceback" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def shardwise(*given: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "shardwise", "train", *given, "train.threads=1"]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"}, check=False
    )


@pytest.mark.full
def test_two_ranks_repeat_themselves_and_say_how(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    curves, weights = [], []
    for name, key in (("first", "true"), ("second", "true"), ("other", "false")):
        folder = tmp_path / name
        arguments = [
            sys.executable, "-m", "shardwise", "train", *TINY, f"data.source={tmp_path / 'text.txt'}", "train.steps=4",
            "train.devices=2",
            f"train.run_dir={folder}", f"train.deterministic={key}", "parallel.zero=3",
        ]  # fmt: skip
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80"}, check=False
        )
        assert done.returncode == 0, done.stderr
        about = json.loads((folder / "about.json").read_text())
        assert about["deterministic"] == ({} if key == "true" else None)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves.append([(one["loss"], one["grad_norm"]) for one in lines])
        weights.append(load_file(folder / "weights.safetensors"))
    assert len(curves[0]) == 4 and curves[0] == curves[1] == curves[2]
    assert all(torch.equal(value, other[name]) for other in weights[1:] for name, value in weights[0].items())


def test_a_run_of_before_there_was_the_key_was_not_deterministic() -> None:
    """Nor has it changed in what else it could not say; what is asked for now is told."""
    lacking = ("deterministic", "trace_steps", "tf32")
    before = "\n".join(line for line in load_config().resolved().splitlines() if not line.startswith(lacking))
    assert dict(_changes(before, load_config())) == {}
    assert dict(_changes(before, load_config(None, ["train.deterministic=true"]))) == {
        "train.deterministic": "false → true"
    }
