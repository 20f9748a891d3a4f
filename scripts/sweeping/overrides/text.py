"""Numbers and fields of models of text, series and actions, and of those that take text with images."""

from __future__ import annotations

from typing import Any

import torch

from sweeping.case import LENGTH, WORDS
from sweeping.shrink import HEAD, HEADS, IMAGE, IMAGE_ID, WIDTH
from sweeping.wrappers import Assistant, Picked

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}

REVERSIBLE = {
    "axial_pos_embds": False, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
}  # fmt: skip

DOUBLE = {"attention_hidden_size": 64, "attention_head_dim": 16}
BOXES = {
    "fields": {
        "bbox": lambda shape, draws, fields: draws.uniform(2, LENGTH, 2).sort(1).values.transpose(1, 2).flatten(2)
    }
}

SEPARATED = {
    "fields": {
        "input_ids": lambda shape, draws, fields: fields["input_ids"].index_fill(
            -1, torch.tensor([1, 3, 5]), shape.number(2, "sep_token_id")
        )
    }
}

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

ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
WORDS_OF_IMAGES = {"<image>": IMAGE_ID, **{f"IMGIMG{chr(65 + i)}Z": IMAGE_ID + 1 + i for i in range(32)}}
SLIDING = {
    **{f"swa_{name}": HEAD for name in ("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")},
    **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads", "qk_nope_head_dim")},
}


