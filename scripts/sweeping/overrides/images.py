"""Numbers and fields of models of images and videos."""

from __future__ import annotations

from typing import Any

import torch

from sweeping.case import LABELS, WORDS
from sweeping.shrink import DEFAULT, FIRST_ID, IMAGE, PARTS, PATCH, WIDTH, between_pixels
from sweeping.wrappers import Detector, Picked, Pixels, Strip

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
FOUR = {"config": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}}
PATCHES = {
    "fields": {
        "pixel_values": lambda shape, draws, fields: draws.numbers(16, 3 * PATCH * PATCH),
        "pixel_attention_mask": lambda shape, draws, fields: torch.ones(draws.rows, 16, dtype=torch.long),
        "spatial_shapes": lambda shape, draws, fields: torch.full((draws.rows, 2), 4),
    },
}

WINDOWS = {"config": {"image_size": 64, "window_size": 2}}
MASKED_WINDOWS = {"config": {**WINDOWS["config"], "num_layers": 4, "encoder_stride": 32}, "sweep_patches": 256}
LINES = {"sweep_image": 96}
LARGER = {"sweep_image": 64}  # of 32, last maps have one pixel: a BatchNorm of few rows then leaves only rounding
# The BatchNorms of HGNetV2 are frozen with a mean of 0 and a variance of 1: with its own weights, of std 0.02, the
# variance of an image falls to 1e-37, each BatchNorm that follows multiplies gradients by 316, and one device by itself
# differs by 3 % after two steps once its parameters are changed by 1e-15.  Weights of this std keep it near 1.
FROZEN_NORMS = {"backbone_config": {"initializer_range": 0.3}}
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

HALVING = {
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "block_configs": [[[3, 32, 32, stride, True]] for stride in (1, 2, 2, 2)],
}


PROMPTED = {
    "fields": {
        "input_points": lambda shape, draws, fields: draws.uniform(1, 2, 2) * IMAGE,
        "input_labels": lambda shape, draws, fields: draws.integers(0, 2, 1, 2),
    },
    "wrap": lambda model: Picked(model, "pred_masks", "iou_scores"),
}
SAM = {
    **PROMPTED,
    "config": {"vision_config": {"num_pos_feats": 16}, "prompt_encoder_config": {"image_embedding_size": 4}},
}
EDGE = {
    "backbone_config": {
        "architecture": "test_convnext",
        "num_classes": LABELS,
        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
    },
    "backbone_channel_list": [64, 48, 32, 24],
    "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
}
STRIP = {
    "config": {"insert_layer_id": 0},
    "fields": {
        "pixel_values": lambda shape, draws, fields: draws.numbers(3, PATCH, 16 * PATCH),
        "target_sizes": lambda shape, draws, fields: torch.full((draws.rows, 2), 4),
    },
    "wrap": Strip,
}


