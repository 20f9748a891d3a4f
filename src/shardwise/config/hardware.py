"""The devices that a config is checked against."""

from __future__ import annotations

import os
from dataclasses import dataclass

MORE_RANKS = (
    "More ranks take more hosts (torchrun or srun), or a script whose ranks share a GPU (torchrun and "
    'connect(backend="gloo"))'
)
"""The hint for users who want more ranks than this machine has GPUs."""


@dataclass(frozen=True)
class Hardware:
    """The devices of this machine: ``gpus`` is a hard limit of the number of ranks; without GPUs ``cores`` is a soft
    one.

    ``world`` is the number of ranks that torchrun has already started, and ``local`` the number of those on this host;
    both are None if torchrun did not start this process.
    """

    cores: int
    gpus: int = 0
    world: int | None = None
    local: int | None = None

    @staticmethod
    def here() -> Hardware:
        """Return the cores that this process may use, the GPUs that torch sees, and the ranks that torchrun started."""
        from shardwise.backend import Backend

        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        here = Backend.here()
        gpus = here.count if here.asynchronous else 0
        started = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
        world, local = (started.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if local.isdigit() and cores * int(local) <= (os.cpu_count() or 1):
            local = "1"  # this process is bound to cores of its own, as under srun
        return Hardware(
            cores, gpus, *(int(count) if count.isdigit() and int(count) > 0 else None for count in (world, local))
        )

    @property
    def devices(self) -> int:
        """The number of ranks to start if the config does not say it."""
        return self.world or self.gpus or self.cores
