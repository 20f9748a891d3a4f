"""Devices that nobody here has: one of a type that torch does not know, AMD's, Intel's and Apple's; and who may tell
them apart.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise
from shardwise.backend import Backend
from shardwise.config import Hardware, load_config
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.runtime.connect import connect

SOURCE = Path(shardwise.__file__).parent
TESTS = Path(__file__).parents[1]


def standin(*cases: str) -> list[dict[str, Any]]:
    """What a process prints whose accelerator is the stand-in."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCE.parent), str(TESTS)))}
    done = subprocess.run(
        [sys.executable, TESTS / "standin.py", *cases], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_type_that_an_extension_registers() -> None:
    """All that is asked of a device goes through torch's registry; and plans are verified there, on tensors that have
    values.
    """
    facts, plan, host, apart = standin("facts", "gpt:zero 3, selective", "literals:zero 3", "literals:zero 3:apart")
    gib = 1 << 30
    assert facts == {
        "case": "facts", "here": True, "type": "standin", "kind": "gpu", "asynchronous": True, "rocm": False,
        "count": 2,
        "devices": ["standin:0", "standin:1", "standin:0"], "name": "Stand-In 9000", "transport": None,
        "memory": [3 * gib, 4 * gib],
        "event": "standin", "stream": "standin", "tf32": False, "pins": True, "widest": "torch.float64",
    }  # fmt: skip
    assert plan["passed"] and plan["compared"] > 100 and 0 < plan["low"]["ratio"] < 1.25, plan
    assert host["passed"] and host["compared"] >= 20, host
    assert not apart["passed"] and "tensors of two devices" in apart["error"]


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_every_plan_on_the_stand_in(model: str) -> None:
    from test_verify_on_device import PLANS

    for found in standin(*(f"{model}:{plan}" for plan in PLANS)):
        assert found["passed"], found


def test_rocm_is_called_cuda_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Backend("cuda").rocm
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    one = Backend.of("cuda:1")
    assert (one.type, one.rocm, one.transport, one.kind, one.pins) == ("cuda", True, "nccl", "gpu", True)
    assert one.widest_float is torch.float64
    assert not Backend("cpu").rocm and not Backend("xpu").rocm


@pytest.mark.parametrize(("has", "widest"), [(True, torch.float64), (False, torch.float32)])
def test_xpu(has: bool, widest: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Backend("xpu")
    assert (one.count, one.transport, one.kind, one.pins, one.tf32) == (0, "xccl", "gpu", True, False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has))
    assert (one.count, str(one.device(3)), one.widest_float) == (2, "xpu:1", widest)


def test_mps_is_one_device_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Backend("mps")
    assert (one.transport, one.kind, one.pins, one.widest_float) == (None, "gpu", False, torch.float32)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True, raising=False)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert one.count == 1 and str(one.device(1)) == "mps:0"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="backend: torch has none, so it is not possible between devices of type mps; legal: "
    ):
        connect(Mesh.of(dp=2), one.device(0))
    with pytest.raises(ConfigError, match="train.devices.*at most 1, the GPUs of this machine"):
        load_config(None, ["train.devices=2"], hardware=Hardware(cores=8, gpus=1))


# ---- one place -------------------------------------------------------------------------------------------------------

TOOLS = {"nvidia-smi", "rocm-smi", "amd-smi", "xpu-smi"}
MAKERS = {"cuda", "nccl", "rccl", "xpu", "xccl", "mps", "hip"}


def told_apart(text: str) -> list[str]:
    """Where a module writes out a type of device or its transport, or reaches for ``torch.cuda`` and the like; comments
    and docstrings may.
    """
    tree = ast.parse(text)
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            if node.value.lower().partition(":")[0] in MAKERS | TOOLS or "torch.cuda" in node.value:
                found.append(f"{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Attribute) and node.attr in (MAKERS | {"is_cuda", "is_xpu", "is_mps"}):
            found.append(f"{node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
            found += [f"{node.lineno}: import {name}" for name in names if MAKERS & set(name.split("."))]
    return found


@pytest.mark.slow
def test_only_one_place_tells_makers_apart() -> None:
    """A new kind of device is one more case in ``backend.py``; and in ``drivers.py``, which asks makers' own tools
    before there is a torch for the device."""
    files = sorted(SOURCE.rglob("*.py"))
    found = {str(file.relative_to(SOURCE)): told_apart(file.read_text(encoding="utf-8")) for file in files}
    assert len(files) > 100 and found.pop("backend.py") and found.pop("drivers.py")
    assert "import torch" not in (SOURCE / "drivers.py").read_text(encoding="utf-8")
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        'x.to("cuda")', 'd = torch.device("cuda:0")', "torch.cuda.synchronize()", "if x.is_cuda: pass",
        'init_process_group("nccl")',
        "from torch.cuda import Event", "import torch.backends.mps", 'd.type == "mps"', 'run(["nvidia-smi", "-L"])',
    ],
)  # fmt: skip
def test_who_tells_them_apart_is_found(line: str) -> None:
    documented = '"""Of CUDA and NCCL, "cuda"."""\n# "cuda"\n'
    assert told_apart(documented) == [] and told_apart(documented + line)
