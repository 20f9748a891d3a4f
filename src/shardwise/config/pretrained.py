"""A Hugging Face folder that a run starts from: what its ``config.json`` says, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.strict import parse_json, read_bytes
from shardwise.checkpoint.weights import read_weights
from shardwise.core.errors import ConfigError

from .draft import ConfigDraft
from .sections import rules

CONFIG_JSON, TOKENIZER_JSON = "config.json", "tokenizer.json"


@dataclass(frozen=True)
class PretrainedFolder:
    """A folder that ``save_pretrained`` wrote: the name of its model's class, and the content of ``config.json``."""

    path: Path
    class_name: str
    values: Mapping[str, Any]

    @staticmethod
    def open(path: str | Path) -> PretrainedFolder:
        """Read the folder's ``config.json``; raise :class:`ConfigError`, which says what the folder lacks."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder" if folder.exists() else f"{folder} does not exist")
        if (folder / "adapter_config.json").is_file() and not (folder / CONFIG_JSON).is_file():
            raise ConfigError(f"{folder} holds an adapter of peft, and no model")
        file = folder / CONFIG_JSON
        values = parse_json(file, read_bytes(file))
        classes = values.get("architectures") if isinstance(values, dict) else None
        if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
            raise ConfigError(f"{file} does not name the class of the model as its architectures")
        if not isinstance(values.get("model_type"), str):
            raise ConfigError(f"{file} has no model_type")
        return PretrainedFolder(folder, classes[0], values)

    @property
    def tokenizer(self) -> str | None:
        """The path of the folder's tokenizer.json; None if it has none."""
        file = self.path / TOKENIZER_JSON
        return str(file) if file.is_file() else None

    @property
    def dtype(self) -> str | None:
        """The dtype of the folder's floating weights; None if they have several."""
        found = {dtype for dtype in read_weights(self.path).dtypes.values() if dtype.is_floating_point}
        return str(found.pop()).removeprefix("torch.") if len(found) == 1 else None


def pretrained_there(draft: ConfigDraft) -> None:
    """Refuse a ``model.pretrained`` that is no such folder, and ``model.weights`` beside one."""
    if not draft.given("model.pretrained") or not draft.sound("model.pretrained"):
        return
    try:
        PretrainedFolder.open(draft["model.pretrained"])
    except (ConfigError, OSError, ValueError) as error:
        draft.refuse("model.pretrained", rules("model")["pretrained"].legal, str(error))
        return
    if draft.given("model.weights") and draft.sound("model.weights"):
        draft.refuse("model.weights", "left out, for model.pretrained has the weights")
