"""The keys of the section ``[validation]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.metrics import READY, Goal, is_ready

from ..rules import choice, distinct, integer, key, number, reference, switch, table, text
from .data import SOURCE

METRIC = text(
    f'{", ".join(READY)}, or a function as "path/to/file.py:function"',
    lambda word: is_ready(word) or (":" in word and word.rpartition(":")[2].isidentifier()),
)


@dataclass(frozen=True)
class ValidationConfig:
    """``[validation]``: what a run is evaluated on, how often, and by which metrics. The data are a ``share`` of those
    of ``[data]``, which are then not trained on, or data of their own: a ``source`` or a ``factory``.
    """

    share: float = key(
        number(0, below=1),
        does=(
            "the share of `[data]` that is set apart for evaluations: of documents, or of the examples of `sft`, by a "
            "hash of each; of a factory's samples by a keyed permutation"
        ),
        otherwise="0.01 of text; with a `data.factory`, or with validation data of its own, 0",
        legal="from 0 to below 1; 0 with `source` or `factory`",
    )
    source: str | tuple[str, ...] | None = key(
        SOURCE,
        does=(
            "text to evaluate on, which is turned into samples like that of `data.source`; with `data.sft` prompts "
            "with answers"
        ),
        otherwise="none",
        legal='as `data.source`: `"stdlib"`, a file, a folder, a glob, or a list of these; with `data.sft` as that',
    )
    factory: str | None = key(
        reference("a function that returns a map-style dataset, an IterableDataset or a DataLoader,"),
        does="a function that returns the map-style dataset to evaluate on",
        otherwise="none",
        legal="as `model.factory`",
    )
    arguments: Mapping[str, Any] | None = key(
        table("a table of keyword arguments of the factory"),
        does="keyword arguments of `factory`",
        otherwise="none",
        legal="a table",
    )
    every: int = key(
        integer(0),
        does=(
            "the number of steps from one evaluation to the next (there is one after the last step too); "
            "0: no evaluation"
        ),
        otherwise="a tenth of `train.steps`; without validation data 0",
    )
    batches: int = key(
        integer(1),
        20,
        does="the largest number of batches in an evaluation; their rows are spread evenly over the data",
    )
    ema: bool | None = key(
        switch(),
        does="whether evaluations are of the average of the weights, `optimizer.ema`",
        otherwise="`true` where there is one",
    )
    metrics: tuple[str, ...] | None = key(
        distinct(METRIC),
        does=(
            "what an evaluation measures besides the loss; a function is called as `metric(outputs, batch)` and "
            "returns `(sum, count)`, or a dict of these by name; one without parameters returns an object of "
            "torchmetrics"
        ),
        otherwise="none; of text, the perplexity is always measured",
        legal=(
            'a list of `"accuracy"`, `"top-K"` (such as `"top-5"`), `"perplexity"`, `"f1"`, `"f1-binary"` and '
            '`"path/to/file.py:function"`'
        ),
    )
    patience: int | None = key(
        integer(1),
        does="training ends once this number of evaluations in a row have not bettered `watch`",
        otherwise="none: training takes `train.steps` steps",
    )
    watch: str | None = key(
        text("the name of a metric"),
        does="the metric that `patience` looks at",
        otherwise='with `patience` that of `checkpoint.best`, else `"validation_loss"`',
        legal='`"validation_loss"`, or the name of a metric',
    )
    goal: Goal | None = key(
        choice("max", "min"),
        does="whether more or less of `watch` is better",
        otherwise='`"min"` for `"validation_loss"` and `"perplexity"`, else `"max"`',
    )
