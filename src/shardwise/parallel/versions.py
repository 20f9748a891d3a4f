"""Compute which version of the weights a microbatch uses under an asynchronous schedule, by pure functions.

Version v is the weights after v updates; version 0 is the initial ones.  Microbatches are counted from 0 over the whole
run.  A microbatch's forward and backward on a stage use the same version.
"""

from __future__ import annotations


def stashed_version(microbatch: int, stage: int, stages: int, vertical_sync: bool = False) -> int:
    """Return the version of PipeDream with weight stashing and one update per microbatch: stage s of n uses weights
    that are n - s - 1 updates old.

    Under ``vertical_sync`` all stages use the version that stage 0 uses (Narayanan et al., arXiv 1806.03377, section
    3.3).
    """
    return max(0, microbatch - (stages - 1 - (0 if vertical_sync else stage)))


def double_buffered_version(microbatch: int, microbatches: int) -> int:
    """Return the version of PipeDream-2BW, with one update per batch of ``microbatches``: batch t uses the weights
    after t - 1 updates, on every stage, so two versions are alive (Narayanan et al., arXiv 2006.09503, section 3.1).
    """
    return max(0, microbatch // microbatches - 1)
