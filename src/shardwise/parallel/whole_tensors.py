"""Optimizers that need whole tensors, such as Muon: each parameter is put together on one of the ranks that have parts
of it, which takes its step and sends the parts back.

In the table of ``parallel/data.py`` nothing changes: gradients and parameters lie as they do for any optimizer.  Only
STEP is different.  Ranks that hold different parts of a bucket, over ``dp`` under ZeRO and over the axes of tensor
parallelism, send these to the parameter's owner and get them back (``runtime/whole_tensors.py``); its state is there,
whole.  Where every rank has a parameter whole, each updates it, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.data_options import ParameterRule
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.data import SHARDS


def whole_tensors_for(plan: Plan, optimizer: OptimizerChoice) -> Plan:
    """Return ``plan`` with steps by whole tensors if the optimizer needs these.

    Raises :class:`ConfigError` where the plan does not allow it."""
    return plan.replace(updates="tensors") if optimizer.any_whole else plan


def parted_over(mesh: Mesh, rule: ParameterRule, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes over which ranks hold different parts of a bucket, which ``axes`` shard."""
    over = (*((SHARDS,) if rule.state != "R" else ()), *axes)
    return tuple(axis for axis in over if mesh.axis_size(axis) > 1)
