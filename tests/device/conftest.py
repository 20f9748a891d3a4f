"""Each test here runs on the CPU wherever it is, so that it cannot rot, and under the marker ``gpu`` on the machine's
GPU.
"""

from __future__ import annotations

import pytest
import torch

from shardwise.backend import Backend


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, or the first GPU of this machine."""
    return Backend("cpu").device() if request.param == "cpu" else Backend.here().device(0)
