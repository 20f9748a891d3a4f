"""The options of a plan that spend time to save memory on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError
from shardwise.core.options import check_options, word

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "activations", "all"]


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What is computed again, and what is kept on the host.

    ``recompute`` says whether units are run forward again in backward, under "selective" without their matrix products,
    convolutions and attention.  ``offload = "optimizer"`` keeps master weights and optimizer state on the host, which
    also takes the step (ZeRO-Offload, arXiv 2101.06840); "activations" keeps there what autograd keeps between forward
    and backward, which only accelerators can do; "all" does both.
    """

    recompute: Recompute = word("none", get_args(Recompute))
    offload: Offload = word("none", get_args(Offload))

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and optimizer state are on the host."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether what autograd keeps goes to the host until backward."""
        return self.offload in ("activations", "all")

    def check_device(self, kind: str) -> None:
        """:class:`ConfigError` if devices of this ``kind``, "cpu" or "gpu", cannot keep on the host what is asked."""
        if self.offloads_activations and kind == "cpu":
            wrong = f'"{self.offload}" is not legal on a CPU, whose memory is the host\'s'
            raise ConfigError.on("offload", wrong, '"none", "optimizer".')
