"""The heads of transformers that train, and batches for each, made from a model's config and the names of its
inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sweeping.case import LABELS, LENGTH, SAMPLES, WORDS, Draws
from sweeping.shrink import FIRST_ID, IMAGE, IMAGE_TOKENS, PATCH, WIDTH

HEADS: tuple[tuple[str, str], ...] = (
    ("causal", "MODEL_FOR_CAUSAL_LM"),
    ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"),
    ("masked", "MODEL_FOR_MASKED_LM"),
    ("image-text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"),
    ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
    ("ctc", "MODEL_FOR_CTC"),
    ("multimodal", "MODEL_FOR_MULTIMODAL_LM"),
    ("image", "MODEL_FOR_IMAGE_CLASSIFICATION"),
    ("video", "MODEL_FOR_VIDEO_CLASSIFICATION"),
    ("audio", "MODEL_FOR_AUDIO_CLASSIFICATION"),
    ("contrastive", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("detection", "MODEL_FOR_OBJECT_DETECTION"),
    ("segmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION"),
    ("universal", "MODEL_FOR_UNIVERSAL_SEGMENTATION"),
    ("depth", "MODEL_FOR_DEPTH_ESTIMATION"),
    ("masked-image", "MODEL_FOR_MASKED_IMAGE_MODELING"),
    ("series", "MODEL_FOR_TIME_SERIES_PREDICTION"),
    ("classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION"),
    ("tokens", "MODEL_FOR_TOKEN_CLASSIFICATION"),
    ("question", "MODEL_FOR_QUESTION_ANSWERING"),
    ("choice", "MODEL_FOR_MULTIPLE_CHOICE"),
    ("next", "MODEL_FOR_NEXT_SENTENCE_PREDICTION"),
    ("pretraining", "MODEL_FOR_PRETRAINING"),
    ("frames", "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION"),
    ("speaker", "MODEL_FOR_AUDIO_XVECTOR"),
    ("retrieval", "MODEL_FOR_RETRIEVAL"),
    ("series-class", "MODEL_FOR_TIME_SERIES_CLASSIFICATION"),
    ("series-value", "MODEL_FOR_TIME_SERIES_REGRESSION"),
    ("base", "MODEL"),
)
"""Names of heads in the sweep, with the registry of transformers' auto classes that lists their models."""
CHOICES, FRAMES, BOXES, GRID = 2, 4, 2, 4
GRIDS = ("grid_thw", "image_grid_thw")


@dataclass(frozen=True)
class Shape:
    """What batches need to know of a model: its config's numbers, at any depth, with a family's own before them."""

    config: Any
    head: str
    names: tuple[str, ...]  # of the inputs of forward
    own: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()  # the names that have no default

    @staticmethod
    def of(module: nn.Module, config: Any, head: str, own: Mapping[str, Any]) -> Shape:
        """Return the shape of inputs of a module."""
        taken = inspect.signature(module.forward).parameters
        needed = tuple(name for name, one in taken.items() if one.default is one.empty)
        return Shape(config, head, tuple(taken), own, needed)

    def number(self, default: Any, *names: str) -> Any:
        """Return the first of the numbers ``names`` that the family, its config or a sub-config has."""
        for name in names:
            if name in self.own:
                return self.own[name]
            for config in configs(self.config):
                if isinstance(value := getattr(config, name, None), int | list | tuple) and not isinstance(value, bool):
                    return value
        return default


def configs(config: Any) -> list[Any]:
    """Return a config and its sub-configs."""
    inner = [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]
    return [config, *(one for each in inner for one in configs(each))]


def batch(shape: Shape, draws: Draws) -> dict[str, Tensor]:
    """Return a batch for a model: its inputs, padded at the right, and its targets."""
    fields: dict[str, Tensor] = {}
    only = shape.own.get("only")
    for names, make in INPUTS:
        if only is not None and names[0] not in only:
            continue
        if name := next((n for n in names if n in shape.names), None):
            fields |= make(shape, draws, name)
            if shape.head not in MIXED:
                break
    fields |= targets(shape, draws, fields)
    fields |= {name: NEEDED[name](shape, draws) for name in shape.needed if name in NEEDED and name not in fields}
    for name, make_own in shape.own.get("fields", {}).items():
        made = make_own(shape, draws, fields)
        if made is None:
            fields.pop(name, None)
        else:
            fields[name] = made
    return fields


OF_TOKENS = ("causal", "masked", "image-text", "multimodal")
MIXED = ("image-text", "multimodal", "contrastive", "retrieval", "base")


