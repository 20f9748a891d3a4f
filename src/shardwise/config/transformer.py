"""Build models of the transformers library from a table of values, without any download."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError, did_you_mean

from .factories import blame
from .pretrained import PretrainedFolder
from .sections import ModelConfig
from .toml import shown

COMMON_KEYS = ("attn_implementation", "num_labels", "output_attentions")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TextShape:
    """The text that a model must take: samples of ``length`` tokens, from a vocabulary of ``vocabulary`` tokens. With
    ``masked`` a mask limits attention to documents.
    """

    length: int
    vocabulary: int
    masked: bool


def transformers_constructor(name: str, values: Mapping[str, Any], text: TextShape | None) -> Callable[[], nn.Module]:
    """Return a function that makes a model of class ``name`` from config ``values``.

    ``text`` sets the vocabulary and the least context length; it is None for other data. Raises :class:`ConfigError`
    for an unknown class, unknown keys, and values that the config class refuses.
    """
    model_class = _model_class(name)
    config_class = model_class.config_class
    parameters = _check_keys(config_class, values)
    complete = _without_cache(values, parameters)
    if text is not None:
        aliases: Mapping[str, str] = getattr(config_class, "attribute_map", {})
        complete = _for_text(complete, parameters, aliases, text)

    with blame("model.config", values):
        config_class(**complete)
    return lambda: _construct("model.transformers", name, lambda: model_class(config_class(**complete)), text)


def pretrained_constructor(
    folder: PretrainedFolder, values: Mapping[str, Any], text: TextShape | None
) -> Callable[[], nn.Module]:
    """Return a function that makes a model of the class and with the config of a folder, whose values ``values``
    replace; its weights are not read.

    Raises :class:`ConfigError` as :func:`transformers_constructor` does, and where the model cannot take the text.
    """
    key = f"model.pretrained = {shown(str(folder.path))}"
    model_class = _model_class(folder.class_name, "model.pretrained", str(folder.path))
    config_class = model_class.config_class
    parameters = _check_keys(config_class, values)
    # Masters have the dtype of training, whatever that of the file is.
    complete = {name: value for name, value in folder.values.items() if name not in ("dtype", "torch_dtype")}
    complete = _without_cache({**complete, **values}, parameters, always="use_cache" not in values)

    with blame("model.config", values):
        made = config_class.from_dict(dict(complete))
    if text is not None:
        _check_text(key, made, text)

    def construct() -> nn.Module:
        # Every model gets a config object of its own, for a model may change it.
        config = config_class.from_dict(dict(complete))
        return _construct("model.pretrained", str(folder.path), lambda: model_class(config), text)

    return construct


def _check_keys(config_class: Any, values: Mapping[str, Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a config class; raise :class:`ConfigError` for values that it does not have."""
    parameters = inspect.signature(config_class.__init__).parameters
    aliases: Mapping[str, str] = getattr(config_class, "attribute_map", {})
    legal = sorted({*parameters, *aliases, *COMMON_KEYS} - {"self", "kwargs"})
    unknown = [key for key in values if key not in legal]
    if unknown:
        raise ConfigError(
            "\n".join(
                f"model.config.{key}: unknown key of {config_class.__name__}; legal: {', '.join(legal)}."
                f"{did_you_mean(key, legal)}"
                for key in unknown
            )
        )
    return parameters


def _without_cache(
    values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], always: bool = False
) -> dict[str, Any]:
    """Return the values without the cache of keys, which only generation uses, unless they ask for it."""
    if "use_cache" not in parameters or ("use_cache" in values and not always):
        return dict(values)
    return {**values, "use_cache": False}


def _construct(key: str, name: str, make: Callable[[], nn.Module], text: TextShape | None) -> nn.Module:
    with blame(key, name):
        model = make()
    if text is not None and text.masked:
        _check_masked(type(model).__name__, model)
    return model


