"""What the sweep's general rules do not find for a model type: its own numbers and fields."""

from __future__ import annotations

from typing import Any

import torch

from sweeping.case import LABELS, LENGTH, SAMPLES, WORDS
from sweeping.heads import Picked, Pixels
from sweeping.shrink import FIRST_ID, HEAD, IMAGE, IMAGE_ID, PARTS, PATCH, WIDTH, between_pixels


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
RESNET_OF_FOUR = {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
BACKBONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
LAST = {"config": {**BACKBONE, "backbone_kwargs": None, "backbone_config": {**RESNET, "out_features": ["stage4"]}}}
THREE = {"config": {**BACKBONE, "backbone_kwargs": None, "backbone_config": RESNET}}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD}

INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
FOUR = {"config": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}}
REVERSIBLE = {
    "axial_pos_embds": False, "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DOUBLE = {"attention_hidden_size": 64, "attention_head_dim": 16}
PATCHES = {
    "fields": {
        "pixel_values": lambda shape, draws, fields: draws.numbers(16, 3 * PATCH * PATCH),
        "pixel_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 16, dtype=torch.long),
        "spatial_shapes": lambda shape, draws, fields: torch.full((draws.rows, 2), 4),
    },
}
WINDOWS = {"config": {"image_size": 64, "window_size": 2}}
MASKED_WINDOWS = {"config": {**WINDOWS["config"], "num_layers": 4, "encoder_stride": 32}, "sweep_patches": 256}
MONO = {"fields": {"input_values": lambda shape, draws, fields: draws.numbers(1, SAMPLES)}}
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

LINES = {"sweep_image": 96}
LARGER = {"sweep_image": 64}  # of 32, last maps have one pixel: a BatchNorm of few rows then leaves only rounding
CROSSED = {
    "config": {
        "intraclass_block_config": {
            "reduce_channel": [1, 1, 0],
            **{
                f"{way}{size}ratio": [(height, width), (1, 1), (height // 2, width // 2)]
                for way, tall, wide in (
                    ("vertical_long_to_small_conv_", True, False),
                    ("horizontal_small_to_long_conv_", False, True),
                    ("symmetric_conv_long_", True, True),
                )
                for size, length in (("long", 7), ("mid", 5), ("short", 3))
                for height, width in ((length if tall else 1, length if wide else 1),)
            },
            "return_channel": [1, 1, 0],
        },
        "scale_factor_list": [1, 2, 4, 8],
        "kernel_list": [3, 2, 2],
    }
}

DECODED = {"fields": {"decoder_input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, LENGTH)}}

WAVES = {"fields": {"hidden_states": lambda shape, draws, fields: draws.numbers(1, 64)}}
STATES = {"fields": {"hidden_states": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)}}
SPOKEN = {
    "fields": {
        "attention_mask": lambda shape, draws, fields: None,
        "duration_labels": lambda shape, draws, fields: torch.full((draws.rows, LENGTH), 2),
        "pitch_labels": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
        "energy_labels": lambda shape, draws, fields: draws.numbers(LENGTH, 1),
        "spectrogram_labels": lambda shape, draws, fields: draws.numbers(2 * LENGTH, shape.number(16, "num_mel_bins")),
    }
}
CODES = {
    "packed": "input_ids",
    "fields": {
        "input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, 20, 4, LENGTH),
        "labels": lambda shape, draws, fields: draws.integers(FIRST_ID, 20, LENGTH, 4),
    },
}
ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
WORDS_OF_IMAGES = {"<image>": IMAGE_ID, **{f"IMGIMG{chr(65 + i)}Z": IMAGE_ID + 1 + i for i in range(32)}}


HALVING = {
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "block_configs": [[[3, 32, 32, stride, True]] for stride in (1, 2, 2, 2)],
}

SLIDING = {
    **{f"swa_{name}": HEAD for name in ("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")},
    **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads", "qk_nope_head_dim")},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "aimv2": {"wrap": lambda model: Picked(model, "image_embeds")},
    "albert/pretraining": {"labels": 2},
    "align": {"config": {"vision_config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}}},
    "audio-spectrogram-transformer": {
        "config": {"max_length": 64, "num_mel_bins": 16, "time_stride": 8, "frequency_stride": 8},
        "fields": {
            "input_values": lambda shape, draws, fields: draws.numbers(64, 16),
            "attention_mask": lambda shape, draws, fields: None,
        },
    },
    "autoformer": {**SERIES, "config": {**SERIES["config"], "label_length": 4, "moving_average": 3}},
    "bamba": {"config": {**MAMBA, "attn_layer_indices": [1]}},
    "beit/segmentation": FOUR,
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
    "chmv2": {"config": {"backbone_config": {"return_class_token": True}}},
    "clap": {
        "fields": {"input_features": lambda shape, draws, fields: draws.numbers(1, 64, 32)},
        "config": {"audio_config": {"spec_size": 128, "window_size": 2, "num_mel_bins": 32, "hidden_size": 256}},
    },
    "clvp": {
        "config": {
            "text_config": {"hidden_size": 128},
            "speech_config": {"hidden_size": 128},
            "decoder_config": {"hidden_size": 128},
        },
        "mel_first": True,
    },
    "cohere_compass": {"config": {"text_config": {"rope_parameters": ROPES}}},
    "cohere_compass_text": {"config": {"rope_parameters": ROPES}},
    "conditional_detr": LAST,
    "cvt": {"config": {"depth": [1, 2, 3], "embed_dim": [16, 32, 32], "num_heads": [1, 2, 4]}},
    "dab-detr": LAST,
    "dac": MONO,
    "data2vec-vision/segmentation": FOUR,
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
    "deformable_detr": THREE,
    "depth_pro": {"config": {"patch_size": 32, "intermediate_hook_ids": [1, 0]}, "sweep_image": 128},
    "detr": LAST,
    "detr/universal": {
        "config": {
            **LAST["config"],
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "backbone_config": RESNET_OF_FOUR,
        }
    },
    "diffusion_gemma": {"config": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}}},
    "donut-swin": WINDOWS,
    "dots1": {"config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}},
    "dots3_note": {"config": {"text_config": SLIDING}},
    "dots3_note_text": {"config": SLIDING},
    "dpt": {"config": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}},
    "efficientnet": {"config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}},
    "emu3": {"config": {"vocabulary_map": WORDS_OF_IMAGES}},
    "encodec": {**MONO, "config": {"sampling_rate": DEFAULT, "num_filters": 4, "target_bandwidths": [1.5, 3.0]}},
    "esmc": {"config": {"vocab_size": WORDS}},
    "exaone4_5_vision": {"config": {"window_size": 32}},
    "falcon_h1": {"config": MAMBA},
    "fastspeech2_conformer": SPOKEN,
    "fastspeech2_conformer_with_hifigan": {**SPOKEN, "config": {"vocoder_config": {"model_in_dim": 16}}},
    "focalnet/masked-image": {"config": {"encoder_stride": 32}, "sweep_patches": 64},
    "fun_asr_nano": {"config": {"adaptor_config": {"intermediate_size": 8}}, "feature_projection_input_dim": 112},
    "fun_asr_nano_encoder": {"feature_projection_input_dim": 112, "sweep_frames": 16},
    "gemma3n": {"config": {"vision_config": {"architecture": "test_vit"}}},
    "gemma3n_vision": {"config": {"architecture": "test_vit"}, "sweep_image": 160, "wrap": Pixels},
    "gemma4_audio": {"feature_projection_input_dim": 64},
    "gemma4_vision": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(16, 3 * PATCH * PATCH)}},
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
    "granite_speech5_ctc": {"config": {"encoder_config": {"context_size": 16}}, "num_mel_bins": 64},
    "granite_speech5_encoder": {"config": {"context_size": 16}, "num_mel_bins": 64},
    "granitemoehybrid": {"config": {**MAMBA, "layer_types": ["mamba", "attention"]}},
    "grounding-dino": LARGER,
    "groupvit": {
        "config": {
            "vision_config": {
                "depths": [1, 1, 1],
                "num_hidden_layers": 3,
                "num_group_tokens": [8, 4, 0],
                "num_output_groups": [8, 4, 4],
            }
        }
    },
    "hgnet_v2": {"config": PARTS["hgnet_v2"]},
    "hiera/pretraining": {"config": {"decoder_hidden_size": WIDTH, "decoder_depth": 1, "decoder_num_heads": 4}},
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
    "kyutai_speech_to_text": {
        "fields": {
            "input_ids": lambda shape, draws, fields: draws.integers(
                FIRST_ID, 20, LENGTH, 1 + shape.number(32, "num_codebooks")
            ),
            "attention_mask": lambda shape, draws, fields: None,
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, LENGTH),
        }
    },
    "laguna": {"config": {"num_attention_heads_per_layer": [4, 4]}},
    "layoutlmv3": {"config": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8}},
    "levit": {"config": {"patch_size": 16, "image_size": 64}},
    "lfm2_moe": {"config": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}},
    "lilt": {"config": {"hidden_size": 48}},
    "longformer/choice": SEPARATED,
    "longformer/question": SEPARATED,
    "lw_detr": {"config": {"projector_scale_factors": [1.0]}},
    "lxmert": {
        "fields": {
            "visual_feats": lambda shape, draws, fields: draws.numbers(4, shape.number(WIDTH, "visual_feat_dim")),
            "visual_pos": lambda shape, draws, fields: draws.uniform(4, 4),
        }
    },
    "mamba2": {"config": {"num_heads": 8, "head_dim": HEAD}},
    "markuplm": {"config": {"tag_pad_id": 60, "subs_pad_id": 60}},
    "mask2former": {"config": {"feature_size": 32, "mask_feature_size": 32}, "sweep_image": 64, "wrap": between_pixels},
    "maskformer": {"config": {"fpn_feature_size": 32, "mask_feature_size": 32}},
    "maskformer-swin": WINDOWS,
    "mimi": {**MONO, "config": {"num_quantizers": 4}, "leaves": "a codebook of the dtype of the first forward"},
    "mimi_decoder": {"fields": {"latents": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)}},
    "mimi_encoder": {**MONO, "config": {"num_quantizers": 4}, "leaves": "a codebook of the dtype of the first forward"},
    "mimo_v2_flash": {"config": {"num_key_value_heads": 2}},
    "mistral4": {"config": {"head_dim": 16, "qk_head_dim": 16}},
    "mm-grounding-dino": LARGER,
    "mobilenet_v2/segmentation": {"config": {"image_size": 64}},
    "mobilevitv2": {"sweep_image": 64},
    "molmo2": {
        "config": {"adapter_config": {"vision_feature_layer": [1, 0]}},
        "fields": {"mm_token_type_ids": lambda shape, draws, fields: torch.zeros_like(fields["input_ids"])},
    },
    "moonshine": {"config": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}},
    "moonshine_streaming": {"config": {"num_key_value_heads": 4, "encoder_config": {"sample_rate": 16000}}},
    "muse_spark": {"config": {"audio_config": {"num_hidden_layers": 4}}},
    "muse_spark_audio": {"config": {"num_hidden_layers": 4}, "sweep_samples": 3840},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "nemotron": {"config": {"num_key_value_heads": 2}},
    "nemotron3_5_asr": {**DECODED, "config": {"default_prompt_id": 0}},
    "nemotron_asr_streaming": DECODED,
    "neomme": {"config": {"head_dim": 16}},
    "neucodec": {
        **MONO,
        "config": {"quantization_dim": 64, "input_sampling_rate": DEFAULT, "output_sampling_rate": DEFAULT},
        "sweep_frames": 12,
    },
    "nystromformer": {"config": {"segment_means_seq_len": LENGTH, "num_landmarks": LENGTH, "conv_kernel_size": 3}},
    "oneformer": {
        "sweep_image": 64,
        "fields": {"task_inputs": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, 20)},
        "wrap": between_pixels,
    },
    "paligemma": {"fields": {"token_type_ids": lambda shape, draws, fields: torch.zeros_like(fields["input_ids"])}},
    "parakeet_rnnt": DECODED,
    "parakeet_tdt": DECODED,
    "pe_audio": MONO,
    "pe_audio_encoder": MONO,
    "pe_audio_video": MONO,
    "pe_audio_video_encoder": MONO,
    "perception_lm": {"config": {"vision_config": {"architecture": "test_vit", "model_args": {"embed_dim": 64}}}},
    "pi0": {
        "fields": {
            "pixel_values": lambda shape, draws, fields: draws.numbers(1, 3, IMAGE, IMAGE),
            "pixel_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 1, dtype=torch.bool),
            "actions": lambda shape, draws, fields: draws.numbers(
                shape.number(8, "chunk_size"), shape.number(WIDTH, "max_action_dim")
            ),
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
    "pocket_tts_audio_tokenizer": MONO,
    "pocket_tts_audio_tokenizer_decoder": {
        "fields": {"latents": lambda shape, draws, fields: draws.numbers(WIDTH, LENGTH)}
    },
    "pocket_tts_audio_tokenizer_encoder": MONO,
    "pp_doclayout_v2": {
        "config": {
            "class_thresholds": [0.5] * LABELS,
            "class_order": list(range(LABELS)),
            "reading_order_config": {"max_2d_position_embeddings": 1024},
        }
    },
    "pp_doclayout_v3": {"config": {"x4_feat_dim": 16}, **LARGER},
    "pp_doclayout_v4": LARGER,
    "pp_ocrv5_mobile_det": LARGER,
    "pp_ocrv5_mobile_rec": LINES,
    "pp_ocrv5_server_det": {**CROSSED, **LARGER},
    "pp_ocrv5_server_rec": LINES,
    "pp_ocrv6_medium_det": {"config": {**CROSSED["config"], "backbone_config": HALVING}, **LARGER},
    "pp_ocrv6_medium_rec": LINES,
    "pp_ocrv6_small_det": {"config": {"layer_list_out_channels": [32] * 4, "backbone_config": HALVING}, **LARGER},
    "pp_ocrv6_small_rec": LINES,
    "pp_ocrv6_tiny_rec": LINES,
    "qwen2_5_omni_thinker": {"config": {"vision_start_token_id": IMAGE_ID + 1}},
    "qwen2_5_vl_vision": {"config": {"window_size": 32}},
    "qwen3_asr_encoder": {
        "mel_first": True,
        "config": {"n_window": 50, "n_window_infer": 100},
        "sweep_frames": 200,
        "fields": {"input_features_mask": lambda shape, draws, fields: torch.ones(draws.rows, 200, dtype=torch.long)},
    },
    "qwen3_omni_moe_thinker": {"config": {"vision_start_token_id": IMAGE_ID + 1}},
    "qwen4_exp": {"config": {"text_config": INDEXER}},
    "qwen4_exp_text": {"config": INDEXER},
    "recurrent_gemma": {"config": {"num_hidden_layers": 3}, "leaves": "states"},  # of the last forward, with gradients
    # A reversible layer would draw its dropout again in backward, as a checkpointed one does.
    "reformer": {"config": {"is_decoder": True, **REVERSIBLE}},
    "reformer/masked": {"config": {"is_decoder": False, **REVERSIBLE}},
    "sam": {"config": {"vision_config": {"num_pos_feats": 16}, "prompt_encoder_config": {"image_embedding_size": 4}}},
    "sam2": {
        "config": {
            "vision_config": {
                "backbone_channel_list": [128, 64, 32, 16],
                "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
            },
            "prompt_encoder_config": {"patch_size": 16, "image_embedding_size": 2},
        }
    },
    "sam2_hiera_det_model": {"config": PARTS["sam2_hiera_det_model"]},
    "sam2_vision_model": {
        "config": {"backbone_channel_list": [128, 64, 32, 16], "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]}
    },
    "sam3_tracker": {"config": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}}},
    "sam_hq": {
        "config": {"vision_config": {"num_pos_feats": 16}, "prompt_encoder_config": {"image_embedding_size": 4}}
    },
    "sapiens2/segmentation": {
        "config": {"head_config": {"upsample_out_channels": [16, 16], "conv_out_channels": [16]}}
    },
    "seggpt": {"config": {"image_size": [2 * IMAGE, IMAGE]}, "sweep_image": IMAGE},
    "shieldgemma2/image": {
        "fields": {"labels": lambda shape, draws, fields: None},
        "config": {"yes_token_index": IMAGE_ID + 1, "no_token_index": IMAGE_ID + 2},
    },
    "siglip2": PATCHES,
    "siglip2_vision_model": PATCHES,
    "speech-encoder-decoder": {"only": ("input_values",)},
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
    "swin": WINDOWS,
    "swin/masked-image": MASKED_WINDOWS,
    "swinv2": WINDOWS,
    "swinv2/masked-image": MASKED_WINDOWS,
    "t5gemma2_encoder": {"config": {"text_config": {"dropout_rate": 0.0}}},
    "table-transformer": LAST,
    "textnet": {"config": {"stem_out_channels": 16}},
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
    "timm_wrapper": {"config": {"architecture": "test_vit"}, "sweep_image": 160},
    "udop": {**BOXES, "only": ("input_ids",)},
    "upernet": LARGER,
    "vibevoice_acoustic_tokenizer": {**MONO, "config": PARTS["vibevoice_acoustic_tokenizer"]},
    "vibevoice_acoustic_tokenizer_decoder": {**STATES, "config": PARTS["vibevoice_acoustic_tokenizer_decoder"]},
    "vibevoice_acoustic_tokenizer_encoder": {**WAVES, "config": PARTS["vibevoice_acoustic_tokenizer_encoder"]},
    "videomae/pretraining": {
        "fields": {
            "pixel_values": lambda shape, draws, fields: draws.numbers(4, 3, IMAGE, IMAGE),
            "bool_masked_pos": lambda shape, draws, fields: (torch.arange(32) % 2 == 0).repeat(draws.rows, 1),
        }
    },
    "visual_bert/pretraining": {
        "fields": {
            "visual_embeds": lambda shape, draws, fields: draws.numbers(4, WIDTH),
            "visual_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 4, dtype=torch.long),
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, LENGTH + 4),
            "sentence_image_labels": lambda shape, draws, fields: draws.integers(0, 2),
        }
    },
    "voxtral_realtime": {
        "mel_first": True,
        "fields": {
            "input_ids": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, 8),
            "labels": lambda shape, draws, fields: draws.targets(WORDS - 40, 8),
        },
    },
    "xclip": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(4, 3, IMAGE, IMAGE)}},
    "xcodec": {**MONO, "config": {"codebook_dim": 64}},
    "xcodec2": {**MONO, "config": {"quantization_dim": 64}, "sweep_frames": 12},
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
"""By model type: arguments of its config beside those that :mod:`shrink` finds, numbers of its inputs, and fields."""
