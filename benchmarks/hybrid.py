"""Time two kinds of parallelism together, 2 × 2 over four ranks, against the same built of torch's own parts.

    python benchmarks/hybrid.py [--only "zero-3 × tp" "tp × pp"] [--rounds 6] [--precision fp32] [--json FILE]

| pair | peer |
|---|---|
| zero-3 × tp | FSDP2 over shards of DTensor, once with logits gathered for the loss and once under ``loss_parallel`` |
| zero-3 × pp | ``torch.distributed.pipelining`` of stages under FSDP2, gathered once a step |
| dp × pp | the same with DDP |
| tp × pp | the same of stages that DTensor shards, with logits gathered and under ``loss_parallel`` |
| zero-3 × ep | transformers' expert parallelism with FSDP2, which shards experts over the two ranks that have them |
| tp × ep | the same with its tensor parallelism: every rank has a quarter of the experts, and two ranks the same rows |
| pp × ep | none: transformers refuses token dispatch in a pipeline |
| cp and any | none: torch's ``context_parallel`` has no rule for the attention of CPUs |

torch 2.13 says "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
registered".  Where there is no peer, shardwise's own plans of each axis alone over four ranks, in common memory, stand
in its place.

The task is the GPT of the other benchmarks (512 × 8 layers, 8 heads, vocabulary 8192, sequence 256) with AdamW and 2
rows for each rank.  With ep it is a Mixtral of transformers of half the width and layers, with cp there are half the
layers, and 1 row a rank of eight times the sequence.  Pipelines have the same stages, schedule and microbatches.  Peers
have the kernels that shardwise chooses (fused AdamW, the float32 matmul, the allocator's settings), a thread a rank and
gloo; shardwise runs over gloo, and in the ranks' common memory.

The contenders of a pair take turns in one run, and an ordinary loop on one rank gives the losses that all must have.
"× peer" is relative to the fastest contender that is not the pair's own; MiB is the most that was resident on a rank.
The limit is the same rows in ranks that never communicate: who computes the same products cannot be faster.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from alternate import Contender, StepMaker, alternate
from ranking import figures, finish, parser, table, task_of
from shardwise.launch.local import ALLOCATOR
from stages import KINDS, Pipeline
from task import Task, plain, planned
from torch_experts import transformers_experts
from torch_pipelines import TorchPipeline
from torch_tensor import dtensor
from zero import reference

RANKS = 4
AXES: Mapping[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero-3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "ep": {"ep": 2},
    "pp": {"pp": 2},
}
"""The keys of a config's ``[parallel]`` for two ranks on an axis."""
TIMES = " × "
PAIRS = [
    TIMES.join(pair)
    for pair in (
        ("zero-3", "tp"), ("zero-3", "pp"), ("dp", "pp"), ("tp", "pp"), ("zero-3", "ep"), ("tp", "ep"), ("pp", "ep"),
        ("zero-3", "cp"), ("tp", "cp"), ("pp", "cp"), ("cp", "ep"),
    )
]  # fmt: skip
PIPED = {"zero-3 × pp": "FSDP2", "dp × pp": "DDP", "tp × pp": "DTensor"}
"""The pairs whose peer is a pipeline of torch's, with what shares its stages."""
LOSS_PARALLEL = " + loss_parallel"
OVER_GLOO, IN_MEMORY = " over gloo", " in common memory"
SIZES = {"width": 512, "layers": 8, "heads": 8, "vocabulary": 8192, "sequence": 256, "rows": 2, "experts": 8}
STEPS, WARMUP = 2, 3


