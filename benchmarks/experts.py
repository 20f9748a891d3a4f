"""Time expert parallelism beside data parallelism of the same mixture of experts.

    python benchmarks/experts.py [--ranks 2] [--experts 8] [--rounds 6] [--precision fp32] [--json FILE]

The task is a Mixtral of transformers, unchanged, of which every rank has its own rows.  shardwise has all experts on
every rank (``dp``), shards them like all else at rest (``zero-3``), or sends tokens to the ranks that have their
experts (``ep``), over gloo and in the ranks' common memory; DDP is torch's, with the same kernels.  All take turns in
one run, and an ordinary loop on one rank gives the losses that all must have.  MiB is the most that was resident.
"""

from __future__ import annotations

import argparse
import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alternate import Contender, Step, alternate
from beside import figures, report
from shardwise.launch.local import ALLOCATOR
from task import Task, ours, plain, undivided
from zero import reference

IN_MEMORY = " in common memory"
BASE = "DDP"
STEPS, WARMUP = 2, 3


class Mixture(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import MixtralForCausalLM

        self.model = MixtralForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


@dataclass(frozen=True)
class ExpertTask(Task):
    """A mixture of ``experts``, of which each token takes two."""

    experts: int = 8

    def model(self) -> nn.Module:
        from transformers import MixtralConfig

        torch.manual_seed(0)
        return Mixture(MixtralConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=2 * self.width,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads,
            max_position_embeddings=self.sequence, num_local_experts=self.experts, num_experts_per_tok=2,
        ))  # fmt: skip


def divided(rank: int, ranks: int, *, task: ExpertTask, backend: Literal["auto", "gloo"] = "gloo") -> Step:
    """Make the step of expert parallelism, whose ranks read the rows of all."""
    from shardwise import Plan
    from shardwise.parallel.experts import expert_parallel
    from shardwise.runtime.connect import connect

    plan = expert_parallel(Plan.of(precision=task.precision), ranks)
    trainer, batch = undivided(task, plan, ranks, comm=connect(plan.mesh, task.place, backend=backend))
    return lambda: trainer.step(batch).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch for each rank")
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of {STEPS} steps each")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if options.ranks < 2 or options.experts < options.ranks:
        parser.error("--ranks and --experts: legal: 2 ranks and more, and an expert for each")
    task = ExpertTask(
        experts=options.experts, width=options.width, layers=options.layers, rows=options.rows,
        precision=options.precision,
    )  # fmt: skip
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.ranks} ranks")
    expected = reference(task, options.ranks)
    makers: dict[str, Any] = {BASE: functools.partial(plain, task=task, ddp=True)}
    for name, backend in (("", "gloo"), (IN_MEMORY, "auto")):
        makers["dp" + name] = functools.partial(ours, task=task, backend=backend)
        makers["zero-3" + name] = functools.partial(ours, task=task, zero=3, backend=backend)
        makers["ep" + name] = functools.partial(divided, task=task, backend=backend)
    every = [Contender(name, make, options.ranks, environment=dict(ALLOCATOR)) for name, make in makers.items()]
    alternate(every, rounds=options.rounds, steps=STEPS, warmup=WARMUP)
    rows = [figures(one, every[0], expected, task) for one in every]
    report(rows, BASE, task, options)


if __name__ == "__main__":
    main()
