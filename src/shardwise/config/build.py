"""From a configuration to what it describes: the model, the loss, the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data import decode, open_corpus
from shardwise.data.samples import Samples
from shardwise.models import GPT, Llama

from .config import Config
from .defaults import KEYS_OF_KIND
from .factories import call, load_function
from .sections import ModelConfig
from .toml import shown
from .transformer import transformers_constructor

Constructor = Callable[[], nn.Module]
LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor]
Decode = Callable[[Iterable[int]], str]


def build_model(config: Config) -> tuple[Constructor, LossFunction | None]:
    """A function that makes the model, and the user's ``loss(output, batch)`` if there is one.

    Whatever can be checked without making the model is checked here; ConfigError, here or from the
    constructor, names the key, and for a function of the user's the file and line where it failed.
    """
    model = config.model
    loss = None if model.loss is None else load_function("model.loss", model.loss)
    if model.transformers is not None:
        length = None if config.data.source is None else config.data.sequence_length
        return transformers_constructor(model.transformers, model.config or {}, length), loss
    if model.factory is not None:
        load_function("model.factory", model.factory)
        return _factory_constructor(model, aligned=config.data.source is not None and loss is None), loss
    sizes = {name: getattr(model, name) for name in KEYS_OF_KIND[str(model.name)]}
    return lambda: GPT(**sizes) if model.name == "gpt" else Llama(**sizes), loss


def build_dataset(config: Config) -> tuple[Any, Decode | None]:
    """The map-style dataset, and for text the function that turns tokens into it.

    Labels of text are the next tokens; for ``model.transformers`` the tokens themselves, for those models
    shift them. ConfigError for data that cannot be read, is empty, or is no dataset of dicts of tensors
    (sample 0 is tried).
    """
    data = config.data
    if data.factory is None:
        shifted = config.model.transformers is None
        return open_corpus(str(data.source), data.sequence_length, shifted=shifted), decode
    dataset = call("data.factory", data.factory, data.arguments or {})
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"data.factory = {shown(data.factory)}: it returned {_kind(dataset)}; legal: a map-style dataset "
            "(len(dataset) and dataset[index]) of dicts of tensors"
        )
    Samples(dataset)
    return dataset, None


def build_plan(config: Config) -> Plan:
    """How the work of a step is divided."""
    parallel = config.parallel
    return Plan(
        mesh=Mesh.of(dp=parallel.dp),
        microbatches=parallel.microbatches,
        recompute=parallel.recompute,
        precision=parallel.precision,
        dropout=config.train.dropout,
    )


def build_optimizer(config: Config) -> OptimizerChoice:
    """The optimizer and its learning rate over the steps of the run."""
    optimizer = config.optimizer
    chosen = OptimizerChoice(
        name=optimizer.name,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=config.train.steps,
    )
    return chosen if optimizer.betas is None else replace(chosen, betas=optimizer.betas)


def _factory_constructor(model: ModelConfig, aligned: bool) -> Constructor:
    reference, arguments = str(model.factory), model.arguments or {}

    def construct() -> nn.Module:
        made = call("model.factory", reference, arguments)
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model.factory = {shown(reference)}: it returned {_kind(made)}; legal: an nn.Module")
        if aligned and any(base.__name__ == "PreTrainedModel" for base in type(made).__mro__):
            # It would learn to predict the token after the next one, and nobody would notice.
            raise ConfigError(
                f"model.factory = {shown(reference)}: {type(made).__name__} is a transformers model, which "
                "shifts labels itself, but those of data.source are shifted already; legal: "
                "model.transformers with [model.config], a data.factory, or a model.loss of yours"
            )
        return made

    return construct


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
