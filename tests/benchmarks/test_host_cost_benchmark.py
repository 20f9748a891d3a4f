"""The benchmark of what an instruction costs the host, on two layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from host_cost import measured  # noqa: E402


@pytest.mark.slow
def test_more_instructions_cost_more() -> None:
    found = measured("1d", layers=2, microbatches=2, rounds=3)
    assert found["pairs"]["instructions"] > 2 * found["none"]["instructions"] > 20
    assert 0 < found["instruction"] < 5e-3
    more = found["pairs"]["instructions"] - found["none"]["instructions"]
    assert abs(found["layer"] * 2 * 2 - found["instruction"] * more) < 1e-12
