"""The keys of the section ``[model]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..rules import (
    choice,
    integer,
    key,
    number,
    reference,
    settings,
    switch,
    table,
    text,
    texts,
)  # fmt: skip

ALL_LINEAR = "all-linear"
LORA = settings(
    'a table such as {rank = 8, alpha = 16, dropout = 0.0, targets = "all-linear"}',
    {
        "rank": (integer(1), 8),
        "alpha": (number(0, open_=True), 16.0),
        "dropout": (number(0, below=1), 0.0),
        "targets": (texts(f'"{ALL_LINEAR}", or the name of linear layers, such as "q_proj"'), ALL_LINEAR),
    },
)


def _weighs(text: str) -> bool:
    return text in ("rows", "sum") or (text.startswith("targets:") and len(text) > len("targets:"))


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: a model is given by one of ``name``, ``factory``, ``transformers`` and ``pretrained``; without any
    of them it is ``name = "gpt"``. The sizes belong to ``name``.
    """

    name: str | None = key(
        choice("gpt", "llama"),
        does="a model that comes with shardwise",
        otherwise='`"gpt"`',
    )
    factory: str | None = key(
        reference("a function that returns an nn.Module,"),
        does="a function that returns the `nn.Module`, as `file.py:function` or `package.module:function`",
        otherwise="none",
        legal="a function that can be imported",
    )
    transformers: str | None = key(
        text('the name of a model class, such as "LlamaForCausalLM"', str.isidentifier),
        does="the name of a model class of transformers",
        otherwise="none",
        legal='such as `"LlamaForCausalLM"`',
    )
    pretrained: str | None = key(
        text("the path of a Hugging Face folder, with config.json and weights in safetensors"),
        does=(
            "a Hugging Face folder to fine-tune: class, config, weights, tokenizer and generation config come from "
            "there, and go with what the run exports"
        ),
        otherwise="none",
        legal="the path of a folder with `config.json` and weights in safetensors",
    )
    lora: Mapping[str, Any] | None = key(
        LORA,
        does=(
            "for models of transformers: trains adapters of low rank beside frozen linear layers, by peft; `rank` "
            "is theirs, `alpha` / `rank` scales them, `dropout` is that of their inputs, and `targets` are the layers"
        ),
        otherwise="none",
        legal=(
            '`{rank = 8, alpha = 16, dropout = 0.0, targets = "all-linear"}`, which are the defaults of its keys, or '
            '`targets = ["q_proj", "v_proj"]`'
        ),
    )
    loss: str | None = key(
        reference("a function loss(output, batch),"),
        does="a function `loss(output, batch)`, for a model whose `forward` does not return the loss",
        otherwise="none",
        legal="as for `factory`",
    )
    loss_weight: str | None = key(
        text('"rows", "sum" or "targets:FIELD"', _weighs),
        does=(
            "for a model that cannot be captured: what its loss is of its rows, where a trial at the "
            "start does not show that"
        ),
        otherwise="found by trial",
        legal=(
            '`"rows"` (a mean over rows), `"sum"`, or `"targets:FIELD"` (a mean over the entries of a '
            "field that are not -100)"
        ),
    )
    vocabulary: int | None = key(
        integer(1),
        does="the number of tokens in the embedding table",
        otherwise="the tokenizer's; with a `data.factory` that of bytes",
        legal="1 or more, at least the tokenizer's",
    )
    width: int | None = key(
        integer(1),
        does="elements of a token's hidden state",
        otherwise="192",
        legal="1 or more, a multiple of `heads`",
    )
    layers: int | None = key(
        integer(1),
        does="the number of blocks",
        otherwise="4",
    )
    heads: int | None = key(
        integer(1),
        does="the number of attention heads in a block",
        otherwise="6",
        legal="a divisor of `width`; for llama, heads of an even size",
    )
    kv_heads: int | None = key(
        integer(1),
        does="llama only: the number of key and value heads, each of which serves `heads / kv_heads` query heads",
        otherwise="`heads`",
        legal="a divisor of `heads`",
    )
    hidden: int | None = key(
        integer(1),
        does="elements of a token inside the MLP",
        otherwise="4 × `width`; for llama 8/3 × `width`, rounded up to a multiple of 32",
    )
    context: int | None = key(
        integer(1),
        does="the number of positions that the model knows",
        otherwise="`data.sequence_length`",
        legal="at least `data.sequence_length`",
    )
    dropout: float | None = key(
        number(0, below=1),
        does="gpt only: the probability that an element is dropped",
        otherwise="0",
    )
    experts: int | None = key(
        integer(1),
        does="the number of experts in each block, among which a router chooses for each token (docs/experts.md)",
        otherwise="none: each block has an MLP",
    )
    experts_per_token: int | None = key(
        integer(1),
        does="with `experts`: the number of experts that a token gets",
        otherwise="2, or 1 of a single expert",
        legal="1 to `experts`",
    )
    shared_experts: int | None = key(
        integer(0),
        does="with `experts`: the number of further experts, which every token has",
        otherwise="0",
    )
    capacity_factor: float | None = key(
        number(0, open_=True),
        does=(
            "with `experts`: no expert takes more tokens of a sequence than this times their mean number, rounded up; "
            "others are dropped"
        ),
        otherwise="none: no token is dropped",
    )
    balance: str | None = key(
        choice("switch", "gshard", "none"),
        does="with `experts`: the loss that grows as tokens gather at few experts, after Switch or GShard",
        otherwise='`"switch"`',
    )
    balance_weight: float | None = key(
        number(0),
        does="with `experts`: the factor on that loss",
        otherwise="0.01",
    )
    z_weight: float | None = key(
        number(0),
        does="with `experts`: the factor on the router's z-loss, which keeps its logits small",
        otherwise="0",
    )
    bias_rate: float | None = key(
        number(0),
        does=(
            "with `experts`: what each step adds to the bias of an expert with fewer tokens than the mean, and takes "
            "from that of one with more: a balance without a loss"
        ),
        otherwise="0: there are no biases",
    )
    tied: bool | None = key(
        switch(),
        does="llama only: whether embeddings and output projection are one parameter",
        otherwise="false",
    )
    config: Mapping[str, Any] | None = key(
        table("a table of values for the transformers config class"),
        does="the values of the transformers config class; with `pretrained` those that replace the folder's",
        otherwise="none",
        legal="a table",
    )
    arguments: Mapping[str, Any] | None = key(
        table("a table of keyword arguments of the factory"),
        does="keyword arguments of the factory",
        otherwise="none",
        legal="a table",
    )
    weights: str | None = key(
        text("the path of a safetensors file, or of a folder of them, to start from"),
        does="weights to start from, instead of random ones",
        otherwise="none",
        legal="a safetensors file, or a folder of them",
    )

    @property
    def of_transformers(self) -> bool:
        """Whether the model is one of transformers, which shifts labels itself."""
        return self.transformers is not None or self.pretrained is not None
