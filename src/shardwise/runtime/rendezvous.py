"""The processes of a run find each other in the key-value store that torchrun's environment variables name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.core.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """This has the process's rank, the number of processes, and a store that all of them can reach."""

    store: Store
    rank: int
    size: int


def rendezvous(purpose: str, timeout: float) -> Rendezvous:
    """Meet the other processes started by torchrun, or by hand with the same :data:`VARIABLES`.

    Keys are private to ``purpose``, to this attempt and to this meeting: those from before a restart, or from an
    earlier meeting of the ranks, are not seen.  Every read from the store takes at most ``timeout`` seconds.  Raises
    :class:`ConfigError` where a variable is missing or not a number.
    """
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    for name, value in values.items():
        if not value or (name != "MASTER_ADDR" and not value.isdigit()):
            raise ConfigError(
                f"environment variable {name}: {value!r} is not legal; start with torchrun, which sets it."
            )
    rank, size = int(values["RANK"]), int(values["WORLD_SIZE"])
    # torchrun's agent hosts the store itself and says so; otherwise it lives in rank 0.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        values["MASTER_ADDR"],
        int(values["MASTER_PORT"]),
        world_size=size,
        is_master=rank == 0 and not hosted,
        timeout=timedelta(seconds=timeout),
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = f"shardwise/{attempt}/{purpose}"
    meeting = store.add(f"{place}/meetings of {rank}", 1)  # all ranks meet equally often
    return Rendezvous(PrefixStore(f"{place}/{meeting}", store), rank, size)