IMAGES: dict[str, dict[str, Any]] = {
    "aimv2": {"wrap": lambda model: Picked(model, "image_embeds")},
    "align": {"config": {"vision_config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}}},
    "beit/segmentation": FOUR,
    "chmv2": {"config": {"backbone_config": {"return_class_token": True}}},
    "conditional_detr": LAST,
    "cvt": {"config": {"depth": [1, 2, 3], "embed_dim": [16, 32, 32], "num_heads": [1, 2, 4]}},
    "d_fine": {"config": FROZEN_NORMS, **LARGER, "wrap": lambda model: Detector(between_pixels(model))},
    "dab-detr": LAST,
    "data2vec-vision/segmentation": FOUR,
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
    "donut-swin": WINDOWS,
    "dpt": {"config": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}},
    "edgetam": {**PROMPTED, "config": {"vision_config": EDGE, "prompt_encoder_config": {"patch_size": 16}}},
    "edgetam_vision_model": {"config": EDGE, "wrap": Pixels},
    "efficientloftr": {
        "config": {
            "num_attention_heads": 8,
            "out_features": [16, 16, 32, 32],
            **dict.fromkeys(
                (
                    "stage_in_channels",
                    "stage_block_stride",
                    "stage_block_in_channels",
                    "stage_block_out_channels",
                    "fine_fusion_dims",
                    "num_key_value_heads",
                    "intermediate_size",
                ),
                DEFAULT,
            ),
        },
        "fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(2, 3, 64, 64)},
    },
    "efficientnet": {"config": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128}},
    "exaone4_5_vision": {"config": {"window_size": 32}},
    "focalnet/masked-image": {"config": {"encoder_stride": 32}, "sweep_patches": 64},
    "gemma3n_vision": {"config": {"architecture": "test_vit"}, "sweep_image": 160, "wrap": Pixels},
    "gemma4_vision": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(16, 3 * PATCH * PATCH)}},
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
    "levit": {"config": {"patch_size": 16, "image_size": 64}},
    "lw_detr": {"config": {"projector_scale_factors": [1.0]}},
    "mask2former": {"config": {"feature_size": 32, "mask_feature_size": 32}, "sweep_image": 64, "wrap": between_pixels},
    "maskformer": {"config": {"fpn_feature_size": 32, "mask_feature_size": 32}},
    "maskformer-swin": WINDOWS,
    "minicpm_ocr_vision": STRIP,
    "minicpmv4_7_vision": STRIP,
    "mm-grounding-dino": LARGER,
    "mobilenet_v2/segmentation": {"config": {"image_size": 64}},
    "mobilevitv2": {"sweep_image": 64},
    "oneformer": {
        "sweep_image": 64,
        "fields": {"task_inputs": lambda shape, draws, fields: draws.integers(FIRST_ID, WORDS - 40, 20)},
        "wrap": between_pixels,
    },
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
    "qwen2_5_vl_vision": {"config": {"window_size": 32}},
    "sam": SAM,
    "sam2": {
        **PROMPTED,
        "config": {
            "vision_config": {
                "backbone_channel_list": [128, 64, 32, 16],
                "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
            },
            "prompt_encoder_config": {"patch_size": 16, "image_embedding_size": 2},
        },
    },
    "sam2_hiera_det_model": {"config": PARTS["sam2_hiera_det_model"]},
    "sam2_vision_model": {
        "config": {"backbone_channel_list": [128, 64, 32, 16], "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]}
    },
    "sam3_tracker": {
        **PROMPTED,
        "config": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    },
    "sam_hq": SAM,
    "sapiens2/segmentation": {
        "config": {"head_config": {"upsample_out_channels": [16, 16], "conv_out_channels": [16]}}
    },
    "seggpt": {"config": {"image_size": [2 * IMAGE, IMAGE]}, "sweep_image": IMAGE},
    "siglip2": PATCHES,
    "siglip2_vision_model": PATCHES,
    "swin": WINDOWS,
    "swin/masked-image": MASKED_WINDOWS,
    "swinv2": WINDOWS,
    "swinv2/masked-image": MASKED_WINDOWS,
    "table-transformer": LAST,
    "textnet": {"config": {"stem_out_channels": 16}},
    "timm_wrapper": {"config": {"architecture": "test_vit"}, "sweep_image": 160},
    "upernet": LARGER,
    "uvdoc": {
        "config": {
            "backbone_config": {
                "out_features": ["stage1", "stage2", "stage3"],
                "resnet_head": [[3, 16], [16, 16]],
                "resnet_configs": [[[16, 16, 1, False]], [[16, 16, 1, True]], [[16, 16, 1, True], [16, 16, 3, False]]],
                "stage_configs": [[[16, 1]], [[16, 2]], [[16, 5], [16, 3]]],
            },
            "bridge_connector": [16, 16],
            "out_point_positions2D": [[16, 8], [8, 2]],
        },
        **LARGER,
    },
    "videomae/pretraining": {
        "fields": {
            "pixel_values": lambda shape, draws, fields: draws.numbers(4, 3, IMAGE, IMAGE),
            "bool_masked_pos": lambda shape, draws, fields: (torch.arange(32) % 2 == 0).repeat(draws.rows, 1),
        }
    },
    "xclip": {"fields": {"pixel_values": lambda shape, draws, fields: draws.numbers(4, 3, IMAGE, IMAGE)}},
}
