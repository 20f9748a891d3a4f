"""What the sweep's general rules do not find for a model type: its own numbers and fields."""

from __future__ import annotations

from typing import Any

from sweeping.shrink import HEAD


class _Default:
    """The value that a config has by itself."""


DEFAULT: Any = _Default()

RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}
BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
LAST = {"config": {**BACKBONE, "backbone_kwargs": None, "backbone_config": {**RESNET, "out_features": ["stage4"]}}}
THREE = {"config": {**BACKBONE, "backbone_kwargs": None, "backbone_config": RESNET}}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD}

OVERRIDES: dict[str, dict[str, Any]] = {
    "detr": LAST,
    "conditional_detr": LAST,
    "dab-detr": LAST,
    "table-transformer": LAST,
    "deformable_detr": THREE,
    "mamba2": {"config": {"num_heads": 8, "head_dim": HEAD}},
    "bamba": {"config": MAMBA},
    "falcon_h1": {"config": MAMBA},
    "granitemoehybrid": {"config": MAMBA},
    "reformer": {"config": {"is_decoder": True}},
    "jamba": {
        "config": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    },
    "recurrent_gemma": {"config": {"num_hidden_layers": 3}},
    "zamba": {"config": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}},
    "zamba2": {"config": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}},
}
