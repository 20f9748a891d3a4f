"""The keys of the section ``[train]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.core import plan
from shardwise.core.numeric_options import Dropout

from ..rules import (
    LARGEST,
    choice,
    distinct,
    either,
    integer,
    integers,
    key,
    number,
    reference,
    switch,
    text,
)  # fmt: skip

Resume = Literal["auto", "never"]


@dataclass(frozen=True)
class TrainConfig:
    """``[train]``: how long a run trains, on what, and what it reports meanwhile."""

    steps: int = key(
        integer(1),
        600,
        does="the number of steps of the run",
    )
    epochs: float | None = key(
        number(0, open_=True),
        does=(
            "instead of `steps`: how often the training data is passed; the last step of a pass has the rows that "
            "are left"
        ),
        otherwise="none; the run has `steps`",
    )
    seed: int = key(
        integer(0, most=LARGEST),
        0,
        does="the seed of initial values, of the order of samples and of all random numbers",
        legal="0 to 2⁶³ − 1",
    )
    devices: int = key(
        integer(1),
        does="the number of ranks",
        otherwise="as many devices as the batch can be divided over",
        legal="1 or more; at most the GPUs, where there are any",
    )
    threads: int = key(
        integer(1),
        does="the number of CPU threads of each rank",
        otherwise="the cores of the host / its ranks",
    )
    clip_norm: float = key(
        number(0),
        does="the norm to which gradients of a larger norm are scaled down; 0: no clipping",
        otherwise='1; with schedule `"pipedream"`, or with `clip_value`, 0',
    )
    clip_value: float | None = key(
        number(0, open_=True),
        does="the most that an element of the gradient may be away from 0; what is further away is brought there",
        otherwise="no such limit",
        legal='above 0, with `clip_norm` = 0; not with server `"async"` or `"stale"`',
    )
    run_dir: str = key(
        text("the path of a folder"),
        "runs/train",
        does="the folder of the run",
    )
    dropout: Dropout = key(
        choice(*plan.CHOICES["dropout"]),
        "exact",
        does="whether masks are the same on any number of ranks, or those of torch's faster kernels",
    )
    loss_scale: float | Literal["dynamic"] | None = key(
        either(choice("dynamic"), number(0, below=2.0**127, open_=True)),
        does=(
            'fp16 only: the factor of the loss; `"dynamic"`: it is halved by every overflow and doubled '
            "after 2000 steps without one"
        ),
        otherwise='`"dynamic"`',
        legal='`"dynamic"`, or a number above 0 that stays',
    )
    hang_timeout: float = key(
        number(0, open_=True),
        20.0,
        does="seconds without progress after which a rank counts as hung",
    )
    memory_gib: float | None = key(
        number(0, open_=True),
        does="the GiB that a rank's tensors may take on its device",
        otherwise="what the device has free, less what the process takes beside tensors",
    )
    sample_every: int = key(
        integer(0),
        0,
        does="the number of steps from one sample of generated text to the next; 0: none",
    )
    expert_load_every: int | None = key(
        integer(0),
        does=(
            "the number of steps from one to the next whose metrics say how many tokens each expert got, and how many "
            "were dropped; 0: none"
        ),
        otherwise="10 with `model.experts`, else 0",
    )
    max_restarts: int = key(
        integer(0),
        3,
        does="how often in a row ranks are restarted without a new checkpoint in between",
    )
    trace_steps: tuple[int, ...] = key(
        integers("a list of steps, counted from 0, from 1 on, such as [3]; [] for none", 1),
        (3,),
        does="the steps, counted from 0, in which a run records what each rank did when",
        legal="a list of steps from 1 on; `[]`: none",
    )
    sample_prompt: str | None = key(
        text("a text that is not empty"),
        does="the text that samples continue, those of `sample_every` and the one at the end",
        otherwise='a line break; with `data.source = "stdlib"` one and `def`; with `data.sft` a prompt of the data',
        legal="a text, for the models of `model.name` on text",
    )
    loggers: tuple[str, ...] = key(
        distinct(choice("tensorboard", "wandb", "mlflow")),
        (),
        does="for what curves, evaluations and samples are written too, beside the files in `run_dir` (docs/runs.md)",
        legal='a list of `"tensorboard"`, `"wandb"`, `"mlflow"`; each is an extra to install',
    )
    callbacks: tuple[str, ...] = key(
        distinct(reference("a function or class")),
        (),
        does="functions and classes of yours that look on while rank 0 trains (docs/runs.md)",
        legal="a list of functions or classes, each as `model.factory`",
    )
    tf32: bool = key(
        switch(),
        False,
        does="fp32 only: whether GPUs multiply matrices with 10 bits of mantissa",
    )
    deterministic: bool = key(
        switch(),
        False,
        does=(
            "whether a run gives the same bits each time on as many devices of the same kind; an op that "
            "cannot is an error"
        ),
    )
    resume: Resume = key(
        choice("auto", "never"),
        "auto",
        does="whether an unfinished run in `run_dir` is resumed, or set aside for a new one",
    )