def _text(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    length = shape.number(LENGTH, "sweep_length")
    ids = draws.integers(FIRST_ID, WORDS - 40, length)
    fields, mask = {name: ids}, None
    if "attention_mask" in shape.names:
        mask = draws.padding(length)
        pad = shape.number(0, "pad_token_id")
        fields[name] = ids.masked_fill(mask == 0, pad if isinstance(pad, int) and 0 <= pad < WORDS else 0)
        fields["attention_mask"] = mask
    if shape.head == "classification" and getattr(shape.config, "is_encoder_decoder", False):  # of the state at its end
        mask = fields.get("attention_mask", torch.ones_like(ids))
        end = torch.arange(length) == mask.sum(1, keepdim=True) - 1
        fields[name] = fields[name].masked_fill(end, shape.number(2, "eos_token_id"))
    if shape.head == "choice":
        fields = {k: v[:, None].repeat(1, CHOICES, 1) for k, v in fields.items()}
        other = draws.integers(FIRST_ID, WORDS - 40, length)
        fields[name][:, 1] = other if mask is None else torch.where(mask == 0, fields[name][:, 1], other)
    if count := shape.own.get("images"):
        token = shape.number(None, *IMAGE_TOKENS)
        start = 1
        ids = fields[name] = torch.cat(
            [ids[:, :start], torch.full((draws.rows, count), token), fields[name][:, start:]], 1
        )
        fields["attention_mask"] = torch.cat(
            [torch.ones(draws.rows, count, dtype=torch.long), fields["attention_mask"]], 1
        )
    return fields


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _patches(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    """Return patches, of an image of the same grid in each row, for models that take those of all images one after the
    other (``Packed``)."""
    channels, patch = shape.number(3, "num_channels", "in_channels"), shape.number(PATCH, "patch_size")
    frames = shape.number(1, "temporal_patch_size", "patch_temporal")
    size = {
        "flat": (channels * frames * patch**2,),
        "image": (channels, patch, patch),
        "merged": (2 * patch, 2 * patch, channels),
    }[shape.own.get("patches", "flat")]
    fields = {name: draws.numbers(GRID * GRID, *size)}
    grid = next(n for n in GRIDS if n in shape.names)
    fields[grid] = torch.tensor([1, GRID, GRID]).repeat(draws.rows, 1)
    if "merge_sizes" in shape.names:
        fields["merge_sizes"] = torch.ones(draws.rows, dtype=torch.long)
    return fields


def packed(shape: Shape) -> str | None:
    """Return the name of the input whose rows a model wants one after the other; None if it has none such."""
    if "packed" in shape.own:
        return str(shape.own["packed"])
    if "input_ids" in shape.names or not any(n in shape.names for n in GRIDS):
        return None
    return next((n for n in ("hidden_states", "pixel_values") if n in shape.names), None)


def _image(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    if packed(shape):
        return _patches(shape, draws, name)
    height, width = _pair(shape.number(IMAGE, "sweep_image", "image_size", "img_size"))
    channels = shape.number(3, "num_channels", "in_channels", "in_chans")
    size = (channels if isinstance(channels, int) else 3, height, width)
    if shape.head == "video":
        size = (shape.number(FRAMES, "num_frames", "frames_per_clip"), *size)
    return {name: draws.numbers(*size)}


def _video(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    if shape.head not in ("video", "base"):
        return {}
    return {name: _image(Shape(shape.config, "video", shape.names, shape.own), draws, name)[name]}


def _wave(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    length = shape.number(4 * SAMPLES if shape.head == "speaker" else SAMPLES, "sweep_samples")
    fields = {name: draws.numbers(length)}
    if "attention_mask" in shape.names:
        fields["attention_mask"] = draws.padding(10).repeat_interleave(length // 10, 1)
    return fields


def _spectrum(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    mel = shape.number(
        16,
        "feature_projection_input_dim",
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "num_mel_filters",
        "input_dim",
    )
    time = shape.number(64, "sweep_frames")
    first = shape.own.get("mel_first", False)
    fields = {name: draws.numbers(*((mel, time) if first else (time, mel)))}
    if "attention_mask" in shape.names and not first:
        fields["attention_mask"] = draws.padding(time)
    if "input_features_mask" in shape.names:
        fields["input_features_mask"] = draws.padding(time)
    return fields


def _series(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    length = shape.number(64, "context_length", "prediction_length")
    return {name: draws.numbers(length, shape.number(1, "num_input_channels"))}


def _states(shape: Shape, draws: Draws, name: str) -> dict[str, Tensor]:
    return _patches(shape, draws, name) if packed(shape) else {}


INPUTS: tuple[tuple[tuple[str, ...], Callable[[Shape, Draws, str], dict[str, Tensor]]], ...] = (
    (("input_features",), _spectrum),
    (("input_values",), _wave),
    (("input_ids",), _text),
    (("pixel_values",), _image),
    (("pixel_values_videos",), _video),
    (("past_values",), _series),
    (("hidden_states",), _states),
)
"""Names of inputs, and what makes them; a head of ``MIXED`` takes all, another the first that forward has."""


def _embedded(shape: Shape, draws: Draws) -> Tensor:
    return draws.numbers(LENGTH, shape.number(WIDTH, "hidden_size"))


def _ids(shape: Shape, draws: Draws) -> Tensor:
    return draws.integers(FIRST_ID, WORDS - 40, LENGTH)


NEEDED: dict[str, Callable[[Shape, Draws], Tensor]] = {
    "audio_mel": lambda shape, draws: draws.numbers(64, shape.number(16, "input_feat_size")),
    "audio_mel_mask": lambda shape, draws: torch.zeros(draws.rows, 64, dtype=torch.bool),
    "context_hidden_states": lambda shape, draws: draws.numbers(
        LENGTH, shape.number(WIDTH, "hidden_size") * len(shape.number([1], "target_layer_ids"))
    ),
    "decoder_input_ids": _ids,
    "input_features_mask": lambda shape, draws: torch.ones(draws.rows, 64, dtype=torch.long),
    "inputs_embeds": _embedded,
    "latents": _embedded,
    "noise_embeds": _embedded,
    "pixel_position_ids": lambda shape, draws: _grid(draws.rows),
    "pixel_values_videos": lambda shape, draws: draws.numbers(FRAMES, 3, IMAGE, IMAGE),
    "prompt_masks": lambda shape, draws: draws.numbers(3, IMAGE, IMAGE),
    "prompt_pixel_values": lambda shape, draws: draws.numbers(3, IMAGE, IMAGE),
    "qformer_input_ids": _ids,
    "query_embeds": _embedded,
    "state": lambda shape, draws: draws.numbers(shape.number(WIDTH, "max_state_dim")),
    "task_inputs": _ids,
}
"""What makes inputs that a forward cannot do without, if nothing else has."""


def _grid(rows: int) -> Tensor:
    """Return the place, x and y, of each patch of an image, of shape (rows, patches, 2)."""
    return torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1).repeat(rows, 1, 1)


def targets(shape: Shape, draws: Draws, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the targets of a head."""
    names, found = shape.names, {}
    ids, mask = fields.get("input_ids"), fields.get("attention_mask")
    length = ids.shape[-1] if ids is not None else LENGTH
    if ids is not None and "labels" in names and shape.head in (*OF_TOKENS, "pretraining"):
        aligned = mask if mask is not None and mask.shape == ids.shape else None
        found["labels"] = draws.targets(WORDS - 40, length, aligned)
    elif shape.head in ("seq2seq", "speech", "image-text"):
        found["labels"] = draws.targets(WORDS - 40, LENGTH - 3, draws.padding(LENGTH - 3))
    elif shape.head == "ctc":
        found["labels"] = draws.integers(4, 20, 3)
        found["labels"][::2, 2:] = -100
    elif shape.head == "tokens":
        found["labels"] = draws.targets(LABELS, length, mask)
    elif shape.head == "frames":  # of SAMPLES numbers convolutions make LENGTH frames, a spectrum has its own
        count = fields["input_features"].shape[1] if "input_features" in fields else LENGTH
        found["labels"] = torch.nn.functional.one_hot(draws.integers(0, LABELS, count), LABELS)
    elif shape.head in ("classification", "image", "video", "audio", "speaker"):
        found["labels"] = draws.integers(0, LABELS)
    elif shape.head == "question":
        found["start_positions"], found["end_positions"] = draws.integers(0, 6), draws.integers(0, 6)
    elif shape.head == "choice":
        found["labels"] = draws.integers(0, CHOICES)
    elif shape.head == "next":
        found["labels"] = draws.integers(0, 2)
    elif shape.head == "segmentation":
        size = _pair(shape.number(IMAGE, "sweep_image", "image_size", "img_size"))
        found["labels"] = draws.integers(0, LABELS, *size)
    elif shape.head == "depth":
        size = _pair(shape.number(IMAGE, "sweep_image", "image_size", "img_size"))
        found["labels"] = draws.uniform(*size) + 0.1
    elif shape.head in ("detection",):
        found["classes"] = draws.integers(0, LABELS, BOXES)
        found["boxes"] = draws.uniform(BOXES, 4) * 0.3 + 0.2
    elif shape.head == "masked-image":
        height, width = _pair(shape.number(IMAGE, "image_size"))
        found["bool_masked_pos"] = draws.integers(
            0, 2, shape.number((height // 8) * (width // 8), "sweep_patches")
        ).bool()
    elif shape.head == "series":
        found["future_values"] = draws.numbers(
            shape.number(8, "prediction_length"), shape.number(1, "num_input_channels")
        )
    if shape.head == "pretraining":
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in names:
                found[name] = draws.integers(0, 2)
        if "labels" in found and "next_sentence_label" not in names and "discriminator" in shape.own:
            found["labels"] = draws.integers(0, 2, length)
    return {k: v for k, v in found.items() if k in names or k in ("classes", "boxes")}
