"""The zoo of diffusers: UNets and transformers that predict noise, and autoencoders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sweeping.case import Case, Draws, Entry, batches
from sweeping.wrappers import Packed

TEXT, TOKENS = 16, 5
UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
VAE = {"block_out_channels": [8, 16], "norm_num_groups": 4, "latent_channels": 4}
CROSS = {
    **UNET,
    "cross_attention_dim": TEXT,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}
Fields = Callable[[Draws], dict[str, Tensor]]


def latents(*shape: int, name: str = "sample", **more: Callable[[Draws], Tensor]) -> Fields:
    """Return what draws inputs of a shape, the time of each row, and ``more``."""
    return lambda draws: {
        name: draws.numbers(*shape),
        "timestep": draws.integers(0, 1000),
        **{k: v(draws) for k, v in more.items()},
    }


def text(draws: Draws) -> Tensor:
    """Return an encoded text, of shape (rows, tokens, width)."""
    return draws.numbers(TOKENS, TEXT)


def pooled(draws: Draws) -> Tensor:
    """Return a text as one vector, of shape (rows, width)."""
    return draws.numbers(TEXT)


MODELS: dict[str, tuple[dict[str, Any], Fields]] = {
    "UNet2DModel": (
        {
            **UNET,
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        latents(3, 16, 16),
    ),
    "UNet2DConditionModel": (CROSS, latents(4, 16, 16, encoder_hidden_states=text)),
    "UNet1DModel": (
        {
            "block_out_channels": (32, 64),
            "sample_size": 32,
            "in_channels": 2,
            "out_channels": 2,
            "extra_in_channels": 64,
            "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
            "mid_block_type": "UNetMidBlock1D",
        },
        latents(2, 32),
    ),
    "UNet3DConditionModel": (
        {
            "sample_size": 16,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 4,
            "cross_attention_dim": TEXT,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        latents(4, 3, 16, 16, encoder_hidden_states=text),
    ),
    "UNetMotionModel": (
        {
            "sample_size": 16,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
            "cross_attention_dim": TEXT,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
        },
        latents(4, 3, 16, 16, encoder_hidden_states=lambda d: d.numbers(3, TOKENS, TEXT)),
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 2,
            "micro_cond_embed_dim": 10,
            "encoder_hidden_size": TEXT,
            "vocab_size": 30,
            "codebook_size": 30,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "block_num_heads": 2,
            "intermediate_size": 48,
            "sample_size": 8,
            "num_res_blocks": 1,
        },
        lambda d: {
            "input_ids": d.integers(0, 29, 8, 8),
            "encoder_hidden_states": text(d),
            "pooled_text_emb": d.numbers(16),
            "micro_conds": d.uniform(5),
        },
    ),
    "DiTTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "norm_num_groups": 4,
            "num_embeds_ada_norm": 8,
        },
        latents(4, 8, 8, name="hidden_states", class_labels=lambda d: d.integers(0, 8)),
    ),
    "PixArtTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 16,
            "caption_channels": TEXT,
            "use_additional_conditions": False,
        },
        latents(4, 8, 8, name="hidden_states", encoder_hidden_states=text),
    ),
    "Transformer2DModel": (
        {**HEADS, "in_channels": 16, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": TEXT},
        lambda d: {"hidden_states": d.numbers(16, 8, 8), "encoder_hidden_states": text(d)},
    ),
    "SD3Transformer2DModel": (
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": TEXT,
            "caption_projection_dim": 16,
            "pooled_projection_dim": TEXT,
            "pos_embed_max_size": 16,
        },
        latents(4, 8, 8, name="hidden_states", encoder_hidden_states=text, pooled_projections=pooled),
    ),
    "SanaTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": TEXT,
            "sample_size": 8,
            "patch_size": 1,
        },
        latents(4, 8, 8, name="hidden_states", encoder_hidden_states=text),
    ),
    "HunyuanDiT2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "hidden_size": 16,
            "cross_attention_dim": TEXT,
            "cross_attention_dim_t5": TEXT,
            "pooled_projection_dim": 8,
            "text_len": 3,
            "text_len_t5": 2,
            "use_style_cond_and_image_meta_size": False,
        },
        lambda d: {
            "hidden_states": d.numbers(4, 8, 8),
            "timestep": 1000 * d.uniform(),
            "encoder_hidden_states": d.numbers(3, TEXT),
            "text_embedding_mask": torch.ones(d.rows, 3),
            "encoder_hidden_states_t5": d.numbers(2, TEXT),
            "text_embedding_mask_t5": torch.ones(d.rows, 2),
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            **HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": TEXT,
            "caption_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        lambda d: {"hidden_states": d.numbers(4, 8, 8), "encoder_hidden_states": text(d), "timestep": d.uniform()},
    ),
    "LuminaNextDiT2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "cross_attention_dim": TEXT,
            "multiple_of": 8,
        },
        lambda d: {
            "hidden_states": d.numbers(4, 8, 8),
            "timestep": d.uniform(),
            "encoder_hidden_states": text(d),
            "encoder_mask": d.padding(TOKENS),
        },
    ),
    "StableAudioDiTModel": (
        {
            **HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": TEXT,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": TEXT,
        },
        latents(
            4, 8, name="hidden_states", encoder_hidden_states=text, global_hidden_states=lambda d: d.numbers(1, 16)
        ),
    ),
    "LTXVideoTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "caption_channels": TEXT,
        },
        latents(
            12,
            4,
            name="hidden_states",
            encoder_hidden_states=text,
            encoder_attention_mask=lambda d: d.padding(TOKENS),
            video_coords=lambda d: d.uniform(3, 12),
        ),
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "time_embed_dim": 2,
            "text_embed_dim": TEXT,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": TOKENS,
        },
        latents(2, 4, 8, 8, name="hidden_states", encoder_hidden_states=text),
    ),
    "WanTransformer3DModel": (
        {
            **HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_dim": TEXT,
            "freq_dim": 16,
            "ffn_dim": 32,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        latents(4, 2, 8, 8, name="hidden_states", encoder_hidden_states=text),
    ),
    "MochiTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "text_embed_dim": TEXT,
            "time_embed_dim": 4,
            "patch_size": 2,
        },
        latents(
            4,
            2,
            8,
            8,
            name="hidden_states",
            encoder_hidden_states=text,
            encoder_attention_mask=lambda d: d.padding(TOKENS).bool(),
        ),
    ),
    "AllegroTransformer3DModel": (
        {
            **HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 24,
            "caption_channels": TEXT,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
        },
        latents(4, 2, 8, 8, name="hidden_states", encoder_hidden_states=text),
    ),
    "PriorTransformer": (
        {**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": TOKENS},
        latents(
            16,
            name="hidden_states",
            proj_embedding=lambda d: d.numbers(16),
            encoder_hidden_states=lambda d: d.numbers(TOKENS, 16),
        ),
    ),
    "AutoencoderKL": (
        {**VAE, "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2},
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_out_channels": (8, 16),
            "up_block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
    "VQModel": (
        {
            "block_out_channels": [8, 16],
            "norm_num_groups": 4,
            "latent_channels": 4,
            "num_vq_embeddings": 32,
            "down_block_types": ["DownEncoderBlock2D"] * 2,
            "up_block_types": ["UpDecoderBlock2D"] * 2,
        },
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
    "AutoencoderDC": (
        {
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "latent_channels": 4,
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "attention_head_dim": 8,
            "encoder_block_types": "ResBlock",
            "decoder_block_types": "ResBlock",
            "encoder_qkv_multiscales": ((), ()),
            "decoder_qkv_multiscales": ((), ()),
        },
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8,
            "decoder_channels": 8,
            "decoder_input_channels": 4,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "audio_channels": 2,
        },
        lambda d: {"sample": d.numbers(2, 64)},
    ),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": [32, 32], "latent_channels": 4, "down_block_types": ["DownEncoderBlock2D"] * 2},
        lambda d: {"sample": d.numbers(3, 16, 16)},
    ),
}


class Turned(nn.Module):
    """A model that wants the turns of an image's places from outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

        self.model, self.turns = model, get_2d_rotary_pos_embed_lumina(HEADS["attention_head_dim"], 8, 8)

    def forward(self, wanted: Tensor | None = None, **fields: Tensor) -> Any:
        """Return what the model gives; ``wanted`` is for the loss."""
        return self.model(**fields, image_rotary_emb=self.turns, cross_attention_kwargs={})


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "LuminaNextDiT2DModel": Turned,
    "UNetMotionModel": lambda model: Packed(model, "encoder_hidden_states"),  # a text for each frame
}


