"""Dynamic loss scaling works on device tensors: the host reads nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError
from shardwise.core.scale import ScaleChoice


class LossScale:
    """This is the loss scale of a run, by the rule of :class:`ScaleChoice`.

    It has three 0-d tensors on ``device``, which are only written in place: ``scale`` (fp32), ``good`` (int32, the
    steps since the scale last changed) and ``overflows`` (int32, the skipped steps in a row).
    """

    def __init__(self, choice: ScaleChoice, device: torch.device) -> None:
        self.choice = choice
        self.scale = torch.full((), choice.initial, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        self.overflows = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, bad: Tensor) -> None:
        """Update the scale after a step; ``bad`` (0-d, any dtype) is not 0 if its gradients were not finite.

        The scales are bit for bit those of :class:`torch.amp.GradScaler`: products are rounded once, from fp64 where
        the device has it, and growth beyond what fp32 can hold is left out.
        """
        bad = bad != 0
        good = self.good + 1
        due = good >= self.choice.interval
        wide = self.scale.to(Backend.of(self.scale.device).widest_float)
        lower, higher = (wide * self.choice.backoff).float(), (wide * self.choice.growth).float()
        grown = torch.where(due & torch.isfinite(higher), higher, self.scale)
        self.scale.copy_(torch.where(bad, lower, grown))
        self.good.copy_(torch.where(bad | due, 0, good))
        self.overflows.copy_(torch.where(bad, self.overflows + 1, 0))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the three tensors themselves, not copies, for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "overflows": self.overflows}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy in what :meth:`state_dict` gave.  Raises :class:`ShardwiseError` where names are missing or unknown."""
        own = self.state_dict()
        if set(own) != set(state):
            raise ShardwiseError(f"loss scale's state {sorted(state)}: expected {sorted(own)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
