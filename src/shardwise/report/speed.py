"""The speed of a run: tokens a second where its data is text, samples a second where it is not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

UNITS = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
"""The keys under which steps and results have their speed, and its unit."""
TOKENS, SAMPLES = UNITS


def key_of(values: Mapping[str, Any]) -> str:
    """Return the key under which metrics or a result have their speed."""
    return SAMPLES if SAMPLES in values else TOKENS


def median(steps: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the median speed of steps of one run; None without any."""
    found = [one[key_of(one)] for one in steps if one.get(key_of(one)) is not None]
    return float(statistics.median(found)) if found else None


def in_words(values: Mapping[str, Any], speed: float) -> str:
    """Return ``12,345 tokens/s``, or a number of samples with a decimal where they are few: ``8.5 samples/s``."""
    digits = 0 if speed >= 100 or key_of(values) == TOKENS else 1
    return f"{speed:,.{digits}f} {UNITS[key_of(values)]}"
