"""The devices that a config is checked against."""

from __future__ import annotations

import os
from dataclasses import dataclass

MORE_RANKS = (
    "More ranks take more hosts (torchrun or srun), or a script whose ranks share a GPU (torchrun and "
    'connect(backend="gloo"))'
)
"""What somebody who wants more ranks than this machine has GPUs can do."""


@dataclass(frozen=True)
class Hardware:
    """``gpus`` is a hard limit of ranks where there are any; otherwise ``cores`` of the CPU, a soft one.

    ``world`` is the number of ranks that somebody else has already started (torchrun), ``local`` that of those on this
    host, or None.
    """

    cores: int
    gpus: int = 0
    world: int | None = None
    local: int | None = None

    @staticmethod
    def here() -> Hardware:
        """The cores this process may use, the GPUs torch sees, and torchrun's world if it started us."""
        from shardwise.backend import Backend

        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        here = Backend.here()
        gpus = here.count if here.asynchronous else 0
        started = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
        world, local = (started.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if local.isdigit() and cores * int(local) <= (os.cpu_count() or 1):
            local = "1"  # bound to cores of its own, as by srun
        return Hardware(
            cores, gpus, *(int(count) if count.isdigit() and int(count) > 0 else None for count in (world, local))
        )

    @property
    def devices(self) -> int:
        """Ranks to start if nobody says how many."""
        return self.world or self.gpus or self.cores
