"""Time the forward of keyed dropout against torch's own, with 2M fp32 elements on one CPU thread:
``python benchmarks/keyed_dropout.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardwise.ops.keyed_random import keyed_dropout, keyed_mask


def fastest(call: Callable[[], object], repeats: int = 40) -> float:
    """Return the milliseconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    """Print one line for each way to drop elements."""
    torch.set_num_threads(1)
    x = torch.randn(8, 256, 1024)
    ways: dict[str, Callable[[], object]] = {
        "torch dropout": lambda: torch.nn.functional.dropout(x, 0.1, True),
        "keyed dropout": lambda: keyed_dropout(x, 0.1, 1, 2, 3, (0, 1)),
        "keyed mask alone": lambda: keyed_mask(0.1, 1, 2, 3, x.shape, (0, 1)),
    }
    for name, way in ways.items():
        print(f"{name:17} {fastest(way):6.2f} ms")


if __name__ == "__main__":
    main()
