"""A checkpoint's model is exported as a folder of safetensors files that other programs read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

from .adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, adapter_name, in_adapter, without_adapters
from .container import write_file
from .folder import sync_folder
from .manifest import TensorRecord
from .reader import Checkpoint
from .weights import EMA, INDEX, MODEL, SINGLE, aliases_of, model_tensors

SHARD_BYTES = 5 * 2**30  # the most bytes of one file


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    adapter: bool = False,
    average: bool = False,
) -> list[Path]:
    """Write the model of a checkpoint into the new folder ``out`` and return the paths of its files.

    What adapters add (``model.lora``) is added to the weights; with ``adapter`` they alone are written, as peft does.
    With ``average`` the weights are their moving averages, ``optimizer.ema``; frozen ones and buffers have none.

    A model of ``transformers`` gets its ``config.json``, for ``from_pretrained``; its tied tensors are written once,
    unless that config turns tying off.  The metadata of any other model map the other names of a tied tensor to the one
    that is there.  A model of more than ``shard_bytes`` bytes is split into files with an index.  ``dtype`` converts
    floating tensors; without it they have the dtype of the folder that the run has started from, where that has one,
    else their own. The checkpoint is verified first, one tensor is in memory at a time, and ``out`` appears when all
    is written.

    Raises:
        ConfigError: a damaged checkpoint, one without a model or without the ``average``, an ``out`` that is not empty,
            or a failed write.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not empty; legal: a new or empty folder")
    if out.resolve() == Path.cwd():  # it would be replaced under the feet of the process
        raise ConfigError(f"{out}: is the current folder; legal: a new folder, or another empty one")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes: {shard_bytes} is not legal; legal: 1 or more")
    if average and not any(name.startswith(EMA) for name in checkpoint.tensors):
        wrong = "has no average of the weights, for the run has trained without optimizer.ema"
        raise ConfigError(f"{checkpoint.path}: {wrong}")
    checkpoint.verify()
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
        value = partial(_value, checkpoint, average)
        if adapter:
            files = _write_adapter(checkpoint, part, dtype, value)
        else:
            files = _write(checkpoint, part, shard_bytes, dtype, value)
        sync_folder(part)
        part.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [out / file for file in files]


def _write(
    checkpoint: Checkpoint, part: Path, shard_bytes: int, dtype: torch.dtype | None, whole: Callable[[str], Tensor]
) -> list[str]:
    """Write all files into ``part`` and return their names."""
    transformers, adapters = _transformers(checkpoint), Adapters.of_meta(checkpoint.meta)
    tensors = _tensors(checkpoint, dtype or dtype_of(transformers))
    aliases = {without_adapters(alias): without_adapters(name) for alias, name in aliases_of(checkpoint).items()}
    held = {without_adapters(name): name for name in tensors if not in_adapter(name)}
    tensors = {name: tensors[one] for name, one in held.items()}
    if transformers is not None and transformers["config"].get("tie_word_embeddings") is False:
        # from_pretrained ties nothing then, so each name needs its values
        tensors.update({alias: tensors[name] for alias, name in aliases.items()})
    metadata = {"format": "pt"} if transformers is not None else {"format": "pt", **aliases}
    shards = _shards(tensors, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    )

    def value(name: str) -> Tensor:
        return whole(name) if adapters is None else adapters.merged(name, whole)

    def read(name: str) -> Tensor:
        return value(held[aliases.get(name, name)]).to(tensors[name].dtype)

    for file, keys in zip(names, shards, strict=True):
        write_file(part / file, [(key, tensors[key].shape, tensors[key].dtype) for key in keys], read, metadata)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {key: file for file, keys in zip(names, shards, strict=True) for key in keys}
        _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        names.append(INDEX)
    if transformers is not None:
        _write_json(part / "config.json", config_json(transformers, [one.dtype for one in tensors.values()]))
        names.append("config.json")
    return names


def _value(checkpoint: Checkpoint, average: bool, name: str) -> Tensor:
    """Return a tensor of the model, or its ``average`` where it has one."""
    averaged = f"{EMA}{name}.average"
    return checkpoint.read(averaged if average and averaged in checkpoint.tensors else MODEL + name)


def _write_adapter(
    checkpoint: Checkpoint, part: Path, dtype: torch.dtype | None, whole: Callable[[str], Tensor]
) -> list[str]:
    """Write the adapters alone into ``part``, as peft does, and return the names of the files."""
    adapters = Adapters.of_meta(checkpoint.meta)
    if adapters is None:
        raise ConfigError(f"{checkpoint.path}: has no adapter, for the run has trained without model.lora")
    tensors = _tensors(checkpoint, dtype)
    held = {key: name for name in tensors if (key := adapter_name(name)) is not None}
    described = [(key, tensors[name].shape, tensors[name].dtype) for key, name in held.items()]
    write_file(
        part / ADAPTER_WEIGHTS, described, lambda key: whole(held[key]).to(tensors[held[key]].dtype),
        {"format": "pt"},
    )  # fmt: skip
    adapters.write_config(part)
    return [ADAPTER_WEIGHTS, ADAPTER_CONFIG]


def _tensors(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, TensorRecord]:
    """Return the model's tensors by their names in the model, with the dtypes that they are written in."""
    return {
        name: TensorRecord(one.shape, dtype if dtype is not None and one.dtype.is_floating_point else one.dtype, ())
        for name, one in model_tensors(checkpoint).items()
    }


def _transformers(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the class and config of a transformers model as the checkpoint has them; None for another model."""
    model = checkpoint.meta.get("model")
    found = model.get("transformers") if isinstance(model, Mapping) else None
    if found is None:
        return None
    if (
        not isinstance(found, Mapping)
        or not isinstance(found.get("class"), str)
        or not isinstance(found.get("config"), Mapping)
    ):
        raise ConfigError(f"{checkpoint.path}: meta.model.transformers has to hold a class and a config")
    if not isinstance(found["config"].get("model_type"), str):
        raise ConfigError(
            f"{checkpoint.path}: meta.model.transformers.config has no model_type, which from_pretrained needs"
        )
    return {"class": found["class"], "config": dict(found["config"]), "dtype": found.get("dtype")}


def dtype_of(transformers: Mapping[str, Any] | None) -> torch.dtype | None:
    """Return the dtype of the weights that a model of transformers has started from; None if it has none."""
    found = getattr(torch, str(transformers.get("dtype")), None) if transformers is not None else None
    return found if isinstance(found, torch.dtype) else None


def config_json(transformers: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return the content of ``config.json``: the model's class, and the dtype of its tensors if all have the same."""
    config = {**transformers["config"], "architectures": [transformers["class"]]}
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = str(floating.pop()).removeprefix("torch.")
    return config


def _shards(tensors: Mapping[str, TensorRecord], shard_bytes: int) -> list[list[str]]:
    """Return the tensor names of each file, in order, as many as fit; a larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards


def _write_json(path: Path, value: Mapping[str, Any] | Sequence[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
