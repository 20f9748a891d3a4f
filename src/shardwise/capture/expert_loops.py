"""Loops over experts, as transformers has them: in Python, over the experts that some token has chosen.

No graph has such a loop.  transformers computes the same experts by grouped products too, and a config says which way
is taken (``experts_implementation``).
"""

from __future__ import annotations

from torch import nn

NOTE = "its loops over experts are computed as grouped products, which transformers has for the same experts"


def without_loops(module: nn.Module) -> bool:
    """Let a model, whose configs are changed, compute experts by grouped products where it has loops over them; return
    whether there are any."""
    configs = [one.config for one in module.modules() if hasattr(one, "_is_expert_parallel") and hasattr(one, "config")]
    looped = [config for config in configs if getattr(config, "_experts_implementation", None) == "eager"]
    for config in looped:
        config._experts_implementation = "grouped_mm"
    return bool(looped)


__all__ = ["NOTE", "without_loops"]
