"""Memory is predicted for devices with a name and for the one of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from shardwise.backend import Backend, Kind
from shardwise.core.devices import NAMED, DeviceModel, model_of
from shardwise.core.errors import ConfigError, did_you_mean

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Reserve:
    """The bytes of a GPU that a process takes beside its tensors; ``pair`` and ``group`` are for a communicator of two
    ranks and of more, and ``fragmentation`` is a fraction of what the allocator gets.

    A context with the kernels that a step loads takes 702 to 726 MiB on an H200 (torch 2.11, CUDA 13; docs/gpu.md).
    Others have measured the rest on a few cards: cuBLAS and cuBLASLt take 32 MiB each on a Hopper
    (torch's defaults); a communicator of NCCL takes 544 MB between two A100 and 688 MB among more (NCCL, issue 964).
    That 3 % are lost between blocks of an allocator with expandable segments is an estimate.
    """

    context: int = 736 * MIB
    workspaces: int = 64 * MIB
    pair: int = 544_000_000
    group: int = 688_000_000
    fragmentation: float = 0.03

    def beside(self, budget: int, communicators: Iterable[int]) -> dict[str, int]:
        """Return the bytes of ``budget`` that are not for tensors, by what takes them; ``communicators`` has the number
        of ranks of each communicator that the process is in."""
        sizes = [self.pair if ranks == 2 else self.group for ranks in communicators]
        found = {"context": self.context, "workspaces": self.workspaces, "communicators": sum(sizes)}
        return {**found, "fragmentation": int(max(budget - sum(found.values()), 0) * self.fragmentation)}

    def device(self, tensors: int, beside: Mapping[str, int]) -> int:
        """Return the bytes of the smallest device for ``tensors`` bytes of tensors; ``beside`` comes from
        :meth:`beside`, for any budget."""
        fixed = sum(n for what, n in beside.items() if what != "fragmentation")
        return fixed + math.ceil(tensors / (1 - self.fragmentation))


@dataclass(frozen=True)
class Device:
    """A device of ``memory`` bytes, of which one rank may take ``budget``: what others have not taken.

    On a GPU the budget is for tensors and for what ``reserve`` says; without a reserve it is for tensors alone.
    """

    name: str
    kind: Kind
    memory: int
    budget: int
    reserve: Reserve | None = None

    @property
    def model(self) -> DeviceModel | None:
        """What is known of the speed of a GPU; None if nothing is, and for CPUs."""
        return model_of(self.name) if self.kind == "gpu" else None

    @property
    def taken(self) -> int:
        """The bytes of a GPU that other processes have; 0 without a reserve, where the budget is a rank's share."""
        return self.memory - self.budget if self.reserve is not None else 0

    def beside(self, communicators: Iterable[int]) -> dict[str, int]:
        """Return the bytes of the budget that are not for tensors, as :meth:`Reserve.beside` does."""
        return {} if self.reserve is None else self.reserve.beside(self.budget, communicators)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; :meth:`from_dict` reads them back unchanged."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Device:
        """Read what :meth:`to_dict` returned, also before there was a reserve."""
        reserve = values.get("reserve")
        return Device(**{**values, "reserve": None if reserve is None else Reserve(**reserve)})


def named(name: str) -> Device:
    """Return the device that ``name`` says: one of :data:`~shardwise.core.devices.NAMED`, ``cpu`` (this machine's, for
    one rank), or either with ``=GiB`` of memory; raise :class:`ConfigError` for any other."""
    plain, equals, amount = name.partition("=")
    known = {one.lower(): one for one in (*NAMED, "cpu")}
    found = known.get(plain.lower())
    if found is None:
        sizes = [one for one, model in NAMED.items() if model.memory is not None]
        raise ConfigError(
            f"--device {name}: legal: {', '.join(sizes)}, cpu, or with a number of GiB any of these and "
            f"{', '.join(f'{one}=…' for one in NAMED if one not in sizes)}, such as "
            f"cpu=64.{did_you_mean(plain, known.values())}"
        )
    if equals:
        memory = _bytes(found, name, amount)
        return Device(found, "cpu", memory, memory) if found == "cpu" else _gpu(found, memory)
    if found == "cpu":
        return _cpu(1)
    total = NAMED[found].memory
    if total is None:
        wrong = "how much memory its driver reports is not known"
        raise ConfigError.on(f"--device {name}", wrong, f"with a number of GiB, such as {found}=80")
    return _gpu(found, round(total * GIB))


def _bytes(found: str, name: str, amount: str) -> int:
    try:
        memory = round(float(amount) * GIB)
    except (ValueError, OverflowError):
        memory = 0
    if memory <= 0:
        raise ConfigError(f"--device {name}: legal: a number of GiB above 0 after the =, such as {found}=64")
    return memory


def here(device: torch.device | None = None, ranks: int = 1) -> Device:
    """Return the device of this machine that a rank trains on, a GPU if any; ``ranks`` share a CPU's memory."""
    device = device or Backend.here().device()
    backend = Backend.of(device)
    if not backend.asynchronous:
        return _cpu(ranks)
    free, total = backend.free_and_total(device)  # free is without this process's own context and tensors
    found = _gpu(backend.name(device), total)
    own = backend.reserved(device) + Reserve().context
    return replace(found, budget=min(total, free + own))


def _gpu(name: str, memory: int) -> Device:
    return Device(name, "gpu", memory, memory, Reserve())


def _cpu(ranks: int) -> Device:
    """Return the CPU with the memory that is free now, as other processes have the rest."""
    memory = int(psutil.virtual_memory().available)
    return Device("cpu", "cpu", memory, memory // ranks)
