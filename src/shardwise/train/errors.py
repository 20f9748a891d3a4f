"""The errors of a step: its numbers are not finite."""

from __future__ import annotations

from shardwise.core.errors import ShardwiseError


class NonFiniteError(ShardwiseError):
    """A step's loss or gradients were not finite; weights and state are as before it, unless stages update alone."""

    cause = "non-finite"

    def __init__(self, step: int, unit: str, what: str, alone: bool = False) -> None:
        self.step, self.unit, self.what = step, unit, what
        weights = (
            "other stages have gone on: go back to a checkpoint" if alone else "the weights are as before this step"
        )
        super().__init__(f"step {step}: {what} not finite, first in unit {unit}; {weights}")


class LossScaleError(ShardwiseError):
    """The gradients of step after step overflow in fp16, whatever the loss scale; weights and state are as before."""

    cause = "overflow"

    def __init__(self, step: int, steps: int, scale: float, unit: str, what: str) -> None:
        self.step, self.steps, self.scale, self.unit, self.what = step, steps, scale, unit, what
        super().__init__(
            f"step {step}: gradients have overflowed in fp16 for {steps} steps in a row, the loss scale is down to "
            f"{scale:g}; first not "
            f"finite is {what} in unit {unit}; the weights are as before these steps. It is not the scale: lower the "
            "learning rate, "
            'look at the data and at this unit, or use precision = "bf16", which has the range of fp32'
        )
