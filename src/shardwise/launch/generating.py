"""Let a trained model write: that of a run, of a Hugging Face folder, or of a folder with an adapter of peft."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.backend import Backend
from shardwise.checkpoint.adapters import ADAPTER_CONFIG
from shardwise.checkpoint.reader import latest
from shardwise.checkpoint.weights import fit_weights
from shardwise.config import build_model, load_model_config
from shardwise.config.pretrained import CONFIG_JSON, TOKENIZER_JSON
from shardwise.core.errors import ConfigError, describe
from shardwise.data.chat import open_template
from shardwise.data.tokenizer import JsonTokenizer, Tokenizer, open_tokenizer
from shardwise.models import generate
from shardwise.report.files import ADAPTER, CONFIG, MODEL, PRETRAINED, RESULT, WEIGHTS

from .folder import CHECKPOINTS
from .model_folder import GENERATION
from .results import TEMPERATURE
from .subject import initial_values

TOKENS = 100
LEGAL = "the folder of a run, a Hugging Face folder (config.json), or one with an adapter of peft"


@dataclass(frozen=True)
class Choice:
    """How many ``tokens`` are written at most (None: :data:`TOKENS`, or as many as there is room for), and how they are
    drawn: ``temperature`` 0 takes the likeliest, None what the model's folder says, else that of the
    samples of a run; ``top_k`` and ``top_p`` leave only likely tokens."""

    tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Written:
    """The ``text`` that a model has written after a ``prompt``, the number of its ``tokens``, and whether it has ended
    by itself."""

    prompt: str
    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True)
class Writer:
    """A model that writes text; ``tokenizer_name`` is "bytes", or the path of its tokenizer.json."""

    module: nn.Module
    tokenizer: Tokenizer
    tokenizer_name: str

    @staticmethod
    def open(path: Path) -> Writer:
        """Load the model of a folder on the device of this machine; raise :class:`ConfigError` where there is none."""
        found = _opener(path)(path)
        device = Backend.here().device(0) if Backend.here().asynchronous else torch.device("cpu")
        found.module.to(device).eval()
        return found

    def write(self, prompt: str, choice: Choice, chat: bool = False) -> Written:
        """Return what the model writes after a prompt, or with ``chat`` its answer to it as a message of a user."""
        asked = self._asked(prompt, chat)
        choice = replace(choice, tokens=self._room(len(asked), choice.tokens))
        device = next(self.module.parameters()).device
        ids = torch.tensor([asked], device=device)
        found = self._by_library(ids, choice) if hasattr(self.module, "generate") else self._by_us(ids, choice)
        tokens = found[0, len(asked) :].tolist()
        ended = bool(tokens) and tokens[-1] in self._ends
        return Written(prompt, self.tokenizer.decode(tokens[:-1] if ended else tokens), len(tokens), ended)

    def _asked(self, prompt: str, chat: bool) -> list[int]:
        if chat:
            try:
                return open_template(self.tokenizer_name, self.tokenizer).prompt([{"role": "user", "content": prompt}])
            except ValueError as error:
                raise ConfigError(f"--chat: {error}") from error
        if isinstance(self.tokenizer, JsonTokenizer):
            tokens = [*self.tokenizer.begin, *self.tokenizer.encode_marked(prompt)[0]]
        else:
            tokens = [int(token) for token in self.tokenizer.encode([prompt.encode(errors="replace")])[0]]
        return tokens or [self.tokenizer.end]  # as after the end of another document

    def _room(self, asked: int, tokens: int | None) -> int:
        """Return the most tokens to write after ``asked``; raise :class:`ConfigError` if a model of transformers does
        not know as many positions."""
        config = getattr(self.module, "config", None)
        most = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
        room = most - asked if isinstance(most, int) else tokens or TOKENS
        if room < (tokens or 1):
            wrong = f"the model knows {most} positions, and the prompt has {asked} tokens"
            legal = f"at most {room}" if room > 0 else "a shorter prompt"
            raise ConfigError.on("--tokens" if tokens is None else f"--tokens {tokens}", wrong, legal)
        return min(TOKENS, room) if tokens is None else tokens

    @property
    def _ends(self) -> list[int]:
        """The tokens that end a text: the tokenizer's, and those of the generation config."""
        named = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return sorted({self.tokenizer.end, *([named] if isinstance(named, int) else named or [])})

    def _by_us(self, ids: torch.Tensor, choice: Choice) -> torch.Tensor:
        generator = torch.Generator(device=ids.device).manual_seed(choice.seed)
        temperature = TEMPERATURE if choice.temperature is None else choice.temperature
        return generate(
            self.module, ids, choice.tokens or TOKENS, temperature, generator, top_k=choice.top_k, top_p=choice.top_p,
            stop=self.tokenizer.end,
        )  # fmt: skip

    def _by_library(self, ids: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Let transformers write, with its cache of keys and values and the folder's generation config."""
        given: dict[str, Any] = {
            "top_k": choice.top_k,
            "top_p": choice.top_p,
            "temperature": choice.temperature or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if choice.temperature == 0:
            given = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        elif given:
            given["do_sample"] = True
        module: Any = self.module
        with Backend.here().forked_generator(), torch.no_grad():
            torch.manual_seed(choice.seed)
            found: torch.Tensor = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=choice.tokens, use_cache=True,
                eos_token_id=self._ends, pad_token_id=self.tokenizer.end, **given,
            )  # fmt: skip
        return found


def _opener(path: Path) -> Callable[[Path], Writer]:
    """Return what opens a folder of this kind, or raise :class:`ConfigError`."""
    for name, opens in ((CONFIG, _of_run), (ADAPTER_CONFIG, _of_adapter), (CONFIG_JSON, _of_folder)):
        if (path / name).is_file():
            return opens
    wrong = "holds neither a run nor a model" if path.is_dir() else "no such folder"
    raise ConfigError.on(str(path), wrong, LEGAL)


def _of_run(path: Path) -> Writer:
    """Open the model that a run has trained so far: of its end, or of its latest checkpoint."""
    text = (path / CONFIG).read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    if "factory" in tables.get("data", {}):
        raise ConfigError.on(str(path), "its data comes from data.factory, so there is no tokenizer", "a run on text")
    if (path / RESULT).is_file() and (path / MODEL).is_dir():
        return _of_folder(path / MODEL)
    kept = path / PRETRAINED
    config = load_model_config(text, str(kept) if kept.is_dir() else None)
    constructor, _ = build_model(config)
    start = initial_values(config, constructor)
    last = latest(path / CHECKPOINTS)
    finished = (path / RESULT).is_file() and (path / WEIGHTS).is_file()
    if last is None and not finished:
        raise ConfigError.on(str(path), "it has neither a checkpoint nor weights yet", "a run with a checkpoint")
    weights = path / WEIGHTS if finished else Path(str(last))
    module = start.with_weights(fit_weights(weights, start.module, "the weights of the run")).whole()
    if hasattr(module, "generation_config") and (kept / GENERATION).is_file():
        from transformers import GenerationConfig

        module.generation_config = GenerationConfig.from_pretrained(kept)  # type: ignore[assignment]
    tokenizer = str(config.data.tokenizer)
    return Writer(module, open_tokenizer(tokenizer, config.data.end_token), tokenizer)


def _of_folder(path: Path) -> Writer:
    """Open a Hugging Face folder."""
    tokenizer = path / TOKENIZER_JSON
    if not tokenizer.is_file():
        legal = "a folder with one, which AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes"
        raise ConfigError.on(str(path), f"it has no {TOKENIZER_JSON}", legal)
    module = _loaded(path)
    return Writer(module, open_tokenizer(str(tokenizer)), str(tokenizer))


def _of_adapter(path: Path) -> Writer:
    """Open an adapter of peft, and the model that it is for."""
    if path.name == ADAPTER and (path.parent / CONFIG).is_file():
        return _of_run(path.parent)
    named = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not named or not Path(named).is_dir():
        wrong = f"its {ADAPTER_CONFIG} says that it is for {named}, which is no folder here"
        raise ConfigError.on(str(path), wrong, "an adapter whose base_model_name_or_path is a folder")
    base = _of_folder(Path(named))
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError.on(
            str(path), f"peft cannot be imported ({error})", "pip install 'shardwise[lora]'"
        ) from error
    merged = PeftModel.from_pretrained(base.module, path).merge_and_unload()
    return Writer(merged, base.tokenizer, base.tokenizer_name)


def _loaded(path: Path) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        wrong = f"transformers cannot be imported ({error})"
        raise ConfigError.on(str(path), wrong, "pip install 'shardwise[transformers]'") from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # what is printed is the text
    try:
        found: nn.Module = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except Exception as error:  # whatever the library says of a damaged folder
        raise ConfigError.on(str(path), f"its model cannot be loaded: {describe(error)}", LEGAL) from error
    return found
