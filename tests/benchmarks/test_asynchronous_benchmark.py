"""The benchmark of ways that wait and ways that do not: a slow worker is slow, and figures follow from the run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from asynchronous import WAYS, _reached, slowed  # noqa: E402

BUSY = "import time\nend = time.monotonic() + 2.0\nwhile time.monotonic() < end: pass\nprint(time.process_time())"


@pytest.mark.slow
def test_a_slow_worker_gets_a_part_of_the_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    with slowed(process.pid, 4.0):
        told = process.communicate(timeout=30)[0]
    assert 0.2 < float(told) < 1.2  # of two seconds


def test_nobody_is_slow_at_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    began = time.monotonic()
    with slowed(process.pid, 1.0):
        assert process.wait(timeout=30) == 0
    assert time.monotonic() - began < 20


def test_what_is_reached() -> None:
    waiting = [{"step": i, "loss": 4.0 - 0.1 * i, "step_seconds": 0.5} for i in range(20)]
    apart = [{"step": i, "loss": 4.0 - 0.1 * i, "step_seconds": 9.0, "time": 100 + 0.5 * (i + 1)} for i in range(20)]
    for lines in (waiting, apart[::-1]):  # workers write in any order
        found = _reached("a way", lines, 256, 100.0, 10.0)
        assert found.updates_per_second == pytest.approx(2.0) and found.tokens_per_second == pytest.approx(512.0)
        assert found.loss == pytest.approx((2.2 + 2.1) / 2)
        assert found.curve[0] == pytest.approx((0.5, 256, 4.0)) and found.curve[-1] == pytest.approx((10.0, 5120, 2.1))
    with pytest.raises(SystemExit, match="3 updates in 10 s are too few"):
        _reached("a way", waiting[:3], 256, 100.0, 10.0)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_config(way: str) -> None:
    given = ["train.devices=2", "parallel.dp=2", "data.batch_size=16", *(one.format(workers=2) for one in WAYS[way])]
    assert load_config(None, given).parallel.dp == 2