@dataclass(frozen=True)
class Race:
    """A pair of axes, what it trains, and how its pipelines run, if it has some."""

    pair: str
    task: Task
    schedule: str
    microbatches: int

    @property
    def axes(self) -> list[str]:
        return self.pair.split(TIMES)

    @property
    def pipeline(self) -> Pipeline:
        """The stages of this pair, which has an axis pp and another one."""
        other = next(axis for axis in self.axes if axis != "pp")
        return Pipeline(self.task, KINDS[self.schedule], 2, self.microbatches, **AXES[other])

    def keys(self, *axes: str) -> dict[str, Any]:
        """Return the keys of shardwise's plan on these axes: two, or one over all ranks."""
        found = {key: value for axis in axes for key, value in AXES[axis].items()}
        if len(axes) == 1:
            found |= {key: RANKS for key in found if key in ("dp", "tp", "cp", "ep", "pp")}
        if "pp" in axes:
            found |= {
                "schedule": self.schedule,
                "microbatches": self.microbatches,
                "stages_per_rank": KINDS[self.schedule].stages_per_rank,
            }
        return found

    def peers(self) -> dict[str, StepMaker]:
        """Return the peers of this pair; where there is none, the plans of each axis alone."""
        task = self.task
        if self.pair in PIPED:
            part = PIPED[self.pair]
            makes: dict[str, StepMaker] = {f"{part} × pipelining": self._piped(split_loss=False)}
            if part == "DTensor":
                makes[f"{part} × pipelining{LOSS_PARALLEL}"] = self._piped(split_loss=True)
            return makes
        if self.pair == "zero-3 × tp":
            name = "FSDP2 × DTensor"
            return {
                name: functools.partial(dtensor, task=task, dp=2),
                name + LOSS_PARALLEL: functools.partial(dtensor, task=task, dp=2, split_loss=True),
            }
        if self.pair == "zero-3 × ep":
            return {"transformers FSDP2 × EP": functools.partial(transformers_experts, task=task, ep=2)}
        if self.pair == "tp × ep":
            return {"transformers TP × EP": functools.partial(transformers_experts, task=task, ep=4, tp=2)}
        return {
            f"{axis} alone": functools.partial(planned, task=task, keys=self.keys(axis), backend="auto")
            for axis in self.axes
        }

    def _piped(self, *, split_loss: bool) -> StepMaker:
        return functools.partial(TorchPipeline, pipeline=self.pipeline, split_loss=split_loss)

    def contenders(self) -> list[Contender]:
        """Make the peers, and then shardwise's pair."""
        makers = self.peers()
        keys = self.keys(*self.axes)
        if self.pair in PIPED:
            keys |= self.pipeline.keys  # the peer's stages
        for name, backend in ((OVER_GLOO, "gloo"), (IN_MEMORY, "auto")):
            makers[self.pair + name] = functools.partial(planned, task=self.task, keys=keys, backend=backend)
        return [Contender(name, make, RANKS, environment=dict(ALLOCATOR)) for name, make in makers.items()]

    def run(self, rounds: int, expected: Sequence[float]) -> list[dict[str, Any]]:
        """Time the contenders and the limit, and return the contenders' rows."""
        every = self.contenders()
        loop = functools.partial(plain, task=self.task)
        limit = Contender("limit", loop, RANKS, connected=False, environment=dict(ALLOCATOR))
        alternate([limit, *every], rounds=rounds, steps=STEPS, warmup=WARMUP)
        base = min((one for one in every if not one.name.startswith(self.pair)), key=lambda one: one.median)
        most = {"pair": self.pair, "limit": limit.median, "limit_faster": base.median / limit.median}
        return [most | figures(one, base, expected, self.task) for one in every]


def task_for(pair: str, task: Task) -> Task:
    """Return what a pair of axes trains."""
    if "ep" in pair.split(TIMES):
        task = replace(task, family="mixtral", width=task.width // 2, layers=max(2, task.layers // 2))
    if "cp" in pair.split(TIMES):
        layers = task.layers if task.family == "mixtral" else max(2, task.layers // 2)
        task = replace(task, sequence=8 * task.sequence, rows=1, layers=layers)
    return task


def main() -> None:
    options_of = parser(__doc__, STEPS, names=PAIRS, microbatches=4, **SIZES)
    kinds = [name for name, kind in KINDS.items() if kind.torch and not kind.v]
    options_of.add_argument("--schedule", choices=kinds, default="1f1b")
    options = options_of.parse_args()
    if RANKS * options.rows % options.microbatches or options.microbatches % 2:
        options_of.error(f"--microbatches: legal: even, and of equal parts of {RANKS} × --rows rows")
    task = task_of(options)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {RANKS} ranks")
    references: dict[Task, list[float]] = {}
    rows: list[dict[str, Any]] = []
    for at, pair in enumerate(options.only):
        print(f"\nrun {at + 1} of {len(options.only)}: {pair}", file=sys.stderr, flush=True)
        this = task_for(pair, task)
        if this not in references:
            references[this] = reference(this, RANKS)
        found = Race(pair, this, options.schedule, options.microbatches).run(options.rounds, references[this])
        table(found, "peer", pair)
        limit, faster = found[0]["limit"], found[0]["limit_faster"]
        print(f"limit, ranks that never communicate: {limit * 1e3:.0f} ms, {faster:.2f} × peer")
        rows += found
    finish(rows, task, options)


if __name__ == "__main__":
    main()
