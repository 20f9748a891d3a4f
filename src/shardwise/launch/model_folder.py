"""The folders of Hugging Face that a run leaves: the fine-tuned model with its tokenizer, and its adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.adapters import ADAPTER_WEIGHTS, Adapters, adapter_name
from shardwise.checkpoint.export import config_json, dtype_of
from shardwise.checkpoint.weights import SINGLE
from shardwise.config import Config
from shardwise.config.lora import adapters_of
from shardwise.config.pretrained import CONFIG_JSON, TOKENIZER_JSON
from shardwise.config.transformer import described
from shardwise.data.chat import TEMPLATE_FILE
from shardwise.data.tokenizer import SETTINGS
from shardwise.report.files import ADAPTER, MODEL, PRETRAINED, WEIGHTS
from shardwise.runtime.whole_state import WholeState

from .ready import Ready
from .results import save_weights, write_json

GENERATION = "generation_config.json"
OF_TOKENIZER = (
    TOKENIZER_JSON, SETTINGS, TEMPLATE_FILE, "chat_template.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
COMPANIONS = (GENERATION, "preprocessor_config.json", "processor_config.json", *OF_TOKENIZER)


def keep_pretrained(config: Config) -> None:
    """Copy what the folder of ``model.pretrained`` has beside its weights into the run's folder, so that what the run
    exports does not depend on that folder."""
    if config.model.pretrained is None:
        return
    kept = Path(config.train.run_dir) / PRETRAINED
    kept.mkdir(exist_ok=True)
    _copy(Path(config.model.pretrained), kept, (CONFIG_JSON, *COMPANIONS))


def model_facts(run: Ready) -> dict[str, Any]:
    """Return what a checkpoint has to say of the model, so that it can be exported."""
    config, found = run.config.model, described(run.config.model, run.module)
    adapters = adapters_of(config, run.module)
    facts = {"transformers": found, "lora": None if adapters is None else adapters.to_meta()}
    return {name: value for name, value in facts.items() if value is not None}


def write_models(run: Ready, whole: WholeState) -> list[Path]:
    """Write the trained model into the run's folder, and return what was written; all ranks call it together.

    A fine-tuned model is the folder ``model`` for ``from_pretrained``, adapters are the folder ``adapter`` for peft,
    and the weights of any other model are a file, ``weights.safetensors``.
    """
    config, folder, first = run.config.model, run.folder, run.trainer.comm.rank == 0
    written = []
    adapters = adapters_of(config, run.module)
    if adapters is not None:
        written.append(folder / ADAPTER)
        _write_adapter(adapters, whole, folder / ADAPTER, first)
    if config.pretrained is None:
        written.append(folder / WEIGHTS)
        save_weights(whole, folder / WEIGHTS)
    elif adapters is None:
        written.append(folder / MODEL)
        facts = described(config, run.module)
        assert facts is not None, "a class of transformers has a config"
        _write_model(run.config, facts, whole, folder / MODEL, first)
    return written


def _write_adapter(adapters: Adapters, whole: WholeState, folder: Path, first: bool) -> None:
    if first:
        folder.mkdir(exist_ok=True)
        adapters.write_config(folder)
    save_weights(whole, folder / ADAPTER_WEIGHTS, key=adapter_name)


def _write_model(config: Config, facts: Mapping[str, Any], whole: WholeState, folder: Path, first: bool) -> None:
    dtype = dtype_of(facts)
    if first:
        folder.mkdir(exist_ok=True)
        trained = [one.dtype for one in whole.describe().values()] if dtype is None else [dtype]
        write_json(folder / CONFIG_JSON, config_json(facts, trained))
        add_companions({"model": vars(config.model), "data": vars(config.data)}, folder.parent, folder)
    save_weights(whole, folder / SINGLE, dtype=dtype)


def add_companions(config: Mapping[str, Any], run_dir: Path, out: Path) -> list[Path]:
    """Copy what belongs to a model of transformers beside its weights into ``out``: the tokenizer that a run with
    ``config`` (section, key, value) has used, and the rest of ``model.pretrained``; return the new files.

    What is gone by now is left out; of ``model.pretrained`` the run's folder has a copy.
    """
    pretrained = config.get("model", {}).get("pretrained")
    data = config.get("data", {})
    tokenizer = Path(str(data.get("tokenizer", "")))
    own = pretrained is not None and tokenizer == Path(str(pretrained)) / TOKENIZER_JSON
    copied: list[Path] = []
    if pretrained is not None:
        kept = run_dir / PRETRAINED
        names = COMPANIONS if own else [name for name in COMPANIONS if name not in OF_TOKENIZER]
        copied = _copy(kept if kept.is_dir() else Path(str(pretrained)), out, names)
    if own or tokenizer.suffix != ".json" or not tokenizer.is_file():
        return copied
    copied += _copy(tokenizer.parent, out, [name for name in OF_TOKENIZER if name != TOKENIZER_JSON])
    shutil.copyfile(tokenizer, out / TOKENIZER_JSON)
    if not (out / SETTINGS).exists():
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": data.get("end_token")}
        (out / SETTINGS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        copied.append(out / SETTINGS)
    return [*copied, out / TOKENIZER_JSON]


def _copy(source: Path, out: Path, names: Any) -> list[Path]:
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, out / name)
    return [out / name for name in found]
