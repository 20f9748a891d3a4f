"""Configs of transformers at tiny size: each integer of a config gets a value by its name, in sub-configs too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sweeping.case import WORDS

WIDTH, HEADS, HEAD, INNER, LAYERS, POSITIONS, IMAGE, PATCH = 32, 4, 8, 64, 2, 20, 32, 8
FIRST_ID, LAST_ID = 3, WORDS - 1  # special tokens that are not in the small vocabulary are numbered from its end
IMAGE_ID = WORDS - 40  # the first that no text of a batch has
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
LARGE = 64  # no other integer stays above this


class _Default:
    """The value that a config has by itself."""


DEFAULT: Any = _Default()

Rule = tuple[str, int | Callable[[int], int]]


def same(value: int) -> int:
    """Leave an integer as it is."""
    return value


def above_one(most: int) -> Callable[[int], int]:
    """Return what makes ``most`` of an integer above one: one head or expert is a choice, and stays."""
    return lambda value: most if value > 1 else value


RULES: tuple[Rule, ...] = (
    (r"qk_head_dim$|^num_labels$|pad_token|_dtype|version|seed|chunk_size_feed|problem|^begin_suppress", same),
    (r"feat_extract_layers", same),
    (r"shared_layers$", 0),
    (r"rotary_dim", 4),
    (r"chunk_(left|right)_context", 2),
    (r"pos_emb_(height|width)", 8),
    (r"mamba.*heads", 2 * HEADS),
    (r"^d_head$|mamba_d_head|head_dim|head_size|d_kv|attention_head_hidden", HEAD),
    (r"(key_value|kv)_heads|n_kv|num_key_value_groups$", lambda v: v if v <= 1 else HEADS if v < 8 else 2),
    (r"heads?$|n_head|num_head|attention_heads", above_one(HEADS)),
    (r"experts?_per_tok|top_?k|moe_k|per_token|selected_experts|num_selected", 2),
    (r"topk_group", 1),
    (r"n_group$|num_expert_group", 2),
    (r"shared_experts?$", 1),
    (r"experts?$|n_routed|expert_num", above_one(4)),
    (r"first_k_dense", 1),
    (r"moe.*intermediate|expert.*(size|dim)", 24),
    (r"intermediate|ffn|d_ff|mlp_dim|mlp_hidden|n_inner|inner_dim|feed_?forward|fc_dim", INNER),
    (r"lora_rank|_rank$", 16),
    (r"codebook_size|num_codebook_entries|num_codevectors", 32),
    (r"vocab|num_embeddings$", WORDS),
    (r"drop|interval|_every|_freq|_step$|frequency", 2),
    (r"layers?$|n_layer|depth$|num_blocks|num_hidden|num_stages_layers", LAYERS),
    (r"^window_size$", 4),
    (r"sliding_window|attention_window|local_attention|window_size|chunk_length|attention_chunk|index_topk", 6),
    (r"source_positions|max_source|^max_length$", LARGE),
    (r"position|n_ctx|max_.*(seq|len)|seq_?len|context_length|max_target", POSITIONS),
    (r"image_size|crop_size|input_size|img_size|^height$|^width$|image_(height|width)", IMAGE),
    (r"patch_size|patch_stride|encoder_stride", PATCH),
    (r"num_frames|temporal_size|num_pose", 4),
    (r"num_queries|num_query|latents|num_proposals|denoising|conv_pos_embeddings$", 8),
    (r"groups$", 4),
    (r"state_size|ssm_state|conv_kernel|d_state|kernel|stride|dilat|n_channels|num_channels", 32),
    (r"type_vocab|buckets|in_chan", 32),
    (r"mel|feature_size|num_features|input_feat", 16),
    (r"size|dim|d_model|n_embd|embd|width|channels|hidden|planes|features|filters|_d$", WIDTH),
)
"""Patterns of names, the first of which that is found says what becomes of an integer: at most a number, or what a
function makes of it."""
TOKENIZER = {"num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
PARTS: dict[str, dict[str, Any]] = {
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [16, 32, 32, 64],
        "hidden_sizes": [16, 32, 32, 64],
    },
    "lw_detr_vit": {"num_windows": 4, "window_block_indices": [0, 2]},
    "pp_lcnet_v3": {"scale": 0.25},
    "pp_lcnet_v4": {
        "stem_channels": [3, 32, 32],
        "stage_out_channels": [32, 32, 32, 32],
        "block_configs": [
            [[3, 32, 32, stride, use]] for stride, use in ((1, True), (1, False), ([2, 1], False), ([2, 1], True))
        ],
    },
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "window_positional_embedding_background_size": [2, 2],
        "window_size_per_stage": [4, 2, 2, 2],
    },
    **{f"vibevoice_acoustic_tokenizer{part}": TOKENIZER for part in ("", "_encoder", "_decoder")},
    "timm_wrapper": {"architecture": "test_vit", "model_args": None},
}
"""Arguments of sub-configs whose numbers depend on each other, by their model type."""
IDS = re.compile(r"(token|eos|bos|pad|sep|cls|mask|unk)_?(id|index|ids)$|_token$|_id$")
KINDS = ("layer_types", "layers_block_type", "block_types")  # lists that name the kind of each layer


def shrunk(config: Any) -> dict[str, Any]:
    """Return the arguments that make a tiny config like ``config``: what changes, with sub-configs as dicts."""
    used: dict[int, int] = {}
    return _shrunk(config, used)


def _shrunk(config: Any, used: dict[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kinds_name = next((name for name in KINDS if isinstance(values.get(name), list | tuple)), None)
    kinds = values.get(kinds_name) if kinds_name else None
    layers = _layers(values)
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            small = {**_own(value), **_shrunk(value, used), "model_type": value.model_type}
            found[name] = {**small, **_outputs(value, small), **PARTS.get(value.model_type, {})}
        elif IDS.search(name):
            if (small := _ids(value, used)) != value:
                found[name] = small
        elif isinstance(value, Mapping):
            if (small := _mapping(value)) != value:
                found[name] = small
        elif (small := _value(name, value)) != value:
            found[name] = small
    if isinstance(kinds, Sequence) and layers:
        chosen = list(dict.fromkeys(kinds))[:4]
        chosen = (chosen * LAYERS)[: max(LAYERS, len(chosen))]
        found[kinds_name] = chosen
        _resize(values, found, layers, len(chosen))
    elif layers:
        _resize(values, found, layers, min(layers, LAYERS))
    for shared, all_heads in (("num_key_value_heads", "num_attention_heads"), ("n_kv_heads", "n_heads")):
        if values.get(shared) is not None and values.get(shared) == values.get(all_heads) and all_heads in found:
            found[shared] = found[all_heads]
    for name, value in (("head_dim", HEAD), ("vocab_size", WORDS)):
        if name in values and values[name] is None:
            found[name] = value
    return found


def _own(config: Any) -> dict[str, Any]:
    """Return the numbers that a sub-config has of the config around it, beside those of its class."""
    plain = vars(type(config)())
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, KEPT) and not name.startswith("_") and value != plain.get(name)
    }


KEPT = (int, float, str, list, tuple)


def _outputs(config: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Return the stages that a backbone gives, as many as before it shrinks: layers are stages where it has no
    others."""
    wanted = getattr(config, "_out_features", None)
    if not wanted or list(wanted) == getattr(type(config)(), "_out_features", None):
        return {}
    if "num_hidden_layers" not in small or any(hasattr(config, name) for name in ("depths", "block_configs")):
        return {"out_features": list(wanted)}
    count = max(LAYERS, len(wanted))
    return {"num_hidden_layers": count, "out_features": [f"stage{i + 1}" for i in range(count)][-len(wanted) :]}


