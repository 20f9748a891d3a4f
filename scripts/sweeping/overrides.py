"""What the sweep's general rules do not find for a model type: its own numbers and fields."""

from __future__ import annotations

from typing import Any

import torch

from sweeping.case import LENGTH
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

WINDOWS = {"config": {"image_size": 64, "window_size": 2}}
SERIES = {
    "config": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1},
    "fields": {
        "past_values": lambda shape, draws, fields: draws.numbers(11),
        "past_time_features": lambda shape, draws, fields: draws.numbers(11, 1),
        "past_observed_mask": lambda shape, draws, fields: torch.ones(draws.rows, 11),
        "future_values": lambda shape, draws, fields: draws.numbers(4),
        "future_time_features": lambda shape, draws, fields: draws.numbers(4, 1),
    },
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {
        "config": {"max_length": 64, "num_mel_bins": 16, "time_stride": 8, "frequency_stride": 8},
        "fields": {
            "input_values": lambda shape, draws, fields: draws.numbers(64, 16),
            "attention_mask": lambda shape, draws, fields: None,
        },
    },
    "bamba": {"config": {**MAMBA, "attn_layer_indices": [1]}},
    "conditional_detr": LAST,
    "dab-detr": LAST,
    "deepseek_v2": {"config": {"num_experts_per_tok": 2}},
    "deformable_detr": THREE,
    "detr": LAST,
    "donut-swin": WINDOWS,
    "dots1": {"config": {"n_routed_experts": 4, "num_experts_per_tok": 2}},
    "efficientnet": {"config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}},
    "falcon_h1": {"config": MAMBA},
    "granitemoehybrid": {"config": {**MAMBA, "layer_types": ["mamba", "attention"]}},
    "informer": SERIES,
    "jamba": {
        "config": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    },
    "mamba2": {"config": {"num_heads": 8, "head_dim": HEAD}},
    "maskformer-swin": WINDOWS,
    "mobilevitv2": {"sweep_image": 64},
    "nemotron": {"config": {"num_key_value_heads": 2}},
    "nystromformer": {"config": {"segment_means_seq_len": LENGTH, "num_landmarks": LENGTH}},
    "paligemma": {"fields": {"token_type_ids": lambda shape, draws, fields: torch.zeros_like(fields["input_ids"])}},
    "recurrent_gemma": {"config": {"num_hidden_layers": 3}},
    "reformer": {"config": {"is_decoder": True, "axial_pos_embds": False}},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "table-transformer": LAST,
    "time_series_transformer": SERIES,
    "xmod": {"config": {"default_language": "en_XX"}},
}
"""By model type: arguments of its config beside those that :mod:`shrink` finds, numbers of its inputs, and fields."""
