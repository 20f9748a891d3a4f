"""The zoo of timm: the smallest model of each family, narrowed where its arguments allow it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sweeping.case import LABELS, Case, Entry
from sweeping.narrow import narrowed
from sweeping.of_torchvision import classifier
from sweeping.torchvision_ops import ready

SIZES = (64, 96, 128, 224)
"""Image sizes that are tried, the first with which a model runs is taken. Below 64 the last maps of many nets have one
pixel, and a BatchNorm of two rows has two values, of which no gradient is more than rounding."""
OWN_SIZES = {"efficientvim": 128, "inception_v3": 128, "inception_v4": 224}
"""Sizes of nets whose last maps have one pixel at 64, too."""
SMALL = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "tiny",
    "xxs",
    "xxt",
    "_t_",
    "_s0",
    "_b0",
    "micro",
    "small",
    "18",
    "26",
    "050",
)
FURTHER = (
    "seresnet18",
    "ecaresnet26t",
    "botnet26t_256",
    "vit_relpos_small_patch16_224",
    "vit_srelpos_small_patch16_224",
    "skresnet18",
)
"""Models whose family another of the same module stands for, and which are built otherwise."""
STAGES: dict[str, Any] = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4)}
WINDOWS = {**STAGES, "img_size": 64, "window_size": 2}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "davit": ("DaVit", {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 64), "num_heads": (1, 2, 4, 4)}),
    "focalnet": ("FocalNet", {"embed_dim": 16, "depths": (1, 1, 1, 1)}),
    "hieradet_sam2": (
        "HieraDet",
        {"embed_dim": 16, "stages": (1, 1, 2, 1), "global_att_blocks": (3,), "window_spec": (8, 4, 2, 2)},
    ),
    "hiera": (
        "hiera_tiny_224",
        {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1), "mask_unit_size": (4, 4)},
    ),
    "metaformer": ("MetaFormer", {"depths": (1, 1, 1, 1), "dims": (16, 32, 32, 64)}),
    "nasnet": ("nasnetalarge", {"stem_size": 16, "num_features": 24 * 16}),
    "mobilenetv5": ("mobilenetv5_base", {"channel_multiplier": 0.1}),
    "nest": ("Nest", {"img_size": 64, "embed_dims": (16, 32, 64), "num_heads": (1, 2, 4), "depths": (1, 1, 2)}),
    "nextvit": ("nextvit_small", {"stem_chs": (8, 8, 16), "depths": (1, 1, 5, 1), "head_dim": 16}),
    "rdnet": (
        "RDNet",
        {
            "growth_rates": (8, 16, 16, 16),
            "num_blocks_list": (1, 1, 2, 1),
            "block_type": ("Block", "BlockESE", "BlockESE", "BlockESE"),
            "is_downsample_block": (None, True, False, True),
            "num_init_features": 16,
        },
    ),
    "res2net": ("res2net50_26w_4s", {"layers": (1, 1, 1, 1), "base_width": 8, "channels": (16, 16, 32, 32)}),
    "sequencer": (
        "sequencer2d_s",
        {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)},
    ),
    "swin_transformer": ("SwinTransformer", WINDOWS),
    "swin_transformer_v2": ("SwinTransformerV2", WINDOWS),
    "swin_transformer_v2_cr": ("SwinTransformerV2Cr", {**WINDOWS, "img_size": (64, 64)}),
    "tnt": (
        "tnt_s_patch16_224",
        {"img_size": 64, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 4},
    ),
    "tresnet": ("tresnet_m", {"layers": (1, 1, 1, 1), "width_factor": 0.25}),
    "twins": (
        "twins_svt_small",
        {
            "img_size": 64,
            "embed_dims": (16, 32, 32, 64),
            "depths": (1, 1, 1, 2),
            "num_heads": (1, 2, 2, 4),
            "wss": (4, 4, 4, 2),
        },
    ),
    "volo": (
        "VOLO",
        {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 4, 4, 4)},
    ),
}
"""Families that cannot be narrowed: what of the module makes a model, with its arguments."""
SHALLOW = {"depth": 2, "embed_dim": 32, "num_heads": 4}
LARGEST = (15_000_000, 30_000_000)  # parameters: the second where no model of a family has so few as the first
FACTOR = 8


def entries() -> Iterator[Entry]:
    """Return a model of each family (a module of timm.models); :class:`ImportError` where timm is not installed."""
    ready()
    import timm

    for family in timm.list_modules():
        if names := timm.list_models(module=family):
            yield Entry("timm", family, "image", lambda f=family, n=tuple(names): smallest(f, n))
    for name in FURTHER:
        yield Entry("timm", name, "image", lambda n=name: fitted(n))


def smallest(family: str, names: tuple[str, ...]) -> Case:
    """Return the smallest model of a family, by words in its name, or the family's own."""
    if family in OWN:
        name, given = OWN[family]
        torch.manual_seed(0)
        made = getattr(sys.modules[f"timm.models.{family}"], name)
        return classifier(made(num_classes=LABELS, **given).float().train(), 3, SIZES[0], SIZES[0])
    ranked = sorted(
        names, key=lambda n: (min((i for i, word in enumerate(SMALL) if word in n), default=len(SMALL)), len(n))
    )
    errors = []
    for largest, name in itertools.product(LARGEST, ranked[:4]):
        try:
            return fitted(name, largest, OWN_SIZES.get(family))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def build(name: str, device: str, narrow: bool, given: dict[str, Any]) -> nn.Module:
    """Return a model on a device, at a fraction of its width or as it is."""
    import timm

    torch.manual_seed(0)
    with torch.device(device), narrowed(FACTOR) if narrow else nullcontext():
        return timm.create_model(name, num_classes=LABELS, **given).float().train()


def fitted(name: str, largest: int = LARGEST[0], size: int | None = None) -> Case:
    """Return the model with the arguments and image size with which it is smallest, or with images of ``size``; they
    are tried on the meta device, where that costs nothing."""
    sizes = SIZES if size is None else (size,)
    errors: list[Exception] = []
    for device, (narrow, own), size in itertools.product(
        ("meta", "cpu"), ((True, {}), (False, SHALLOW), (False, {})), sizes
    ):
        if device == "cpu" and size not in sizes[-1:]:
            continue
        for given in ({**own, "img_size": size}, own):
            try:
                module = build(name, device, narrow, given)
                if (large := sum(p.numel() for p in module.parameters())) > largest:
                    raise ValueError(f"{name} has {large:,} parameters")
                module(torch.zeros(2, 3, size, size, device=device))
                return classifier(build(name, "cpu", narrow, given), 3, size, size)
            except Exception as error:
                errors.append(error)
    raise errors[-1]