def _layers(values: Mapping[str, Any]) -> int:
    """Return the number of layers of a config before it shrinks, 0 if it has none."""
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        if isinstance(values.get(name), int) and values[name] > 1:
            return int(values[name])
    return 0


def _resize(values: Mapping[str, Any], found: dict[str, Any], before: int, after: int) -> None:
    """Give lists with an item for each layer, and the numbers of layers, the size ``after``."""
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) == before and before > 4 and name not in KINDS:
            found[name] = list(found.get(name, value))[:after]
        elif name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and value == before:
            found[name] = after


def _ids(value: Any, used: dict[int, int]) -> Any:
    """Return special tokens as they are if the small vocabulary has them, else numbered from its end."""
    if isinstance(value, list | tuple):
        return type(value)(_ids(one, used) for one in value)
    if not isinstance(value, int) or isinstance(value, bool) or value < WORDS - 40:
        return value
    if value not in used:
        used[value] = LAST_ID - len(used)
    return used[value]


def _mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of the config (rotary embeddings, backbones, quantizers) at tiny size."""
    found: dict[str, Any] = {}
    for name, one in value.items():
        if name == "mrope_section":
            found[name] = [2, 1, 1][: len(one)] if len(one) == 3 else [1] * len(one)
        elif isinstance(one, Mapping):
            found[name] = _mapping(one)
        elif name in ("rope_theta", "factor", "partial_rotary_factor") or isinstance(one, float):
            found[name] = one
        else:
            found[name] = _value(name, one) if isinstance(name, str) else one
    return found


def _value(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _integer(name, value)
    if isinstance(value, list | tuple) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return type(value)(_integers(name, list(value)))
    if isinstance(value, list | tuple) and value and all(isinstance(v, list | tuple) for v in value):
        return type(value)(_value(name, one) for one in value)
    return value


def _integer(name: str, value: int) -> int:
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value) if callable(rule) else min(value, rule)
    return min(value, LARGE) if value > 0 else value


def _integers(name: str, values: list[int]) -> list[int]:
    """Return a list at tiny size: depths 1, widths and heads in their ratios, all else one by one."""
    if re.search(r"depth|num_blocks|layers$|layer_repeats|encoder_layers", name) and not re.search(
        r"out|select|feature_lay", name
    ):
        return [min(v, 1) for v in values]
    if len(set(values)) == 1:
        return [_integer(name, v) for v in values]
    if re.search(r"hidden_size|embed_dim|widths|channels|dims?$|sizes$|conv_dim|planes", name) and max(values) > WIDTH:
        least = min(v for v in values if v > 4)
        return [v if v <= 4 else max(round(v * 16 / least / 16), 1) * 16 for v in values]
    if re.search(r"heads", name):
        least = min(v for v in values if v > 0)
        return [max(v // least, 1) for v in values]
    return [_integer(name, v) for v in values]


def completed(config: Any) -> Any:
    """Return a config, and its sub-configs, with the special tokens that it leaves open."""
    for name, value in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2), ("decoder_start_token_id", 0)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    for name in IMAGE_TOKENS:
        if getattr(config, name, 0) is None:
            setattr(config, name, IMAGE_ID)
    if hasattr(config, "mask_time_prob") and hasattr(config, "mask_time_length"):  # SpecAugment, of few frames
        config.mask_time_prob, config.mask_time_length = 0.2, 2
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and MROPE.search(config.model_type) and "mrope_section" not in rope:
        config.rope_parameters = {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    backbone = getattr(config, "backbone_config", None)
    if hasattr(config, "encoder_in_channels") and hasattr(backbone, "hidden_sizes"):
        config.encoder_in_channels = [backbone.hidden_sizes[i - 1] for i in backbone.out_indices][
            -len(config.encoder_in_channels) :
        ]
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            completed(value)
    return config


MROPE = re.compile(
    r"hunyuan_vl|qwen2_(5_)?vl|qwen2_5_omni|glm4\d?v|glm_image|glm_ocr|glmga|paddleocr|colqwen2|ernie4_5_vl"
)


def between_pixels(model: nn.Module) -> nn.Module:
    """Return a model of deformable attention whose points begin between pixels.  Where they begin, exactly at pixels,
    the derivative of bilinear interpolation jumps, and rounding decides on the gradient."""
    own = torch.Generator().manual_seed(0)
    for name, one in model.named_parameters():
        if name.endswith("sampling_offsets.bias"):
            one.data += 0.2 + 0.1 * torch.rand(one.shape, generator=own)
    return model
