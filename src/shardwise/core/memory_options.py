"""This module has the options of a plan that spend time to save device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError
from shardwise.core.options import check_options, word

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "activations", "all"]

LEAST_OFFLOAD = 1 << 16  # bytes: a smaller tensor is not worth a transfer


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """These options say what is recomputed and what is kept on the host.

    ``recompute`` says whether units run forward again during backward; under "selective" their matrix products,
    convolutions and attention are kept instead.  ``offload = "optimizer"`` keeps master weights and optimizer state on
    the host, which also runs the optimizer step (ZeRO-Offload, arXiv 2101.06840); "activations" moves to the host what
    autograd saves between forward and backward, which only accelerators can do; "all" does both.
    """

    recompute: Recompute = word("none", get_args(Recompute))
    offload: Offload = word("none", get_args(Offload))

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether master weights and optimizer state are on the host."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Return whether the tensors that autograd saves are on the host until backward."""
        return self.offload in ("activations", "all")

    def check_device(self, kind: str) -> None:
        """Raise :class:`ConfigError` if devices of this ``kind``, "cpu" or "gpu", cannot offload as asked."""
        if self.offloads_activations and kind == "cpu":
            wrong = f'"{self.offload}" is not legal on a CPU, whose memory is the host\'s'
            raise ConfigError.on("offload", wrong, '"none", "optimizer".')
