"""A folder of a transformers model as an encoder of sentences: its tokens, its forward, pooling and normalisation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError, describe

Pooling = Literal["mean", "cls", "max"]
POOLINGS = ("mean", "cls", "max")
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"}
LONGEST = 512  # tokens of a text, where neither the folder nor the user says


@dataclass(frozen=True)
class Recipe:
    """How a folder's model makes one vector of a text: ``folder`` has the model, and texts are cut to ``length``
    tokens."""

    folder: Path
    pooling: Pooling
    normalize: bool
    length: int

    @staticmethod
    def of(
        folder: Path, pooling: str | None = None, normalize: bool | None = None, length: int | None = None
    ) -> Recipe:
        """Return what the folder's files for sentence-transformers say, or else mean pooling; what is given counts
        more.  Raises :class:`ConfigError` for a folder that has no model, or modules that are not known."""
        if not (folder / "modules.json").is_file():
            found = Recipe(_checked(folder), "mean", False, LONGEST)
        else:
            found = _of_modules(folder)
        if pooling is not None and pooling not in POOLINGS:
            raise ConfigError(f"--pooling {pooling}: legal: {', '.join(POOLINGS)}")
        longest = _read(found.folder / "config.json").get("max_position_embeddings")
        if length is not None and (length < 1 or (longest and length > longest)):
            raise ConfigError(f"--max-length {length}: legal: 1 to {longest or 'what the model takes'}")
        return Recipe(
            found.folder,
            pooling or found.pooling,  # type: ignore[arg-type]
            found.normalize if normalize is None else normalize,
            length or min(found.length, longest or found.length),
        )


def _of_modules(folder: Path) -> Recipe:
    model, pooling, normalize, length = folder, "mean", False, LONGEST
    for module in _read(folder / "modules.json"):
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            model = _checked(path)
            settings = path / "sentence_bert_config.json"
            length = (_read(settings).get("max_seq_length") if settings.is_file() else None) or LONGEST
        elif kind == "Pooling":
            pooling = _pooling(path / "config.json")
        elif kind == "Normalize":
            normalize = True
        else:
            wrong = f"has a module {kind}, which is not known"
            raise ConfigError.on(str(folder / "modules.json"), wrong, "Transformer, Pooling and Normalize")
    return Recipe(model, pooling, normalize, int(length))  # type: ignore[arg-type]


def _pooling(path: Path) -> str:
    found = _read(path)
    named = found.get("pooling_mode")
    chosen = [key for key, on in found.items() if key.startswith("pooling_") and on]
    modes = [named] if isinstance(named, str) else chosen
    known = [MODES.get(mode, mode) for mode in modes]
    if len(known) != 1 or known[0] not in POOLINGS:
        raise ConfigError.on(str(path), f"pools by {' and '.join(map(str, modes)) or 'nothing'}", ", ".join(POOLINGS))
    return str(known[0])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; legal: the files of a model's folder") from None


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: there is no config.json; legal: the folder of a transformers model")
    return folder


class Sentences:
    """An encoder of texts on one device: ``encode`` returns their vectors, fp32 of shape (texts, width)."""

    def __init__(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, batch_size: int) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.recipe, self.device, self.batch_size = recipe, device, batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(str(recipe.folder))
        if self.tokenizer.pad_token is None:  # many models that write have none; any will do, for the mask hides it
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        try:
            model = AutoModel.from_pretrained(str(recipe.folder), dtype=dtype)
        except Exception as error:  # whatever transformers says of the folder
            wrong = f"its model cannot be loaded: {describe(error)}"
            raise ConfigError.on(
                str(recipe.folder), wrong, "the folder of a transformers model, with weights"
            ) from error
        self.model = model.eval().to(device)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of ``texts``, in their order; that of a text without tokens is zero.

        Texts of like lengths are computed together, for padding costs as much as tokens."""
        tokens = self.tokenizer(list(texts), truncation=True, max_length=self.recipe.length)
        lengths = np.array([len(ids) for ids in tokens["input_ids"]])
        order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        parts, whole = [], np.zeros((len(texts), self.model.config.hidden_size), np.float32)
        for start in range(0, len(order), self.batch_size):
            own = order[start : start + self.batch_size]
            rows = {name: [value[i] for i in own] for name, value in tokens.items()}
            padded = self.tokenizer.pad(rows, return_tensors="pt")
            batch = {name: value.to(self.device, non_blocking=True) for name, value in padded.items()}
            hidden = self.model(**batch).last_hidden_state
            parts.append(self.pooled(hidden, batch["attention_mask"]))
        if parts:
            whole[order] = torch.cat(parts).to("cpu").numpy()
        return whole

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return one fp32 vector for each row of ``hidden`` (rows, tokens, width), of the tokens in ``mask``."""
        hidden, kept = hidden.float(), mask.unsqueeze(-1).float()
        if self.recipe.pooling == "cls":
            first = mask.argmax(1)  # of a tokenizer that pads on the left it is not the first place
            vector = hidden[torch.arange(len(hidden), device=hidden.device), first]
        elif self.recipe.pooling == "max":
            vector = hidden.masked_fill(kept == 0, -torch.inf).amax(1)
        else:
            vector = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(vector, dim=-1) if self.recipe.normalize else vector
