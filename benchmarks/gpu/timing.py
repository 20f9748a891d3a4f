"""Time and memory of small programs on a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.backend import Backend

from .contenders import Stamps

ROUNDS = 5
SECONDS = 0.15  # the seconds of a way in one round


def measure(device: torch.device, ways: Mapping[str, Callable[[], object]], tiny: bool) -> dict[str, dict[str, Any]]:
    """Return for each way the median milliseconds of a call in rounds in which they take turns, and on a card the most
    bytes beside those allocated before.

    A way that cannot run here has the reason under "unknown".
    """
    backend = Backend.of(device)
    found: dict[str, dict[str, Any]] = {}
    repeats: dict[str, int] = {}
    for name, way in ways.items():
        try:
            for _ in range(3):
                way()
            backend.synchronize(device)
        except Exception as error:  # noqa: BLE001 - a kernel or a compiler that is missing is what this is to find out
            found[name] = {
                "unknown": f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
            }
            continue
        found[name] = {"bytes": _bytes(device, way)}
        once = _seconds(device, way, 1)
        repeats[name] = 2 if tiny else max(3, min(200, round(SECONDS / max(once, 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in repeats}
    for _ in range(2 if tiny else ROUNDS):
        for name, count in repeats.items():
            times[name].append(_seconds(device, ways[name], count))
    for name, seconds in times.items():
        found[name]["milliseconds"] = statistics.median(seconds) * 1e3
    return found


def _seconds(device: torch.device, way: Callable[[], object], count: int) -> float:
    """Return the seconds of one of ``count`` calls that the host issues without waiting."""
    Backend.of(device).synchronize(device)
    stamps = Stamps(device)
    stamps.now()
    for _ in range(count):
        way()
    stamps.now()
    return stamps.seconds()[0] / count


def _bytes(device: torch.device, way: Callable[[], object]) -> int | None:
    backend = Backend.of(device)
    if not backend.asynchronous:
        return None
    backend.synchronize(device)
    backend.reset_peak(device)
    before = backend.allocated(device)
    way()
    backend.synchronize(device)
    return backend.most_allocated(device) - before
