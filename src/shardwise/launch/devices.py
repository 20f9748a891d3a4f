"""Check that the devices can be trained on: by torch and the drivers before ranks start, and between ranks once they
are connected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import psutil
import torch

from shardwise import drivers
from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.estimate.devices import here
from shardwise.report.tables import plural, size
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import check_possible, gather_texts

if TYPE_CHECKING:
    from .forecast import Forecast

SHOWN = 3  # the most processes that a message names
NAME = 80  # the most characters of a device's name
# A card counts as shared if more than this share of it is taken: a driver keeps some memory for itself, and this
# process's context may be larger than what is assumed.
OWN_SHARE = 0.05

# ---- before ranks start ----------------------------------------------------------------------------------------------


def check_torch(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning if this machine has a GPU that this torch is not built for.

    Raise :class:`ConfigError` if torch is built for the GPU but cannot use it.  The drivers are not asked where torch
    has a device, or ``environment`` hides all devices.
    """
    built = Backend.built()
    if Backend.here().asynchronous:
        return []
    driver = drivers.found(environment)
    if driver is None:
        return []
    if built.maker == driver.maker:
        raise ConfigError(_unusable(built, driver, environment.get(driver.hides)))
    what = "CPUs" if not built.asynchronous else f"devices of {built.maker}"
    build = driver.build(torch.__version__)
    if build is not None:
        mend = f"to use it, run `{drivers.install(torch.__version__, build)}`"
    else:
        mend = (
            f"{_update(driver)}, which is too old for it"
            if driver.serves(torch.__version__)
            else driver.unserved(torch.__version__)
        )
    return [f"this machine has {driver}, but torch {torch.__version__} is a build for {what}, so CPUs compute; {mend}"]


def _unusable(built: Backend, driver: drivers.Driver, chosen: str | None) -> str:
    """Say why torch has no device although it is built for the driver's cards, and how to repair that."""
    version, needs, build = torch.__version__, built.toolkit, driver.build(torch.__version__)
    instead = f"or set {driver.hidden} to train on CPUs"
    if needs is not None and driver.runs is not None and driver.runs[0] < needs[0]:
        mends = [
            _update(driver, needs),
            *([f"or run `{drivers.install(version, build)}`"] if build is not None else []),
        ]
        return (
            f"torch {version} needs CUDA {drivers.in_words(needs)}, but the driver{_version(driver)} of {driver} "
            "supports up to CUDA "
            f"{drivers.in_words(driver.runs)}; {', '.join(mends)}, {instead}"
        )
    said = built.objection() or "torch finds no device"
    visible = "" if chosen is None else f" ({driver.hides}={chosen})"
    return (
        f"torch {version} is built for {driver}, but cannot use it{visible}: {said}; mend the driver{_version(driver)} "
        f"or {driver.hides}, "
        f"{instead}"
    )


def _update(driver: drivers.Driver, needs: tuple[int, int] | None = None) -> str:
    return f"update the driver{_version(driver)}" + (
        f" to one for CUDA {drivers.in_words(needs)}" if needs is not None else ""
    )


def _version(driver: drivers.Driver) -> str:
    """Return `` (570.86)``, or an empty string if the version is not known."""
    return f" ({driver.version})" if driver.version is not None else ""


def check_kernels(local: int) -> None:
    """Raise :class:`ConfigError` if this torch has no kernels for one of this machine's first ``local`` devices."""
    backend = Backend.here()
    lacking = backend.without_kernels(local)
    if not lacking:
        return
    name, capability = lacking[0]
    card = drivers.Driver(backend.maker, (name,), capabilities=(capability,))
    build = card.build(torch.__version__)
    mend = (
        f"run `{drivers.install(torch.__version__, build)}`, or" if build is not None else "install a build that has,"
    )
    raise ConfigError(
        f"torch {torch.__version__} has no kernels for {name}, whose compute capability is "
        f"{drivers.in_words(capability)}: it has those of {backend.kernels}; {mend} hide the card with {card.hides}"
    )


def check_ranks(ranks: int, local: int) -> None:
    """Raise :class:`ConfigError` if ``ranks`` ranks, ``local`` of them on this host, cannot compute or communicate on
    this host's devices.
    """
    backend = Backend.here()
    check_kernels(local)
    if ranks == 1 or not backend.asynchronous:
        return
    if backend.transport is None:
        wrong = f"torch has nothing by which {ranks} ranks on devices of type {backend.type} communicate"
        raise ConfigError.on("train.devices", wrong, "1")
    check_possible(backend, backend.transport, ranks, local)


# ---- between ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """This describes a rank's device.  ``free`` is the part of its ``total`` bytes that the rank can have, including
    what the rank has already taken.
    """

    name: str
    total: int
    free: int

    @staticmethod
    def of(device: torch.device) -> Card:
        """Return the device as its driver and torch describe it now."""
        found = here(device)
        return Card(found.name[:NAME], found.memory, found.budget)

    @property
    def shared(self) -> bool:
        """Return whether other processes hold a part of the device's memory."""
        return self.total - self.free > OWN_SHARE * self.total


