"""What a model that was not captured writes to its buffers, found by trial: its graph is not there to be read.

The example batch runs whole and in two parts, in training mode but for BatchNorm, which normalises by 0 and 1 so that
rows are independent. A buffer gets the "same" value from each part as from the whole (a counter of steps); or the
changes by the parts add up to that by the whole as they are ("sum") or by their shares of the rows ("mean"). The
running statistics of BatchNorm are known ("norm"): ranks compute them together, and microbatches one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError
from shardwise.ops import collectives
from shardwise.ops.env import ROWS, Env
from shardwise.units.varied_batches import cut, first_part, rows_of

FITS = 1e-4  # relative to the largest change; the trial is in fp32 at least
AGREES = 1e-6  # relative to the sum of absolute values: ranks may round differently
Written = Literal["same", "sum", "mean", "norm"]
Fields = Mapping[str, Tensor]


def found_written(
    module: nn.Module,
    trials: Sequence[tuple[Callable[[Fields, int], Mapping[str, Tensor]], Fields]],
    training: bool = True,
) -> tuple[dict[str, Written | None], str]:
    """Return how the buffers of ``module`` are written, by name, None where nothing fits; and why a trial failed.

    A trial is a function ``write(fields, first)``, which returns the values of all buffers after a forward of these
    rows, the first of which is row ``first`` of the batch, and a batch. All trials have to agree; the first must run.
    Buffers that a forward does not change count as "same"."""
    before = {name: value.detach() for name, value in module.named_buffers()}
    known: dict[str, Written | None] = {
        f"{path}.{name}".lstrip("."): "norm"
        for path, one in module.named_modules()
        if training and isinstance(one, nn.modules.batchnorm._BatchNorm)
        for name in ("running_mean", "running_var")
    }
    fits = {name: {"same", "sum", "mean"} for name in before}
    for number, (write, batch) in enumerate(trials):
        first = first_part(batch)
        try:
            whole = write(batch, 0)
            parts = [
                write(some, start)
                for some, start in zip(cut(batch, (first, rows_of(batch) - first)), (0, first), strict=True)
            ]
        except Exception as error:  # the user's code may take no other number of rows
            if number:
                continue
            return {name: known.get(name) for name in before}, " ".join(str(error).split())
        share = first / rows_of(batch)
        for name, old in before.items():
            if all(bool(torch.isfinite(value).all()) for value in (whole[name], *(part[name] for part in parts))):
                fits[name] &= _fitting(old, whole[name], [part[name] for part in parts], (share, 1 - share))
    kinds: tuple[Written, ...] = ("same", "sum", "mean")
    found = {name: next((kind for kind in kinds if kind in left), None) for name, left in fits.items()}
    return {name: known.get(name) or kind for name, kind in found.items()}, ""


def _fitting(old: Tensor, whole: Tensor, parts: list[Tensor], shares: tuple[float, float]) -> set[str]:
    wide = torch.promote_types(old.dtype, torch.float64) if old.dtype is not torch.bool else torch.int64
    start, goal, (one, other) = old.to(whole.device, wide), whole.to(wide), (part.to(wide) for part in parts)
    near = FITS * float((goal - start).abs().max()) if goal.numel() else 0.0
    first, second = one - start, other - start

    def fits(value: Tensor) -> bool:
        return bool(((value - goal).abs() <= near).all())

    found = set()
    if fits(one) and fits(other):
        found.add("same")
    if fits(start + first + second):
        found.add("sum")
    if old.is_floating_point() and fits(start + shares[0] * first + shares[1] * second):
        found.add("mean")
    return found


class Agreement:
    """Holds ranks, and the microbatches of a batch, to one value of each buffer that a trial found the same for all.

    A trial sees the first forward; a later one may write what depends on its rows after all. Sums that tell values
    apart are compared, and every rank sees those of all: all of them raise, or none."""

    def __init__(self) -> None:
        # What the microbatch before has made of them; the host has read it where ranks were compared.
        self.before: Tensor | list[list[float]] | None = None

    def check(self, env: Env, buffers: Mapping[str, Tensor]) -> None:
        """Raise :class:`ShardwiseError` on all ranks where one of ``buffers`` is not the same."""
        own = torch.stack([told(value) for value in buffers.values()])
        before, first = self.before, not env.offset + (env.window or (0, 0))[0]  # the first microbatch of a batch
        if env.parts == 1 and first:
            self.before = own
            return
        every = (collectives.gathered(env, own, (ROWS,), "buffers") if env.parts > 1 else own[None]).tolist()
        self.before = every[0]
        if before is not None and not first:
            every.append(before.tolist() if isinstance(before, Tensor) else before)
        for name, values in zip(buffers, zip(*every, strict=True), strict=True):
            sums, sizes = zip(*values, strict=True)
            if max(sums) - min(sums) > AGREES * max(sizes):
                raise ShardwiseError(
                    f"model: forward writes to the buffer {name} what depends on a rank's or microbatch's own rows, "
                    "which it did not do in the trial with the example batch; legal: an example batch with which it "
                    "does, or dp = 1 and microbatches = 1"
                )


def told(value: Tensor) -> Tensor:
    """Return a weighted sum of the elements of a tensor, and what it would be of their absolute values."""
    wide = Backend.of(value.device).widest_float
    parts = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    flat = torch.nan_to_num(parts.reshape(-1).to(wide), nan=0.0, posinf=2.0, neginf=-3.0)  # sums stay finite
    weights = torch.linspace(1, 2, max(flat.numel(), 1), dtype=wide, device=flat.device)[: flat.numel()]
    return torch.stack([flat @ weights, flat.abs() @ weights])


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
