"""Ranks that are threads, on one CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _one_cpu() -> Iterator[None]:
    """Threads take turns in Python.  On several CPUs each op, which lets another thread in, costs them a switch: 4
    times the CPU time of 8 ranks, where nothing else runs.  Processes of pytest-xdist are on different CPUs."""
    if not hasattr(os, "sched_setaffinity"):  # not everywhere
        yield
        return
    before = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[worker % len(before)]})
    yield
    os.sched_setaffinity(0, before)
