"""Adapters of low rank (LoRA) among a model's tensors: their names in a file of peft, and what they add to the weights.

A layer with an adapter has its own weight in ``base_layer``, and beside it ``lora_A`` (rank, in) and ``lora_B`` (out,
rank). What the layer computes is that of the weight W + scale · B · A.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE, A, B = ".base_layer.", ".lora_A.default.", ".lora_B.default."


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: ``config`` is the content of peft's adapter_config.json, ``scale`` multiplies what they
    add, and ``transposed`` are the layers whose weight is (in, out), such as those of GPT-2."""

    config: Mapping[str, Any]
    scale: float
    transposed: tuple[str, ...] = ()

    @staticmethod
    def of_meta(meta: Mapping[str, Any]) -> Adapters | None:
        """Return the adapters that the facts of a checkpoint describe; None if its model has none."""
        model = meta.get("model")
        found = model.get("lora") if isinstance(model, Mapping) else None
        return None if found is None else Adapters(found["config"], found["scale"], tuple(found["transposed"]))

    def to_meta(self) -> dict[str, Any]:
        """Return the facts for a checkpoint, fit for JSON."""
        return {"config": dict(self.config), "scale": self.scale, "transposed": list(self.transposed)}

    def write_config(self, folder: Path) -> Path:
        """Write adapter_config.json, with which peft loads the adapters."""
        path = folder / ADAPTER_CONFIG
        with path.open("w", encoding="utf-8") as file:
            json.dump({**self.config, "inference_mode": True}, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return path

    def merged(self, held: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor ``held`` of the model with adapters, with what an adapter adds to it; ``read`` returns one
        of the model's tensors by its name."""
        layer = held.rpartition(BASE)[0]
        weight = read(held)
        if not held.endswith(".base_layer.weight"):
            return weight
        added = read(f"{layer}{B}weight").to(weight.dtype) @ read(f"{layer}{A}weight").to(weight.dtype)
        return weight + (added.T if layer in self.transposed else added) * self.scale


def in_adapter(name: str) -> bool:
    """Whether a tensor with this name is part of an adapter."""
    return A in name or B in name


def without_adapters(name: str) -> str:
    """Return the name of a tensor in the model without adapters."""
    return name.replace(BASE, ".")


def adapter_name(name: str) -> str | None:
    """Return the name in a file of peft of a tensor that is part of an adapter; None for another tensor."""
    return f"base_model.model.{name.replace('.default.', '.')}" if in_adapter(name) else None