def described(model: ModelConfig, module: nn.Module) -> dict[str, Any] | None:
    """Return what ``from_pretrained`` needs to know of a model of transformers: its class and its config; None for
    another model.

    The config is that of the folder that the run has started from, with the values of ``model.config``; ``use_cache``,
    which training turns off, is as it would be without. ``dtype`` is that of the folder's weights, if they have one.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    values, dtype = json.loads(json.dumps(config.to_dict(), default=str)), None
    if model.pretrained is not None:
        folder = PretrainedFolder.open(model.pretrained)
        values, dtype = {**folder.values, **(model.config or {})}, folder.dtype
    elif model.transformers is not None and "use_cache" in values and "use_cache" not in (model.config or {}):
        default = inspect.signature(type(config).__init__).parameters.get("use_cache")
        values["use_cache"] = True if default is None else default.default
    return {"class": type(module).__name__, "config": values, "dtype": dtype}


def _for_text(
    values: dict[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    aliases: Mapping[str, str],
    text: TextShape,
) -> dict[str, Any]:
    """Return the values with the text's vocabulary and context length; :class:`ConfigError` if they set less."""
    least = {
        "vocab_size": text.vocabulary,
        aliases.get("max_position_embeddings", "max_position_embeddings"): text.length,
    }
    for key, needed in least.items():
        spellings = (key, *(alias for alias, real in aliases.items() if real == key))
        given = next((word for word in spellings if word in values), None)
        if given is not None and isinstance(values[given], int) and values[given] < needed:
            raise ConfigError(
                f"model.config.{given} = {values[given]}: legal: at least {needed}, for text of {text.vocabulary} "
                f"tokens in samples of data.sequence_length = {text.length}"
            )
        if given is None and key in parameters:
            default = parameters[key].default
            short = not isinstance(default, int) or default < needed
            values[key] = needed if key == "vocab_size" or short else default
    for token in SPECIAL_TOKENS:
        default = parameters[token].default if token in parameters else None
        if isinstance(default, int) and default >= values.get("vocab_size", default + 1):
            values.setdefault(token, None)
    return values


def _check_text(key: str, config: Any, text: TextShape) -> None:
    """Raise :class:`ConfigError` if a model with this config has fewer tokens or positions than the text."""
    inner = config.get_text_config()
    tokens, positions = (getattr(inner, name, None) for name in ("vocab_size", "max_position_embeddings"))
    if isinstance(tokens, int) and tokens < text.vocabulary:
        wrong = f"its embedding has {tokens} tokens, and data.tokenizer {text.vocabulary}"
        raise ConfigError.on(key, wrong, "the tokenizer of the folder, which is taken if data.tokenizer is left out")
    if isinstance(positions, int) and positions < text.length:
        wrong = f"it knows {positions} positions, and data.sequence_length is {text.length}"
        raise ConfigError.on(key, wrong, f"data.sequence_length of at most {positions}")


def _check_masked(name: str, model: nn.Module) -> None:
    """Raise :class:`ConfigError` if a model cannot use the mask of documents."""
    legal = (
        'legal: data.attention = "full", or a model with attention_mask and position_ids and '
        'model.config.attn_implementation = "sdpa"'
    )
    takes = inspect.signature(model.forward).parameters
    missing = [field for field in ("attention_mask", "position_ids") if field not in takes]
    used = getattr(model.config, "_attn_implementation", None)
    if missing or used != "sdpa":  # other kinds of attention would add the boolean mask to the scores
        why = f"its forward takes no {' and no '.join(missing)}" if missing else f"its attention is {shown(used)}"
        raise ConfigError(f'data.attention = "document": not with {name}, for {why}; {legal}')


def _model_class(name: str, key: str = "model.transformers", value: str | None = None) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        wrong = f"transformers cannot be imported ({error})"
        legal = "install it (pip install transformers), or choose model.name or model.factory"
        raise ConfigError.on(f'{key} = "{value or name}"', wrong, legal) from error
    with blame(key, value or name):
        found = getattr(transformers, name, None)
    base = transformers.PreTrainedModel
    if not (isinstance(found, type) and issubclass(found, base)) or getattr(found, "config_class", None) is None:
        models = [word for word in dir(transformers) if "For" in word or word.endswith(("Model", "HeadModel"))]
        wrong = f"not a model class of transformers {transformers.__version__}"
        wrong = wrong if value is None else f"its class {name} is {wrong}"
        near = did_you_mean(name, models)
        raise ConfigError.on(f'{key} = "{value or name}"', wrong, 'such as "LlamaForCausalLM".', near)
    return found
