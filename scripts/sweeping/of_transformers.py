"""The zoo of transformers: each model type with each of its heads that trains, by the registries of auto classes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sweeping.case import LABELS, ROWS, Case, Draws, Entry, batches
from sweeping.heads import GRIDS, HEADS, MIXED, Shape, batch, configs, packed
from sweeping.overrides import OVERRIDES
from sweeping.shrink import DEFAULT, LARGE, completed, shrunk
from sweeping.torchvision_ops import ready
from sweeping.wrappers import Detector, Packed, Regression, WithLossOf

LARGEST = 30_000_000  # parameters of a model that counts as tiny
LEFT_OUT = {
    **dict.fromkeys(("bark", "glm_image_vqmodel", "qwen2_5_omni", "qwen3_omni_moe"), "it has no forward"),
    **dict.fromkeys(
        ("edgetam_video", "sam2_video", "sam3_tracker_video", "sam3_video"),
        "its forward is a step of an inference session",
    ),
    "dinat": "it needs natten",
    "gemma4_assistant": "its layers are to have no keys and values of their own, and its check of that refuses itself",
    "higgs_audio_v2_tokenizer": "it needs torchaudio",
    "layoutlmv2": "it needs detectron2",
    "lightglue": "it has no loss, and how many points it finds depends on values",
    "omdet-turbo": "it keeps what it makes of a text for the next batch, and its training is not written yet",
    "timm_backbone": "it has no architecture of its own",
    "tvp": "its grid of positions has the shape of one row",
    "vits": "the length of what it gives depends on values",
    "voxtral_realtime_text": "its class is not there",
}
"""Model types that no batch trains, with the reason."""
COUNTS = re.compile(r"tokens:? *=? *(\d+).*?(?:features|embeddings):? *=? *(\d+)", re.DOTALL)


def entries() -> Iterator[Entry]:
    """Return all models of transformers, those of each head in the order of ``HEADS``: first one of each type, then the
    second head of each, and so on."""
    with contextlib.suppress(ImportError):  # without it, models that need it are not tried
        ready()
    import transformers.models.auto.modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    heads: dict[str, list[tuple[str, str]]] = {}
    for head, registry in HEADS:
        for kind, classes in getattr(auto, f"{registry}_MAPPING_NAMES").items():
            name = classes if isinstance(classes, str) else classes[0]
            known = heads.setdefault(kind, [])
            # What has a head of its own needs no other loss; the same class stands in several registries.
            if (
                kind in CONFIG_MAPPING_NAMES
                and kind not in LEFT_OUT
                and name not in [n for _, n in known]
                and not (known and head == "base")
            ):
                known.append((head, name))
    for turn in range(max(map(len, heads.values()), default=0)):
        for kind, known in heads.items():
            if turn < len(known):
                head, name = known[turn]
                yield Entry("transformers", kind, head, lambda k=kind, h=head, n=name: make(k, h, n), turn)


def make(kind: str, head: str, name: str) -> Case:
    """Return the model of a type with a head, and its batches; inputs that a model does not take are tried in turn:
    images among the tokens, then text alone."""
    own = {**OVERRIDES.get(kind, {}), **OVERRIDES.get(f"{kind}/{head}", {})}
    torch.manual_seed(0)
    module, config = built(kind, name, own, own.get("labels", 2 if head == "question" else LABELS))
    errors: list[Exception] = []
    for changed, more in attempts(module, head, own):
        try:
            return fitted(module, config, changed, {**own, **more})
        except Exception as error:
            errors.append(error)
            if (found := COUNTS.search(str(error))) and more.get("images"):
                tokens, features = map(int, found.groups())
                per_row = max(features // max(tokens // more["images"], 1), 1)
                try:
                    return fitted(module, config, changed, {**own, **more, "images": per_row})
                except Exception as again:
                    errors.append(again)
    raise errors[0]


def attempts(module: nn.Module, head: str, own: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return what is tried in turn as inputs of a model, as a head and numbers of its own: all that it takes, images
    without tokens in their place, spectra with their frames last, text alone, targets as long as the input, and at last
    no targets: the loss is then a regression of what the model gives."""
    names = inspect.signature(module.forward).parameters
    if "images" in own or "only" in own:
        yield head, {}
        return
    if head in MIXED and "pixel_values" in names and "input_ids" in names and head not in ("contrastive", "base"):
        yield head, {"images": 4}
    yield head, {}
    if "input_features" in names:  # as Whisper takes them, twice as long as its encoder's positions
        yield head, {"mel_first": True, "sweep_frames": 2 * LARGE}
    if "input_ids" in names and ("pixel_values" in names or "input_features" in names or "input_values" in names):
        yield head, {"only": ("input_ids",)}
        yield "causal", {"only": ("input_ids",)}
    if head in ("seq2seq", "speech"):
        yield "causal", {}
    if any(n in names for n in GRIDS):
        yield head, {"patches": "image"}
        yield head, {"patches": "merged"}
    yield "base", {}


def built(kind: str, name: str, own: Mapping[str, Any], labels: int) -> tuple[nn.Module, Any]:
    """Return a tiny model of a class, and its config with a number of ``labels``."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "build" in own:
        config = own["build"](transformers)
    else:
        plain = CONFIG_MAPPING[kind]()
        arguments = merged(shrunk(plain), own.get("config", {}))
        config = completed(CONFIG_MAPPING[kind](**arguments))
    if getattr(config, "num_labels", None) != labels:
        config.id2label = {i: f"L{i}" for i in range(labels)}
    kind_of_model = getattr(transformers, name)
    wanted = getattr(kind_of_model, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):  # a model of text alone, of a config of more
        config = next((one for one in configs(config) if isinstance(one, wanted)), config)
    module = kind_of_model(config)
    count = sum(p.numel() for p in module.parameters())
    if count > LARGEST:
        raise ValueError(f"the tiny config still has {count:,} parameters")
    return module.float().train(), config


def merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a config with a family's own, also inside sub-configs; None takes one away."""
    found = dict(base)
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        elif value is DEFAULT:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def fitted(module: nn.Module, config: Any, head: str, own: Mapping[str, Any]) -> Case:
    """Return the model with batches that fit it: its forward is tried on one."""
    shape = Shape.of(module, config, head, own)
    several = batches(lambda draws: batch(shape, draws))
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    if "wrap" in own:
        module = own["wrap"](module)
    elif head in ("contrastive", "base") and "return_loss" in shape.names:
        module = WithLossOf(module)
    elif name := packed(shape):
        module = Packed(module, name)
    elif head == "detection":
        module = Detector(module)
    output = (copy.deepcopy(module) if "leaves" in own else module)(**several[0])
    found = (
        output
        if isinstance(output, Tensor)
        else output.get("loss")
        if isinstance(output, Mapping)
        else getattr(output, "loss", None)
    )
    if found is None or found.dim():
        loss = Regression()
        wanted = Regression.wanted(output, ROWS[0])
        for step, (rows, one) in enumerate(zip(ROWS, several, strict=True)):
            one["wanted"] = Draws(91 + step, rows).numbers(*wanted)
    # Each row has as many boxes as all others, so that the loss is a mean over rows; a trial also ignores some.
    return Case(module, several, loss, "rows" if head == "detection" else None)
