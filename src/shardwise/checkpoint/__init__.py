"""Any number of ranks write a checkpoint while training goes on, and any other number reads it, without unpickling."""

from __future__ import annotations

from .atoms import Gather, Piece, alone
from .export import export
from .reader import Checkpoint, checkpoints, latest
from .weights import Weights, fit_weights, read_weights
from .writer import CheckpointWriter, Saved

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Gather",
    "Piece",
    "Saved",
    "Weights",
    "alone",
    "checkpoints",
    "export",
    "fit_weights",
    "latest",
    "read_weights",
]
