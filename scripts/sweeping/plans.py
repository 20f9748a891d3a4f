"""The plans of the sweep: each kind of parallelism alone, and one product of three."""

from __future__ import annotations

from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

ALONE = Plan.of(Mesh(()), precision="fp64")
"""One device: what is captured under it serves all plans."""


def plans() -> dict[str, Plan]:
    """Return the plans by their names in results."""
    one, two = Plan.of(precision="fp64"), Plan.of(precision="fp64", microbatches=2)
    return {
        "dp": data_parallel(two, 2),
        "zero3": data_parallel(one, 2, zero=3),
        "pp": pipeline(two, 2, "1f1b"),
        "tp": tensor_parallel(one, 2, "1d"),
        "tp-sp": tensor_parallel(one, 2, "1d-sp"),
        "dp-pp-tp": pipeline(data_parallel(tensor_parallel(two, 2, "1d"), 2), 2, "1f1b"),
    }
