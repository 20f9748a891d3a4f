"""How many tokens each expert got in a step: ranks and microbatches have counted their own, and hosts add them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.core.fields import LOAD
from shardwise.data.loader import AXES
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import StepResult
from shardwise.runtime.communicator import Communicator, host_gather, host_sum
from shardwise.units.trace import Trace


class ExpertLoad(NamedTuple):
    """The choices that fell on each expert of the layer ``name`` in a step, and those that an expert had no place
    for."""

    name: str
    load: tuple[int, ...]
    dropped: int

    @property
    def entropy(self) -> float:
        """Return the entropy of the load as a share of its largest: 1 where all experts got as many, 0 for one of
        them."""
        total = sum(self.load)
        shares = [n / total for n in self.load if n]
        most = math.log(len(self.load))
        return -sum(one * math.log(one) for one in shares) / most if most and total else 1.0

    @property
    def highest(self) -> float:
        """Return the largest load in means: 1 where all experts got as many."""
        total = sum(self.load)
        return max(self.load) * len(self.load) / total if total else 1.0

    @property
    def share_dropped(self) -> float:
        """Return the share of all choices that were dropped."""
        return self.dropped / max(sum(self.load) + self.dropped, 1)


def layers_of_experts(trace: Trace) -> list[str]:
    """Return the names of the layers whose loads a trace keeps, which was made with ``wanted = "load"``."""
    return [name.removeprefix(LOAD) for name in trace.kept if name.startswith(LOAD)]


def expert_loads(result: StepResult, comm: Communicator) -> list[ExpertLoad]:
    """Return what a step of a model with ``wanted = "load"`` has counted, by layer; all ranks call it together, and
    their hosts wait for the step."""
    kept = {name.removeprefix(LOAD): one for name, one in result.kept.items() if name.startswith(LOAD)}
    first = comm.mesh.index(comm.rank, comm.mesh.other_axes((*AXES, PIPELINE))) == 0  # the others have counted the same
    index = comm.mesh.index(comm.rank, AXES)
    mine: list[Any] = []
    for one in kept.values():
        counts = [part for part in one.parts if part is not None]
        own = counts and first and (one.placement == "P" or index == 0)
        mine.append(torch.stack(counts).sum(0).cpu() if own else None)
    sizes = torch.tensor([0 if one is None else len(one) for one in mine])
    return _summed(list(kept), mine, sizes, comm)


def _summed(names: Sequence[str], mine: Sequence[Any], sizes: torch.Tensor, comm: Communicator) -> list[ExpertLoad]:
    """Add up what ranks have counted; a stage of a pipeline does not know the numbers of experts of other stages."""
    ranks = comm.mesh.size
    if ranks > 1:
        sizes = host_gather(comm, sizes, "the numbers of experts").amax(0)
    rows = torch.zeros(len(names), int(sizes.max()), dtype=torch.int64)
    for row, one in zip(rows, mine, strict=True):
        if one is not None:
            row[: len(one)] = one
    if ranks > 1:
        rows = host_sum(comm, rows, "the load of experts")
    found = [row[:size].tolist() for row, size in zip(rows, sizes.tolist(), strict=True)]
    return [ExpertLoad(name, tuple(load), dropped) for name, (*load, dropped) in zip(names, found, strict=True)]


def in_metrics(found: Sequence[ExpertLoad]) -> dict[str, Any]:
    """Return the numbers of a step's loads for its line of metrics: those of all layers, and each layer's shares."""
    number = max(len(found), 1)
    return {
        "expert_entropy": sum(one.entropy for one in found) / number,
        "expert_load_highest": max((one.highest for one in found), default=1.0),
        "expert_dropped": sum(one.share_dropped for one in found) / number,
        "expert_load": {one.name: list(one.load) for one in found},
    }


__all__ = ["ExpertLoad", "expert_loads", "in_metrics", "layers_of_experts"]
