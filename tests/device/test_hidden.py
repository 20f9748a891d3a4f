"""No test sees a GPU but those that are marked, which do not run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ASK = "import torch; print(torch.cuda.device_count(), torch.xpu.device_count() if torch.xpu.is_available() else 0)"


def test_nobody_sees_a_gpu() -> None:
    """Neither this process, be it a worker's, nor one that it starts."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["HIP_VISIBLE_DEVICES"] == ""
    assert torch.cuda.device_count() == 0
    assert (
        subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60, check=True).stdout
        == "0 0\n"
    )


def test_without_a_gpu_marked_tests_are_not_said_to_pass() -> None:
    """The process inherits that there is none."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        Path(__file__).with_name("test_parts_on_device.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "no GPU here that torch can use: " in done.stdout and "tests not run" in done.stdout
