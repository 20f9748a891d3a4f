"""The keys of the section ``[parallel]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.core import plan
from shardwise.core.data_options import Gathered, Reduced, ReduceDtype, Rows
from shardwise.core.memory_options import Offload, Recompute
from shardwise.core.numeric_options import Precision
from shardwise.core.pipeline_options import Norm
from shardwise.core.server_options import Push, Rate, Server
from shardwise.core.tensor_options import Context, Experts, Overlap, Tensor, TensorPlan
from shardwise.parallel.data import ZERO

from ..rules import (
    choice,
    integer,
    key,
    number,
    several,
    switch,
    text,
    words,
)  # fmt: skip


@dataclass(frozen=True)
class ParallelConfig:
    """``[parallel]``: the number of ranks is ``pp`` × ``dp`` × ``ep`` × ``cp`` × ``tp``. docs/pipelines.md,
    docs/experts.md, docs/context.md and docs/tensor.md explain the words.
    """

    pp: int = key(
        integer(1),
        1,
        does="the number of ranks in a pipeline",
    )
    schedule: str = key(
        choice(*plan.CHOICES["schedule"]),
        "1f1b",
        does="the order in which these ranks compute",
    )
    stages_per_rank: int | None = key(
        integer(1),
        does="the number of stages on each rank of a pipeline",
        otherwise="what the schedule takes",
        legal="1 or more, as the schedule takes",
    )
    stages: tuple[int, ...] | None = key(
        several(integer(1)),
        does="the number of units in each stage",
        otherwise="so that the stages' costs are balanced",
        legal="a number for each stage",
    )
    norm: Norm = key(
        choice(*plan.CHOICES["norm"]),
        "barrier",
        does="whether stages wait for the norm of all gradients before they update",
    )
    window: int = key(
        integer(1),
        32,
        does="the number of steps after which the pipeline is drained, where batches overlap",
    )
    vertical_sync: bool = key(
        switch(),
        False,
        does="pipedream only: whether all stages use the same version of the weights for a microbatch",
    )
    timetable: tuple[str, ...] | None = key(
        several(text('a text for each rank, such as "F0.0 F0.1 B0.0 B0.1"')),
        does='with schedule `"auto"`: an order of your own',
        otherwise="what the search finds",
        legal='a text for each rank, such as `"F0.0 F0.1 B0.0 B0.1"`',
    )
    tp: int = key(
        integer(1),
        1,
        does="the number of ranks that share each layer",
        legal="1 or more, as `tensor` takes",
    )
    tensor: Tensor = key(
        choice(*plan.CHOICES["tensor"]),
        "1d",
        does="the recipe by which these ranks share a layer",
    )
    tensor_plan: TensorPlan = key(
        choice(*plan.CHOICES["tensor_plan"]),
        "recipe",
        does="what decides how tensors are sharded",
    )
    experts: Experts = key(
        choice(*plan.CHOICES["experts"]),
        "inside",
        does="what each of these ranks has of a layer's experts: a part of every one, or some of them",
    )
    pins: Mapping[str, str] | None = key(
        words('a table of patterns, such as "*.q_proj.weight" = "column"'),
        does='with `"propagate"` and `"table"`: which dims of tensors to shard',
        otherwise="none",
        legal='a table of patterns, such as `"*.q_proj.weight" = "column"`',
    )
    ep: int = key(
        integer(1),
        1,
        does="the number of ranks that share the experts of each layer, and the rows of a batch",
    )
    cp: int = key(
        integer(1),
        1,
        does="the number of ranks that share each sequence",
    )
    context: Context = key(
        choice(*plan.CHOICES["context"]),
        "gathered",
        does="how attention joins the parts of a sequence: it gathers keys and values, or it has parts of the heads",
    )
    overlap: Overlap = key(
        choice(*plan.CHOICES["overlap"]),
        "none",
        does="what hides the exchanges of `tp`, `cp` and `ep`: nothing, or the computing of another microbatch",
    )
    links: str | None = key(
        text("the path of a file that `shardwise bench collectives --out` has written"),
        does="what was measured of the links between ranks, by which `tensor_plan`, `prefetch` and stages are chosen",
        otherwise="the rates that are assumed of the devices",
    )
    dp: int = key(
        integer(1),
        does="the number of data-parallel ranks",
        otherwise="all devices / (`pp` × `ep` × `cp` × `tp`)",
    )
    dp_replicate: int = key(
        integer(1),
        1,
        does="the number of groups of data-parallel ranks, each of which holds everything that `zero` shards",
        legal="a divisor of `dp`",
    )
    server: Server = key(
        choice(*plan.CHOICES["server"]),
        "none",
        does=(
            "whether ranks push gradients to servers, which update: all together, each rank for itself, or each within "
            "a bound"
        ),
    )
    server_ranks: int = key(
        integer(1),
        1,
        does=(
            "with `server`: how many servers there are, each of which has a range of all parameters: of the `dp` "
            'ranks, or, with `"async"` and `"stale"`, processes beside the `dp` workers'
        ),
        legal='1 or more; with `"sync"` at most the ranks of a group of `dp`',
    )
    server_host: str = key(
        text("a name or address of this host"),
        "127.0.0.1",
        does='with `"async"` and `"stale"`: the address at which servers listen, and workers look for them',
    )
    staleness: int = key(
        integer(0),
        0,
        does='with `server = "stale"`: how many pushes the fastest worker may be ahead of the slowest',
    )
    pull_every: int = key(
        integer(1),
        1,
        does='with `"async"` and `"stale"`: after how many pushes a worker pulls parameters again',
    )
    push_every: int = key(
        integer(1),
        1,
        does='with `"async"` and `"stale"`: how many batches a push has the gradient of, which is a step',
    )
    server_rate: Rate = key(
        choice(*plan.CHOICES["server_rate"]),
        "fixed",
        does="whether the learning rate of an update is divided by how many others came since its parameters, plus one",
    )
    push: Push = key(
        choice(*plan.CHOICES["push"]),
        "whole",
        does='with `"async"` and `"stale"`: how gradients are compressed on their way to servers',
    )
    push_share: float = key(
        number(0.0, open_=True, most=1.0),
        0.01,
        does='with `push = "top-k"`: the share of the elements of each part of a gradient that is sent',
    )
    local_steps: int = key(
        integer(0),
        0,
        does=(
            "how many steps each of the `dp_replicate` groups takes by itself before all meet (local SGD, DiLoCo); 0: "
            "they are one"
        ),
    )
    local_fragments: int = key(
        integer(1),
        1,
        does="in how many parts the parameters meet, one after the other and under computing; 1: all at once",
        legal="1 to `local_steps`",
    )
    local_mix: float = key(
        number(0.0, most=1.0),
        0.5,
        does="with several `local_fragments`: how much of its own parameters a group keeps where they meet",
        legal="0 to 1",
    )
    outer_lr: float = key(
        number(0.0),
        0.7,
        does="with `local_steps`: the learning rate of the outer step; 1 with momentum 0 is local SGD",
    )
    outer_momentum: float = key(
        number(0.0, below=1.0),
        0.9,
        does="with `local_steps`: the Nesterov momentum of the outer step",
    )
    zero: int = key(
        integer(0, most=len(ZERO) - 1),
        0,
        does="what data-parallel ranks shard: nothing, the optimizer's state, gradients too, parameters too",
        legal="0, 1, 2, 3",
    )
    gathered: Gathered | None = key(
        choice(*plan.CHOICES["gathered"]),
        does="ZeRO-3 only: how long gathered parameters stay",
        otherwise="what communicates least and fits",
    )
    prefetch: int | None = key(
        integer(0),
        does="how many units ahead of their use parameters are gathered",
        otherwise="1; on GPUs what hides gathers, if that fits",
    )
    reduced: Reduced | None = key(
        choice(*plan.CHOICES["reduced"]),
        does="ZeRO-2 and 3 only: when gradients go to their shards",
        otherwise="what communicates least and fits",
    )
    reduce: ReduceDtype = key(
        choice(*plan.CHOICES["reduce"]),
        "auto",
        does='the dtype in which gradients are summed over ranks; `"auto"` is the dtype in which they are kept',
    )
    sparse_gradients: str = key(
        choice("auto", *plan.CHOICES["sparse_gradients"]),
        "auto",
        does=(
            "whether, of a table whose lookups are sparse (`nn.Embedding(sparse=True)`), only the rows that were "
            'looked up travel and are updated; `"auto"`: where the optimizer (adagrad, or sgd; no weight decay) and '
            "the plan allow it"
        ),
    )
    offload: Offload = key(
        choice(*plan.CHOICES["offload"]),
        "none",
        does="what the host keeps",
    )
    microbatches: int = key(
        integer(1),
        1,
        does="the number of parts of a batch, which are computed one after the other",
    )
    rows: Rows = key(
        choice(*plan.CHOICES["rows"]),
        "microbatch",
        does=(
            "which rows meet where a model lets rows meet (BatchNorm, in-batch negatives): those of a "
            "microbatch, or those of the batch, for which all microbatches run up to there first"
        ),
        legal='`"microbatch"`, `"batch"` (with `pp` = 1)',
    )
    recompute: Recompute = key(
        choice(*plan.CHOICES["recompute"]),
        "none",
        does="which part of a unit's forward is computed again before its backward",
    )
    precision: Precision = key(
        choice(*plan.CHOICES["precision"]),
        "fp32",
        does="the dtype that computes",
    )
