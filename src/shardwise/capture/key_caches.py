"""Caches of keys and values, as models of transformers make them in each forward: for a later one, that generates.

No step of training reads them, but a function that is given one changes it, and so cannot run as it is written.
"""

from __future__ import annotations

from torch import nn

NOTE = "its caches of keys and values, which no step reads, are not made"


def without_caches(module: nn.Module) -> bool:
    """Let a model, whose configs are changed, make no caches; return whether it has made any."""
    configs = [getattr(one, "config", None) for one in module.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    return bool(caching)


__all__ = ["NOTE", "without_caches"]
