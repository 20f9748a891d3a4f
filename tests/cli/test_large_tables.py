"""Tables that are larger than what one server has room for: each server holds its range, and nothing of the others'."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors import safe_open
from test_apart_runs import CLICKS, LIMIT, of_run, started

WIDTH = 16


def peaks(folder: Path, buckets: int, servers: int) -> list[int]:
    """Train on clicks with a table of this many rows; return the most bytes that each server's process has had."""
    process = started([
        str(CLICKS), f"train.run_dir={folder}", f"model.arguments={{buckets={buckets}, width={WIDTH}}}",
        f"data.arguments={{rows=4000, buckets={buckets}}}", "validation.every=0", "validation.metrics=[]",
        "data.batch_size=64", "parallel.server=async", f"parallel.server_ranks={servers}", "parallel.dp=1",
        "train.threads=1", "train.steps=40", "checkpoint.every=8",
    ])  # fmt: skip
    found, pids, deadline = [0] * servers, dict[int, int](), time.monotonic() + LIMIT
    while process.poll() is None:
        assert time.monotonic() < deadline
        for number in range(servers):
            try:
                pids[number] = pids.get(number) or of_run(folder, "server_process", number)
                status = Path(f"/proc/{pids[number]}/status").read_text().splitlines()
                found[number] = max(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
            except (AssertionError, OSError, ValueError):  # it has not started, or has ended
                continue
        time.sleep(0.02)
    assert process.returncode == 0, process.communicate()[0]
    return found


@pytest.mark.slow
def test_a_server_has_room_for_its_range_alone(tmp_path: Path) -> None:
    buckets = 3_000_000
    table = buckets * (WIDTH + 1) * 4
    (bare,), (whole,) = peaks(tmp_path / "bare", 1000, 1), peaks(tmp_path / "whole", buckets, 1)
    assert whole - bare > 1.9 * table  # it has the parameters and the optimizer's state
    each = peaks(tmp_path / "run", buckets, 4)
    assert max(each) - bare < 0.85 * table
    with safe_open(tmp_path / "run/weights.safetensors", "pt") as file:
        assert file.get_slice("vectors.weight").get_shape() == [buckets, WIDTH]
        assert file.get_tensor("vectors.weight").std() > 0
