"""The sections of a config and the rule of every key.

A key whose default is None gets a default that depends on other keys (`defaults.py`), or stays None if it does not
apply. In a loaded config the defaults are filled in.
"""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shardwise.core import optim, plan
from shardwise.core.data_options import Gathered, Reduced, ReduceDtype, Rows
from shardwise.core.memory_options import Offload, Recompute
from shardwise.core.numeric_options import Dropout, Precision
from shardwise.core.optim import OptimizerName, Schedule
from shardwise.core.pipeline_options import Norm
from shardwise.core.tensor_options import Tensor, TensorPlan
from shardwise.data.sources import LEGAL as LEGAL_SOURCE
from shardwise.parallel.data import ZERO

from .rules import (
    LARGEST,
    Rule,
    choice,
    either,
    integer,
    integers,
    key,
    number,
    pair,
    reference,
    several,
    switch,
    table,
    tables,
    text,
    texts,
    words,
)  # fmt: skip


def _weighs(text: str) -> bool:
    return text in ("rows", "sum") or (text.startswith("targets:") and len(text) > len("targets:"))


Resume = Literal["auto", "never"]


@dataclass(frozen=True)
class ModelConfig:
    """``[model]``: the model is one of ``name`` (an own model, with its sizes), ``factory`` and ``transformers``."""

    name: str | None = key(choice("gpt", "llama"))
    factory: str | None = key(reference("a function that returns an nn.Module,"))
    transformers: str | None = key(text('the name of a model class, such as "LlamaForCausalLM"', str.isidentifier))
    loss: str | None = key(reference("a function loss(output, batch),"))
    loss_weight: str | None = key(text('"rows", "sum" or "targets:FIELD"', _weighs))
    vocabulary: int | None = key(integer(1))
    width: int | None = key(integer(1))
    layers: int | None = key(integer(1))
    heads: int | None = key(integer(1))
    kv_heads: int | None = key(integer(1))
    hidden: int | None = key(integer(1))
    context: int | None = key(integer(1))
    dropout: float | None = key(number(0, below=1))
    tied: bool | None = key(switch())
    config: Mapping[str, Any] | None = key(table("a table of values for the transformers config class"))
    arguments: Mapping[str, Any] | None = key(table("a table of keyword arguments of the factory"))
    weights: str | None = key(text("the path of a safetensors file, or of a folder of them, to start from"))


SOURCE = texts(LEGAL_SOURCE)
MIX = tables(
    "a list of tables such as {source = \"stdlib\", weight = 0.5}",
    {"source": SOURCE, "weight": number(0, open_=True)},
)  # fmt: skip


