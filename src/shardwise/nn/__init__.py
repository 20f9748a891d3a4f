"""Layers in plain PyTorch, which train in any loop on one device; shardwise knows how to share them out."""

from .moe import MoE

__all__ = ["MoE"]
