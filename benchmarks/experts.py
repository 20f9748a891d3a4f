"""Time expert parallelism beside data parallelism and transformers' expert parallelism of the same mixture of experts.

    python benchmarks/experts.py [--ranks 2] [--experts 8] [--rounds 6] [--precision fp32]
                                 [--only "transformers EP" ep] [--json FILE]

The task is a Mixtral of transformers, unchanged, of which every rank has its own rows.  shardwise has all experts on
every rank (``dp``), shards them like all else at rest (``zero-3``), or sends tokens to the ranks that have their
experts (``ep``), over gloo and in the ranks' common memory.  DDP is torch's, and "transformers EP" (torch_experts.py)
that library's own expert parallelism, with FSDP2 or with DDP for all that is no expert; they have the same kernels
(fused AdamW, the float32 matmul, the allocator's settings), a thread a rank and gloo.  Those of --only, and DDP, take
turns in one run, and an ordinary loop on one rank gives the losses that all must have.  MiB is the most that was
resident on a rank.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence

import torch

from alternate import Contender, StepMaker, alternate
from ranking import figures, finish, parser, table, task_of
from shardwise.launch.local import ALLOCATOR
from task import Task, expert_parallel, ours, plain
from torch_experts import transformers_experts, transformers_experts_ddp
from zero import reference

IN_MEMORY = " in common memory"
BASE, PEER, WITH_DDP = "DDP", "transformers EP", " + DDP"
SIZES = {"experts": 8, "width": 256, "layers": 4, "heads": 8, "vocabulary": 8192, "sequence": 256, "rows": 2}
NAMES = [BASE, PEER, PEER + WITH_DDP, *(plan + memory for memory in ("", IN_MEMORY) for plan in ("dp", "zero-3", "ep"))]
STEPS, WARMUP = 2, 3


def contenders(task: Task, ranks: int, only: Sequence[str]) -> list[Contender]:
    """Make DDP and those contenders of ``only``, :data:`NAMES`."""
    makers: dict[str, StepMaker] = {
        BASE: functools.partial(plain, task=task, ddp=True),
        PEER: functools.partial(transformers_experts, task=task, ep=ranks),
        PEER + WITH_DDP: functools.partial(transformers_experts_ddp, task=task),
    }
    for name, backend in (("", "gloo"), (IN_MEMORY, "auto")):
        makers["dp" + name] = functools.partial(ours, task=task, backend=backend)
        makers["zero-3" + name] = functools.partial(ours, task=task, zero=3, backend=backend)
        makers["ep" + name] = functools.partial(expert_parallel, task=task, backend=backend)
    return [
        Contender(name, make, ranks, environment=dict(ALLOCATOR))
        for name, make in makers.items()
        if name in (BASE, *only)
    ]


def main() -> None:
    options_of = parser(__doc__, STEPS, names=NAMES, ranks=2, **SIZES)
    options = options_of.parse_args()
    if options.ranks < 2 or options.experts % options.ranks:
        options_of.error("--ranks and --experts: legal: 2 ranks and more, and a multiple of their number of experts")
    task = task_of(options, family="mixtral")
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.ranks} ranks")
    expected = reference(task, options.ranks)
    every = contenders(task, options.ranks, options.only)
    alternate(every, rounds=options.rounds, steps=STEPS, warmup=WARMUP)
    rows = [figures(one, every[0], expected, task) for one in every]
    table(rows, BASE)
    finish(rows, task, options)


if __name__ == "__main__":
    main()