@dataclass(frozen=True)
class DataConfig:
    """``[data]``: the data is text (``source``, or ``mix``, several sources with weights) or a dataset (``factory``).

    ``batch_size`` is the number of rows of a step over all ranks, ``sequence_length`` is in tokens, and ``validation``
    is the fraction of documents set apart. Text is tokenised once, into ``cache_dir``; ``end_token`` is the token of a
    tokenizer.json that ends documents.
    """

    source: str | tuple[str, ...] | None = key(SOURCE)
    mix: tuple[Mapping[str, Any], ...] | None = key(MIX)
    text_field: str | None = key(text("the name of the column of text in .jsonl, .parquet and datasets"))
    tokenizer: str | None = key(
        text('"bytes", or the path of a tokenizer.json (`shardwise tokenizer train` makes one)')
    )
    end_token: str | None = key(text("the token of data.tokenizer that ends a document"))
    validation: float = key(number(0, below=1))
    attention: str | None = key(choice("full", "document"))
    cache_dir: str | None = key(text("the path of a folder for tokens"))
    factory: str | None = key(reference("a function that returns a map-style dataset of dicts of tensors,"))
    arguments: Mapping[str, Any] | None = key(table("a table of keyword arguments of the factory"))
    batch_size: int = key(integer(1), 16)
    sequence_length: int = key(integer(1), 128)

    @property
    def is_text(self) -> bool:
        """Whether the data is text, which is tokenised, and not a dataset of the user."""
        return self.factory is None


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: ``lr`` is the highest learning rate of ``schedule``; norms and biases have no weight decay."""

    name: OptimizerName = key(choice(*optim.CHOICES["name"]), "adamw")
    lr: float = key(number(0), 3e-3)
    betas: tuple[float, float] | None = key(pair(number(0, below=1)))
    weight_decay: float = key(number(0))
    schedule: Schedule = key(choice(*optim.CHOICES["schedule"]), "cosine")
    warmup_steps: int = key(integer(0))


@dataclass(frozen=True)
class ParallelConfig:
    """``[parallel]``: how the work of a step is divided.

    ``pp`` ranks form a pipeline with ``stages_per_rank`` stages on each, whose order ``schedule`` gives. ``stages`` are
    the numbers of units in the stages; by default the stages' costs are balanced. Under ``norm`` "barrier" stages wait
    for the norm of all, and under "post-validate" they update by their own norm and go back if that was wrong. Under
    "post-validate" and asynchronous schedules the pipeline is empty after every ``window`` steps, and before
    evaluations and checkpoints; ``vertical_sync`` is PipeDream's. Schedule "auto" follows ``timetable``
    (``core/pipeline_options.py``); without one the launcher measures the units before the first step and searches for
    the best timetable and number of stages. ``tp`` ranks share each layer: the recipe ``tensor`` shards parameters and
    what is computed with them; on its axes ``tensor_plan`` may leave that to a solver ("auto") or to ``pins``, a table
    of patterns of names and how to shard what they match. ``dp`` is the number of data-parallel ranks; they form
    ``dp_replicate`` groups, each of which holds all that stage ``zero`` of ZeRO shards. ``core/data_options.py``
    explains ``gathered``, ``prefetch``, ``reduced``, ``reduce`` and ``rows``. By default ``gathered`` and ``reduced``
    communicate as little as memory allows; ``prefetch`` is 1, and on GPUs as much as hides gathers under computing, if
    memory allows it.
    """

    pp: int = key(integer(1), 1)
    schedule: str = key(choice(*plan.CHOICES["schedule"]), "1f1b")
    stages_per_rank: int | None = key(integer(1))
    stages: tuple[int, ...] | None = key(several(integer(1)))
    norm: Norm = key(choice(*plan.CHOICES["norm"]), "barrier")
    window: int = key(integer(1), 32)
    vertical_sync: bool = key(switch(), False)
    timetable: tuple[str, ...] | None = key(several(text('a text for each rank, such as "F0.0 F0.1 B0.0 B0.1"')))
    tp: int = key(integer(1), 1)
    tensor: Tensor = key(choice(*plan.CHOICES["tensor"]), "1d")
    tensor_plan: TensorPlan = key(choice(*plan.CHOICES["tensor_plan"]), "recipe")
    pins: Mapping[str, str] | None = key(words('a table of patterns, such as "*.q_proj.weight" = "column"'))
    dp: int = key(integer(1))
    dp_replicate: int = key(integer(1), 1)
    zero: int = key(integer(0, most=len(ZERO) - 1), 0)
    gathered: Gathered | None = key(choice(*plan.CHOICES["gathered"]))
    prefetch: int | None = key(integer(0))
    reduced: Reduced | None = key(choice(*plan.CHOICES["reduced"]))
    reduce: ReduceDtype = key(choice(*plan.CHOICES["reduce"]), "auto")
    offload: Offload = key(choice(*plan.CHOICES["offload"]), "none")
    microbatches: int = key(integer(1), 1)
    rows: Rows = key(choice(*plan.CHOICES["rows"]), "microbatch")
    recompute: Recompute = key(choice(*plan.CHOICES["recompute"]), "none")
    precision: Precision = key(choice(*plan.CHOICES["precision"]), "fp32")


@dataclass(frozen=True)
class TrainConfig:
    """``[train]``: how long and on what a run trains. ``threads`` is the number for each rank. ``clip_norm`` 0 clips
    nothing; the default is 1, and 0 under schedule "pipedream". ``hang_timeout`` is in seconds. ``loss_scale``, for
    fp16 only, is "dynamic" or a fixed number. ``tf32``, for fp32 only, lets GPUs multiply matrices with 10 bits of
    mantissa. With ``deterministic`` a run gives the same bits each time on the same number of devices of the same kind,
    and ops that cannot are errors.

    ``eval_every`` and ``sample_every`` are in steps, 0 for never; an evaluation takes at most ``eval_batches`` batches.
    ``memory_gib`` is the memory for tensors of a rank on its device; by default it is what the device has free, on a
    GPU less what the process takes besides tensors. In the steps ``trace_steps`` each rank records its instructions
    with their times, for ``shardwise draw``.
    """

    steps: int = key(integer(1), 600)
    seed: int = key(integer(0, most=LARGEST), 0)
    devices: int = key(integer(1))
    threads: int = key(integer(1))
    clip_norm: float = key(number(0))
    run_dir: str = key(text("the path of a folder"), "runs/train")
    dropout: Dropout = key(choice(*plan.CHOICES["dropout"]), "exact")
    loss_scale: float | Literal["dynamic"] | None = key(
        either(choice("dynamic"), number(0, below=2.0**127, open_=True))
    )
    hang_timeout: float = key(number(0, open_=True), 20.0)
    memory_gib: float | None = key(number(0, open_=True))
    eval_every: int = key(integer(0))
    eval_batches: int = key(integer(1), 20)
    sample_every: int = key(integer(0), 0)
    max_restarts: int = key(integer(0), 3)
    trace_steps: tuple[int, ...] = key(
        integers("a list of steps, counted from 0, from 1 on, such as [3]; [] for none", 1), (3,)
    )
    tensorboard: bool = key(switch(), False)
    tf32: bool = key(switch(), False)
    deterministic: bool = key(switch(), False)
    resume: Resume = key(choice("auto", "never"), "auto")


@dataclass(frozen=True)
class CheckpointConfig:
    """``[checkpoint]``: a checkpoint is written every ``every`` steps (0: only at the end and on an interrupt). The
    last ``keep_last`` are kept, and those of steps that ``keep_every`` divides; ``staging_mib`` limits the memory of
    copies on their way to disk."""

    every: int = key(integer(0))
    keep_last: int = key(integer(1), 2)
    keep_every: int | None = key(integer(1))
    staging_mib: int | None = key(integer(1))


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}


def rules(section: str) -> dict[str, Rule]:
    """Return the rule of each key of a section."""
    return {field.name: field.metadata["rule"] for field in fields(SECTIONS[section])}