def cards_of(comm: Communicator) -> list[Card]:
    """Return the devices of all ranks, or none where CPUs compute; all ranks call it together."""
    if not Backend.of(comm.device).asynchronous:
        return []
    return [
        Card(**json.loads(one))
        for one in gather_texts(comm, json.dumps(asdict(Card.of(comm.device))), "the devices of all ranks")
    ]


def mixed(cards: Sequence[Card]) -> str | None:
    """Return a note that says which rank has which card if the cards are of several kinds, else None."""
    kinds = [(one.name, size(one.total)) for one in cards]
    if len(set(kinds)) < 2:
        return None
    each = [f"{name} ({total}) on {_ranks([rank for rank, one in enumerate(kinds) if one == (name, total)])}"
            for name, total in dict.fromkeys(kinds)]  # fmt: skip
    least = size(min(one.total for one in cards))
    return (
        f"devices: {', '.join(each)}: the slowest sets the pace of every step, and the plan is made for the least "
        f"memory, {least}"
    )


def check_free(comm: Communicator, cards: Sequence[Card], found: Forecast) -> None:
    """Raise :class:`ConfigError` on all ranks if other processes leave too little of a card for the predicted peak."""
    # A user who sets train.memory_gib has already subtracted what is needed beside tensors.
    beside = sum(found.beside.values()) if found.config.train.memory_gib is None else 0
    needed = found.worst.peak_bytes + beside
    short = [rank for rank, one in enumerate(cards) if one.shared and one.free < needed]
    if not short:
        return
    mine, held = cards[comm.rank], ""
    if comm.rank in short:
        held = occupied(mine.free, mine.total, mine.name, uuid=Backend.of(comm.device).uuid(comm.device), own=family())
    first = gather_texts(comm, held, "who holds the memory of the devices")[short[0]]
    others = f" (and {plural(len(short) - 1, 'other rank')} likewise)" if len(short) > 1 else ""
    # The advice has to go by the free memory alone.
    bounded = replace(found, config=replace(found.config, train=replace(found.config.train, memory_gib=None)))
    raise ConfigError(
        f"memory: rank {short[0]} needs {size(needed)}{f', {size(beside)} of it beside tensors' if beside else ''}, "
        f"but only {first}{others}; "
        f"{_free_it(Backend.of(comm.device))}, or change the plan: "
        f"{bounded.advice(bounded.nearest())}"
    )


@contextmanager
def explain_out_of_memory(device: torch.device) -> Iterator[None]:
    """Raise :class:`ConfigError` if the body of the ``with``, the first use of the device, runs out of its memory."""
    try:
        yield
    except RuntimeError as error:  # the base class of torch.OutOfMemoryError and torch.AcceleratorError
        if "out of memory" not in str(error).lower():
            raise
        backend = Backend.of(device)
        try:
            held = drivers.holders(backend.uuid(device), family())
        except RuntimeError:  # a device without free memory may not answer
            held = []
        raise ConfigError(
            f"memory: device {device} has no room even to start: "
            f"{_named(held) or 'the driver does not say who holds it'}; "
            f"{_free_it(backend)}"
        ) from error


def _free_it(backend: Backend) -> str:
    return f"end what holds it, or let {drivers.CHOOSES.get(backend.maker, 'the environment')} choose other cards"


def _named(held: Sequence[drivers.Holder]) -> str:
    """Return ``process 4242 (python3) holds 70.0 GiB``, for the first processes of ``held``."""
    named = [
        f"process {one.pid} ({one.name}) holds {size(one.memory) if one.memory else 'some'}" for one in held[:SHOWN]
    ]
    if len(held) > SHOWN:
        named.append(f"{len(held) - SHOWN} more hold the rest")
    return ", ".join(named)


def occupied(free: int, total: int, device: str, *, uuid: str = "", own: Collection[int] = ()) -> str:
    """Return ``3.1 GiB of the 79.1 GiB of NVIDIA H100 are free: process 4242 (python3) holds 70.0 GiB``.

    ``free`` and ``total`` are bytes.  ``own`` are the ids of this run's processes, which are not named.
    """
    words = f"{size(free)} of the {size(total)} of {device} are free"
    named = _named(drivers.holders(uuid, own)) if uuid else ""
    return f"{words}: {named or 'others hold the rest, and the driver does not say who'}"


def family() -> set[int]:
    """Return the ids of this run's processes on this host: the parent of this process and all its descendants."""
    try:
        parent = psutil.Process().parent()
        return {os.getpid()} | (
            {parent.pid, *(one.pid for one in parent.children(recursive=True))} if parent is not None else set()
        )
    except psutil.Error:
        return {os.getpid()}


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks 0-3, 6``, or ``rank 6``, for ascending numbers."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda one: one[1] - one[0])]
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
