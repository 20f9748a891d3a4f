"""What a model that was not captured writes to its buffers, found by trial: its graph is not there to be read.

The example batch runs whole and in two parts, in training mode but for BatchNorm, which normalises by 0 and 1 so that
rows are independent. A buffer gets the "same" value from each part as from the whole (a counter of steps); or the
changes by the parts add up to that by the whole as they are ("sum") or by their shares of the rows ("mean"). The
running statistics of BatchNorm are known ("norm"): ranks compute them together, and microbatches one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from shardwise.ops import collectives
from shardwise.ops.env import ROWS, Env

FITS = 1e-4  # relative to the largest change; the trial is in fp32 at least
Written = Literal["same", "sum", "mean", "norm"]
Fields = Mapping[str, Tensor]


def found_written(
    module: nn.Module, write: Callable[[Fields, int], Mapping[str, Tensor]], batch: Fields
) -> dict[str, Written | None]:
    """Return how the buffers of ``module`` are written, by name; None where nothing fits or the trial fails.

    ``write(fields, first)`` returns the values of all buffers after a forward of these rows, the first of which is row
    ``first`` of the batch. Buffers that a forward does not change count as "same"."""
    before = {name: value.detach() for name, value in module.named_buffers()}
    known = {
        f"{path}.{name}".lstrip("."): "norm"
        for path, one in module.named_modules()
        if isinstance(one, nn.modules.batchnorm._BatchNorm)
        for name in ("running_mean", "running_var")
    }
    rows = len(next(iter(batch.values())))
    if rows < 2:
        batch, rows = {k: torch.cat([v, v]) for k, v in batch.items()}, 2
    first = max(1, rows // 3)
    try:
        whole = write(batch, 0)
        parts = [
            write({k: v[:first] for k, v in batch.items()}, 0),
            write({k: v[first:] for k, v in batch.items()}, first),
        ]
    except Exception:  # the user's code may take no other number of rows
        return {name: known.get(name) for name in before}
    shares = (first / rows, 1 - first / rows)
    found: dict[str, Written | None] = {}
    for name, old in before.items():
        found[name] = known.get(name) or _fitting(old, whole[name], [part[name] for part in parts], shares)
    return found


def _fitting(old: Tensor, whole: Tensor, parts: list[Tensor], shares: tuple[float, float]) -> Written | None:
    wide = torch.promote_types(old.dtype, torch.float64) if old.dtype is not torch.bool else torch.int64
    start, goal, (one, other) = old.to(wide), whole.to(wide), (part.to(wide) for part in parts)
    near = FITS * float((goal - start).abs().max()) if goal.numel() else 0.0
    first, second = one - start, other - start

    def fits(value: Tensor) -> bool:
        return bool(((value - goal).abs() <= near).all())

    if fits(one) and fits(other):
        return "same"
    if fits(start + first + second):
        return "sum"
    if old.is_floating_point() and fits(start + shares[0] * first + shares[1] * second):
        return "mean"
    return None


def over_ranks(env: Env, kind: Written | None, old: Tensor, new: Tensor, name: str) -> Tensor:
    """Return the value of a buffer after a microbatch, given what this rank's rows have made of it: ranks' changes are
    added. Those of microbatches are added where the step keeps buffers."""
    if kind not in ("sum", "mean"):
        return new
    change = new - old
    if kind == "mean":
        change = change * (collectives.local_rows(env) / max(env.rows, 1))
    elif not collectives.local_rows(env):
        change = torch.zeros_like(change)
    return old + collectives.all_sum(env, change, (ROWS,), f"buffer {name}")