TEXT: dict[str, dict[str, Any]] = {
    "albert/pretraining": {"labels": 2},
    "autoformer": {**SERIES, "config": {**SERIES["config"], "label_length": 4, "moving_average": 3}},
    "bamba": {"config": {**MAMBA, "attn_layer_indices": [1]}},
    "blip-2/contrastive": {
        "config": {"qformer_config": {"use_qformer_text_input": True}},
        "wrap": lambda model: Picked(model, "image_embeds"),
    },
    "blip_2_qformer": {
        "fields": {
            "encoder_hidden_states": lambda shape, draws, fields: draws.numbers(
                4, shape.number(WIDTH, "encoder_hidden_size")
            )
        }
    },
    "blt": {"config": {"use_cache": False}},
    "bridgetower": {
        "config": {"hidden_size": 64, "vision_config": {"hidden_size": 64}, "text_config": {"hidden_size": 64}}
    },
    "bros": {**BOXES, "config": {"hidden_size": 128}},
    "chameleon": {"config": {"vocabulary_map": WORDS_OF_IMAGES}},
    "cohere_compass": {"config": {"text_config": {"rope_parameters": ROPES}}},
    "cohere_compass_text": {"config": {"rope_parameters": ROPES}},
    "dbrx": {"config": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}},
    "decision_transformer": {
        "fields": {
            "states": lambda shape, draws, fields: draws.numbers(LENGTH, shape.number(17, "state_dim")),
            "actions": lambda shape, draws, fields: draws.numbers(LENGTH, shape.number(4, "act_dim")),
            "rewards": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
            "returns_to_go": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
            "timesteps": lambda shape, draws, fields: draws.integers(0, LENGTH, LENGTH),
            "attention_mask": lambda shape, draws, fields: draws.padding(LENGTH),
        }
    },
    "deepseek_ocr2": {"config": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}}},
    "deepseek_v2": {"config": {"num_experts_per_tok": 2}},
    "diffusion_gemma": {"config": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}}},
    "dots1": {"config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}},
    "dots3_note": {"config": {"text_config": SLIDING}},
    "dots3_note_text": {"config": SLIDING},
    "emu3": {"config": {"vocabulary_map": WORDS_OF_IMAGES}},
    "ernie4_5_vl_moe": {
        "config": {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
            }
        }
    },
    "esmc": {"config": {"vocab_size": WORDS}},
    "falcon_h1": {"config": MAMBA},
    "gemma3n": {"config": {"vision_config": {"architecture": "test_vit"}}},
    "gemma4_unified_assistant": {
        "config": {
            "backbone_hidden_size": WIDTH,
            "text_config": {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
            },
        },
        "only": (),
        "fields": {
            "inputs_embeds": lambda shape, draws, fields: draws.numbers(LENGTH, 2 * WIDTH),
            "full": lambda shape, draws, fields: draws.numbers(2, HEADS, LENGTH, HEAD),
            "sliding": lambda shape, draws, fields: draws.numbers(2, HEADS, LENGTH, HEAD),
        },
        "wrap": Assistant,
    },
    "git": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(3, IMAGE, IMAGE)}},
    "glm5_next": {"config": {"text_config": {"index_kpool": 2}}},
    "glm5_next_text": {"config": {"index_kpool": 2}},
    "granite4_vision": {
        "config": {
            "deepstack_layer_map": [[1, 0]],
            "spatial_target_layers": [1],
            "downsample_rate": "1/2",
            "vision_config": {"hidden_size": 64},
        }
    },
    "granitemoehybrid": {"config": {**MAMBA, "layer_types": ["mamba", "attention"]}},
    "idefics": {
        "fields": {
            "pixel_values": lambda shape, draws, fields: draws.numbers(1, 3, IMAGE, IMAGE),
            "image_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, LENGTH, 1, dtype=torch.long),
        }
    },
    "informer": SERIES,
    "instructblipvideo": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(4, 3, IMAGE, IMAGE)}},
    "jamba": {
        "config": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    },
    "kimi_linear": {"config": {"num_experts_per_tok": 2}},
    "kosmos-2": {
        "fields": {
            "image_embeds_position_mask": lambda shape, draws, fields: (
                ((torch.arange(LENGTH) > 0) & (torch.arange(LENGTH) < 5)).long().repeat(draws.rows, 1)
            )
        },
        "config": {"latent_query_num": 4},
    },
    "laguna": {"config": {"num_attention_heads_per_layer": [4, 4]}},
    "layoutlmv3": {"config": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8}},
    "lfm2_moe": {"config": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}},
    "lilt": {"config": {"hidden_size": 48}},
    "longformer/choice": SEPARATED,
    "longformer/question": SEPARATED,
    "lxmert": {
        "fields": {
            "visual_feats": lambda shape, draws, fields: draws.numbers(4, shape.number(WIDTH, "visual_feat_dim")),
            "visual_pos": lambda shape, draws, fields: draws.uniform(4, 4),
        }
    },
    "mamba2": {"config": {"num_heads": 8, "head_dim": HEAD}},
    "markuplm": {"config": {"tag_pad_id": 60, "subs_pad_id": 60}},
    "mimo_v2_flash": {"config": {"num_key_value_heads": 2}},
    "mistral4": {"config": {"head_dim": 16, "qk_head_dim": 16}},
    "molmo2": {
        "config": {"adapter_config": {"vision_feature_layer": [1, 0]}},
        "fields": {"mm_token_type_ids": lambda shape, draws, fields: torch.zeros_like(fields["input_ids"])},
    },
    "muse_glimmer_assistant": {
        "fields": {"attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 2 * LENGTH, dtype=torch.long)}
    },
    "muse_spark": {"config": {"audio_config": {"num_hidden_layers": 4}}},
    "nemotron": {"config": {"num_key_value_heads": 2}},
    "neomme": {"config": {"head_dim": 16}},
    "nystromformer": {"config": {"segment_means_seq_len": LENGTH, "num_landmarks": LENGTH, "conv_kernel_size": 3}},
    "paligemma": {"fields": {"token_type_ids": lambda shape, draws, fields: torch.zeros_like(fields["input_ids"])}},
    "perception_lm": {"config": {"vision_config": {"architecture": "test_vit", "model_args": {"embed_dim": 64}}}},
    "pi0": {
        "fields": {
            "pixel_values": lambda shape, draws, fields: draws.numbers(1, 3, IMAGE, IMAGE),
            "pixel_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 1, dtype=torch.bool),
            **{
                name: lambda shape, draws, fields: draws.numbers(
                    shape.number(8, "chunk_size"), shape.number(WIDTH, "max_action_dim")
                )
                for name in ("actions", "noise")
            },
            "timestep": lambda shape, draws, fields: draws.uniform(),  # else drawn from a beta distribution
        }
    },
    "pix2struct": {
        "fields": {
            "flattened_patches": lambda shape, draws, fields: torch.cat(
                [draws.integers(0, 4, 16, 2), draws.numbers(16, WIDTH)], 2
            ),
            "attention_mask": lambda shape, draws, fields: None,
        }
    },
    "qwen2_5_omni_thinker": {"config": {"vision_start_token_id": IMAGE_ID + 1}},
    "qwen3_omni_moe_thinker": {"config": {"vision_start_token_id": IMAGE_ID + 1}},
    "qwen4_exp": {"config": {"text_config": INDEXER}},
    "qwen4_exp_text": {"config": INDEXER},
    "recurrent_gemma": {"config": {"num_hidden_layers": 3}, "leaves": "states"},  # of the last forward, with gradients
    # A reversible layer would draw its dropout again in backward, as a checkpointed one does.
    "reformer": {"config": {"is_decoder": True, **REVERSIBLE}},
    "reformer/masked": {"config": {"is_decoder": False, **REVERSIBLE}},
    "shieldgemma2/image": {
        "fields": {"labels": lambda shape, draws, fields: None},
        "config": {"yes_token_index": IMAGE_ID + 1, "no_token_index": IMAGE_ID + 2},
    },
    "splinter/pretraining": {
        "fields": {
            "input_ids": lambda shape, draws, fields: fields["input_ids"].index_fill(
                1, torch.tensor([2]), shape.number(104, "question_token_id")
            ),
            "question_positions": lambda shape, draws, fields: torch.full((draws.rows, 1), 2),
            "start_positions": lambda shape, draws, fields: draws.integers(0, 6, 1),
            "end_positions": lambda shape, draws, fields: draws.integers(0, 6, 1),
        }
    },
    "step3p7": {"config": {"text_config": {"sliding_window": 6}}},
    "t5gemma2_encoder": {"config": {"text_config": {"dropout_rate": 0.0}}},
    "time_series_transformer": SERIES,
    "timesfm": {
        "fields": {
            "past_values": lambda shape, draws, fields: draws.numbers(64),
            "freq": lambda shape, draws, fields: torch.zeros(draws.rows, dtype=torch.long),
            "future_values": lambda shape, draws, fields: draws.numbers(shape.number(32, "horizon_length")),
        },
        "config": {"context_length": 64},
    },
    "timesfm2_5": {
        "fields": {
            "past_values": lambda shape, draws, fields: draws.numbers(64),
            "future_values": lambda shape, draws, fields: draws.numbers(shape.number(32, "horizon_length")),
        },
        "config": {"context_length": 64},
    },
    "udop": {**BOXES, "only": ("input_ids",)},
    "visual_bert/pretraining": {
        "fields": {
            "visual_embeds": lambda shape, draws, fields: draws.numbers(4, WIDTH),
            "visual_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 4, dtype=torch.long),
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, LENGTH + 4),
            "sentence_image_labels": lambda shape, draws, fields: draws.integers(0, 2),
        }
    },
    "xlstm": {"config": {"use_cache": False}},
    "xmod": {"config": {"default_language": "en_XX"}},
    "zamba": {
        "config": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            **DOUBLE,
        }
    },
    "zamba2": {"config": {"mamba_headdim": HEAD, **DOUBLE}},
}
