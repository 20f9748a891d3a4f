"""Tensors that a loop keeps from before ``distribute()``, and that have the memory of a model's own: ``weight.data``, a
view, what ``state_dict()`` returns.  Nothing tells when the loop reads one or writes to it.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.capture.running import at_line
from shardwise.graph.torch_private import has_storage, memory_uses, storage_key, without_torch_functions
from shardwise.runtime.communicator import Communicator, host_sum
from shardwise.train.awaited import tensors_of


def with_other_names(module: nn.Module, ours: Iterable[Tensor]) -> list[str]:
    """Return the names of the parameters and buffers of a module whose memory other tensors have, ``ours`` apart."""
    with without_torch_functions():
        names = {name: one for name, one in tensors_of(module) if has_storage(one)}
        known = {id(one): storage_key(one) for one in (*names.values(), *ours) if has_storage(one)}
        number = Counter(known.values())

        def found() -> list[str]:
            return [name for name, one in names.items() if memory_uses(one) > number[known[id(one)]]]

        if found():
            gc.collect()  # some may be garbage
        return found()


def agreed(names: list[str], comm: Communicator) -> bool:
    """Warn of names that have others; return whether there are such on any rank, which all ranks ask together."""
    if names:
        what = f"a tensor (.data, a view, a state_dict()) has had the memory of {names[0]} since before the first step"
        legal = "a tensor that is taken after the first step, of model.parameters() or model.state_dict()"
        warnings.warn(
            f"distribute(){at_line()}: {what}; it is brought up to date after each step, which takes time; "
            f"legal: {legal}", stacklevel=2,
        )  # fmt: skip
    return bool(host_sum(comm, torch.tensor([len(names)]), "the comparison of other names"))