def entries() -> Iterator[Entry]:
    """Return the models of diffusers; :class:`ImportError` where it is not installed."""
    from sweeping.torchvision_ops import ready

    ready()
    import diffusers

    for name in MODELS:
        if hasattr(diffusers, name):
            head = "autoencoder" if "Autoencoder" in name or name == "VQModel" else "noise"
            yield Entry("diffusers", name, head, lambda n=name: made(n))


def first(output: Any) -> Tensor:
    """Return the sample in what a model gives."""
    return output if isinstance(output, Tensor) else output.sample if hasattr(output, "sample") else output[0]


def squared(output: Any, fields: Mapping[str, Tensor]) -> Tensor:
    """Return the mean square of how far the sample is from the one that is wanted."""
    return (first(output) - fields["wanted"]).square().mean()


def made(name: str) -> Case:
    """Return a model, and batches that ask for noise."""
    import diffusers

    torch.manual_seed(0)
    config, fields = MODELS[name]
    module: nn.Module = getattr(diffusers, name)(**config).float().train()
    module = WRAPPED[name](module) if name in WRAPPED else module
    several = batches(fields)
    for one in module.modules():
        weight = getattr(one, "weight", None)
        if (
            isinstance(weight, Tensor) and not weight.is_leaf
        ):  # weight_norm's, made anew by each forward; no copy has it
            one.weight = weight.detach()
    accepted = first(copy.deepcopy(module)(**several[0]))
    for step, one in enumerate(several):
        one["wanted"] = Draws(91 + step, next(iter(one.values())).shape[0]).numbers(*accepted.shape[1:])
    return Case(module, several, squared)
