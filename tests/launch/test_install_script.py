"""Which build of torch ``scripts/install.sh`` asks pip for, with drivers and pip that are scripts, and which commands
docs/install.md gives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_device_checks import Smi, smi, tool  # noqa: F401 - a fixture

from shardwise import drivers

ROOT = Path(__file__).parents[2]


def installed(tmp_path: Path, visible: str | None = None, lacks: str = "nothing") -> list[str]:
    """The packages of torch that the script asks pip for, in this order; pip has none of those with ``lacks`` in their
    names.
    """
    for name in ("scripts/install.sh", "src/shardwise/drivers.py", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    asked = tmp_path / "asked"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    body = f"""case "$*" in
    *metadata*) exit 1 ;;
    *torch==*) echo "$*" >>{asked}; case "$*" in *{lacks}*) exit 1 ;; esac ;; esac"""
    tool(tmp_path / ".venv/bin", "python", body)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
    environment |= {"PYTHON": sys.executable} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    done = subprocess.run(
        [tmp_path / "scripts/install.sh", "run"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [line.partition("constraints.txt ")[2] for line in asked.read_text().splitlines()]


def wheel(build: str) -> str:
    return f"--extra-index-url https://download.pytorch.org/whl/{build} torch==2.13.0+{build}"


def test_install_takes_the_build_that_the_driver_runs(smi: Smi, tmp_path: Path) -> None:  # noqa: F811
    smi(runs="13.1")
    assert installed(tmp_path) == [wheel("cu130")]


def test_install_falls_back_to_what_pip_finds(smi: Smi, tmp_path: Path) -> None:  # noqa: F811
    smi(runs="12.9")
    assert installed(tmp_path, lacks="+cu129") == [wheel("cu129"), "torch==2.13.0"]


def test_install_on_rocm(smi: Smi, tmp_path: Path) -> None:  # noqa: F811
    smi(body="exit 9")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU of NVIDIA's, which comes first")
    tool(tmp_path / "bin", "rocm-smi", "echo 'GPU[0]\t\t: Card series: \t\tAMD Instinct MI300X'")
    assert installed(tmp_path) == [wheel("rocm7.2")]


def test_install_without_a_gpu_or_with_a_hidden_one(smi: Smi, tmp_path: Path) -> None:  # noqa: F811
    smi()
    assert installed(tmp_path, visible="") == ["torch==2.13.0+cpu"]


def test_install_asks_torch_s_index_for_cpus_last(smi: Smi, tmp_path: Path) -> None:  # noqa: F811
    smi()
    found = installed(tmp_path, visible="", lacks="+cpu")
    assert found == [
        "torch==2.13.0+cpu",
        "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu",
        "torch==2.13.0",
    ]


def test_the_guide_s_commands_are_those_that_are_given() -> None:
    told = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert all(
        f"`{drivers.install('2.13.0', build)}`" in told
        for build in ("cu130", "cu126", drivers.ROCM_BUILD, drivers.XPU_BUILD)
    )
    assert "\ntorch==2.13.0\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
