"""Local training: islands of ranks train models of their own, each on its part of the batch, and meet every so many
steps (local SGD, DiLoCo, Streaming DiLoCo).

Inside an island nothing differs from a run of its own: it shards, pipelines and sums as the rest of the plan says, and
its loss is the mean over its own rows or targets.  An outer step is a few instructions after the update: the difference
to where the island was at the last outer step, its sum over islands, and the outer optimizer's step
(``lower/outer.py``).
"""

from __future__ import annotations

from shardwise.core.errors import ConfigError, check_count
from shardwise.core.layout import shard_range
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan


def local_training(
    plan: Plan, islands: int, steps: int, *, fragments: int = 1, mix: float = 0.5, outer_lr: float = 0.7,
    outer_momentum: float = 0.9
) -> Plan:  # fmt: skip
    """Return ``plan`` on each of ``islands`` groups of ranks, which meet every ``steps`` steps as
    :class:`~shardwise.core.local_options.LocalOptions` says.

    The axis is the outermost, as its ranks communicate least.
    """
    check_count("islands", islands)
    others = tuple(axis for axis in plan.mesh.axes if axis.name != ISLANDS)
    own = (Axis(ISLANDS, islands),) if islands > 1 else ()
    return plan.replace(
        mesh=Mesh((*own, *others)), local_steps=steps, local_fragments=fragments, local_mix=mix, outer_lr=outer_lr,
        outer_momentum=outer_momentum,
    )  # fmt: skip


def refuse_islands(plan: Plan, who: str) -> None:
    """Raise :class:`ConfigError` if the plan has islands, whose parts of a batch ``who`` does not know how to make."""
    if plan.local.steps:
        wrong = f"{plan.local.steps} is not legal under {who}, which has one batch for all ranks"
        raise ConfigError.on("local_steps", wrong, "0, or Trainer with its loader")


def island_rows(mesh: Mesh, rank: int, rows: int) -> tuple[int, int]:
    """Return (start, stop): which of the ``rows`` rows of a batch the island of ``rank`` trains on."""
    return shard_range(rows, mesh.axis_size(ISLANDS), mesh.index(rank, ISLANDS))


def most_rows(mesh: Mesh, rows: int) -> int:
    """Return the most rows that an island has of a batch of ``rows`` rows."""
    return -(-rows // mesh.axis_size(ISLANDS))
