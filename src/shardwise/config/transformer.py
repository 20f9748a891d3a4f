"""Build models of the transformers library from a table of values, without any download."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError, did_you_mean

from .factories import blame
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
    complete = dict(values)
    if "use_cache" in parameters:
        complete.setdefault("use_cache", False)  # only generation uses it
    if text is not None:
        complete = _for_text(complete, parameters, aliases, text)

    def construct() -> nn.Module:
        with blame("model.transformers", name):
            # Every model gets a config object of its own, for a model may change it.
            model: nn.Module = model_class(config_class(**complete))
        if text is not None and text.masked:
            _check_masked(name, model)
        return model

    with blame("model.config", values):
        config_class(**complete)
    return construct


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


def _model_class(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        wrong = f"transformers cannot be imported ({error})"
        legal = "install it (pip install transformers), or choose model.name or model.factory"
        raise ConfigError.on(f'model.transformers = "{name}"', wrong, legal) from error
    with blame("model.transformers", name):
        found = getattr(transformers, name, None)
    base = transformers.PreTrainedModel
    if not (isinstance(found, type) and issubclass(found, base)) or getattr(found, "config_class", None) is None:
        models = [word for word in dir(transformers) if "For" in word or word.endswith(("Model", "HeadModel"))]
        wrong = f"not a model class of transformers {transformers.__version__}"
        near = did_you_mean(name, models)
        raise ConfigError.on(f'model.transformers = "{name}"', wrong, 'such as "LlamaForCausalLM".', near)
    return found
