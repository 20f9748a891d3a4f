"""The zoo of timm: the smallest model of each family, narrowed where its arguments allow it."""

from __future__ import annotations

import itertools
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
SHALLOW = {"depth": 2, "embed_dim": 32, "num_heads": 4}
LARGEST = 12_000_000
FACTOR = 8


def entries() -> Iterator[Entry]:
    """Return a model of each family (a module of timm.models); :class:`ImportError` where timm is not installed."""
    ready()
    import timm

    for family in timm.list_modules():
        if names := timm.list_models(module=family):
            yield Entry("timm", family, "image", lambda n=tuple(names): smallest(n))
    for name in FURTHER:
        yield Entry("timm", name, "image", lambda n=name: fitted(n))


def smallest(names: tuple[str, ...]) -> Case:
    """Return the smallest model of a family, by words in its name."""
    ranked = sorted(
        names, key=lambda n: (min((i for i, word in enumerate(SMALL) if word in n), default=len(SMALL)), len(n))
    )
    errors = []
    for name in ranked[:4]:
        try:
            return fitted(name)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def build(name: str, device: str, narrow: bool, given: dict[str, Any]) -> nn.Module:
    """Return a model on a device, at a fraction of its width or as it is."""
    import timm

    torch.manual_seed(0)
    with torch.device(device), narrowed(FACTOR) if narrow else nullcontext():
        return timm.create_model(name, num_classes=LABELS, **given).float().train()


def fitted(name: str) -> Case:
    """Return the model with the arguments and image size with which it is smallest; they are tried on the meta device,
    where that costs nothing."""
    errors: list[Exception] = []
    for device, (narrow, own), size in itertools.product(
        ("meta", "cpu"), ((True, {}), (False, SHALLOW), (False, {})), SIZES
    ):
        if device == "cpu" and size not in SIZES[-1:]:
            continue
        for given in ({**own, "img_size": size}, own):
            try:
                module = build(name, device, narrow, given)
                if (large := sum(p.numel() for p in module.parameters())) > LARGEST:
                    raise ValueError(f"{name} has {large:,} parameters")
                module(torch.zeros(2, 3, size, size, device=device))
                return classifier(build(name, "cpu", narrow, given), 3, size, size)
            except Exception as error:
                errors.append(error)
    raise errors[-1]
