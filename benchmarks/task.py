"""What the contenders of a benchmark train, and the loops that train it: an ordinary one, alone or with DDP, and
shardwise's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alternate import Step


@dataclass(frozen=True)
class Task:
    """A language model that trains with AdamW on ``rows`` sequences for each rank, the same in every step."""

    precision: Literal["fp32", "bf16"] = "fp32"
    family: Literal["gpt", "llama", "mixtral"] = "gpt"
    vocabulary: int = 8192
    width: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int | None = None  # for a Llama only
    hidden: int | None = None  # the width of the MLP
    experts: int = 8  # for a Mixtral only, each of whose tokens takes two
    sequence: int = 256
    rows: int = 2
    device: str = "cpu"
    clip_norm: float | None = None  # the norm that gradients are clipped to

    @property
    def place(self) -> torch.device:
        """The device of this rank."""
        if self.device == "cpu":  # works also with a checkout from before there was a Backend
            return torch.device("cpu")
        from shardwise.backend import Backend

        backend = Backend.of(self.device)
        found = backend.device()
        backend.select(found)
        return found

    @property
    def tokens(self) -> int:
        """The number of tokens of a rank in a step."""
        return self.rows * self.sequence

    def model(self) -> nn.Module:
        """Make the model on the CPU, with the same weights in every process."""
        from shardwise.models import GPT, Llama

        torch.manual_seed(0)
        sizes = {"vocabulary": self.vocabulary, "width": self.width, "layers": self.layers, "heads": self.heads}
        if self.family == "mixtral":
            return Mixture(self)
        if self.family == "gpt":
            return GPT(**sizes, hidden=self.hidden, context=self.sequence)
        return Llama(**sizes, hidden=self.hidden, kv_heads=self.kv_heads, context=self.sequence)

    def batch(self, ranks: Iterable[int]) -> dict[str, Tensor]:
        """Return the rows of these ranks on the device; each field has the shape (rows of all of them, sequence)."""
        generators = [torch.Generator().manual_seed(rank) for rank in ranks]
        shape = (self.rows, self.sequence + 1)
        ids = torch.cat([torch.randint(0, self.vocabulary, shape, generator=each) for each in generators]).to(
            self.place
        )
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class Mixture(nn.Module):
    """A Mixtral of transformers, which returns its loss alone."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        self.model = MixtralForCausalLM(MixtralConfig(
            vocab_size=task.vocabulary, hidden_size=task.width, intermediate_size=task.hidden or 2 * task.width,
            num_hidden_layers=task.layers, num_attention_heads=task.heads, num_key_value_heads=task.heads,
            max_position_embeddings=task.sequence, num_local_experts=task.experts, num_experts_per_tok=2,
        ))  # fmt: skip

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def fast_matmul(task: Task) -> None:
    """Take the kernels for float32 products that shardwise takes: the fast ones where they are accurate.  On a CPU with
    units for bf16 they are not, and would make a loop in fp32 one in bf16."""
    from shardwise.launch.matmul import SQUARE, choose_matmul

    fast = "high"
    if task.device == "cpu":
        fast = choose_matmul([SQUARE, (task.tokens, task.width, task.vocabulary)]).precision
    torch.set_float32_matmul_precision(fast)


def fused_adamw(parameters: Iterable[Tensor] | Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def by_mesh(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return groups for an optimizer, of ordinary parameters and of DTensors by their mesh, since fused AdamW takes no
    mixture of these."""
    groups: dict[Any, list[Tensor]] = {}
    for one in parameters:
        groups.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return [{"params": group} for group in groups.values()]


def loop(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], *, autocast: bool
) -> Step:
    """Make the step of an ordinary loop."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(task.device, torch.bfloat16, enabled=autocast):
            loss: Tensor = model(**batch)
        loss.backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        return loss.detach()

    return step


def plain(
    rank: int, ranks: int, *, task: Task, tuned: bool = True, ddp: bool = False, rows_of: int | None = None,
    model: nn.Module | None = None,
) -> Step:  # fmt: skip
    """Make the step of an ordinary loop, with or without DDP around the model (by default the task's).

    With ``rows_of`` it has the rows of that many ranks."""
    if tuned:
        fast_matmul(task)
    model = (task.model() if model is None else model).to(task.place)
    if ddp:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=tuned)
    optimizer = fused_adamw(model.parameters()) if tuned else torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = task.batch([rank] if rows_of is None else range(rows_of))
    return loop(task, model, optimizer, batch, autocast=task.precision == "bf16")


def ours(rank: int, ranks: int, *, task: Task, zero: int = 0, backend: Literal["auto", "gloo"] = "auto") -> Step:
    """Make the step of shardwise's data parallelism."""
    trainer, given = divided(rank, ranks, task=task, zero=zero, backend=backend)
    return lambda: trainer.step(given).loss


def divided(
    rank: int, ranks: int, *, task: Task, zero: int = 0, backend: Literal["auto", "gloo"] = "auto",
    changes: dict[str, Any] | None = None
) -> tuple[Any, Any]:  # fmt: skip
    """Make a Trainer whose ranks have different rows, and this rank's batch; ``changes`` are options of the plan."""
    from shardwise import OptimizerChoice, Plan, Trainer
    from shardwise.data.loader import Batch
    from shardwise.parallel.data import data_parallel
    from shardwise.runtime.connect import connect

    fast_matmul(task)
    batch = task.batch([rank])
    plan = data_parallel(Plan.of(precision=task.precision, **(changes or {})), ranks, zero=zero)
    trainer = Trainer(
        task.model(),
        OptimizerChoice("adamw", lr=1e-4, decay="all"),
        plan,
        {name: values.cpu() for name, values in batch.items()},
        clip_norm=task.clip_norm,
        comm=connect(plan.mesh, task.place, backend=backend),
    )
    return trainer, Batch(batch, task.rows * ranks, (rank * task.rows,), (task.rows,))


def undivided(task: Task, plan: Any, ranks: int, **options: Any) -> tuple[Any, Any]:
    """Make a Trainer for a plan under which every rank has the rows of all ranks, and that batch."""
    return under(task, plan, 0, ranks, **options)


def under(task: Task, plan: Any, rank: int, ranks: int, **options: Any) -> tuple[Any, Any]:
    """Make a Trainer for a plan, and the part of the rows of all ranks that this rank has under it."""
    from shardwise import OptimizerChoice, Trainer
    from shardwise.core.layout import rank_rows
    from shardwise.data.loader import AXES, Batch

    fast_matmul(task)
    batch, rows = task.batch(range(ranks)), task.rows * ranks
    spans = rank_rows(rows, plan.microbatches, plan.mesh.axis_size(AXES), plan.mesh.index(rank, AXES))
    mine = {name: torch.cat([values[a:b] for a, b in spans]) for name, values in batch.items()}
    choice = OptimizerChoice("adamw", lr=1e-4, decay="all")
    example = {name: values.cpu() for name, values in mine.items()}
    trainer = Trainer(task.model(), choice, plan, example, clip_norm=task.clip_norm, **options)
    return trainer, Batch(mine, rows, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def tensor_parallel(
    rank: int, ranks: int, *, task: Task, tensor: Literal["1d", "1d-sp"],
    backend: Literal["auto", "gloo", "alone"] = "auto", **more: Any,
) -> Step:  # fmt: skip
    """Make the step of shardwise's tensor parallelism, by the plan that the config's keys give, ``more`` of them."""
    return planned(rank, ranks, task=task, keys={"tp": ranks, "tensor": tensor, **more}, backend=backend)


def planned(
    rank: int, ranks: int, *, task: Task, keys: Mapping[str, Any], backend: Literal["auto", "gloo", "alone"] = "auto"
) -> Step:
    """Make the step of the plan that these keys of a config's ``[parallel]`` give."""
    trainer, given = under_keys(rank, ranks, task=task, keys=keys, backend=backend)
    return lambda: trainer.step(given).loss


def under_keys(rank: int, ranks: int, *, task: Task, keys: Mapping[str, Any], backend: str) -> tuple[Any, Any]:
    """Make a Trainer for the plan that these keys of a config's ``[parallel]`` give, and this rank's batch."""
    from shardwise.config.build import build_plan
    from shardwise.config.config import load_config

    keys = {"dp": 1, "precision": task.precision, **keys}
    plan = build_plan(load_config(overrides=[f"parallel.{key}={value}" for key, value in keys.items()]))
    return under(task, plan, rank, ranks, comm=connected(rank, task, plan, backend))


def connected(rank: int, task: Task, plan: Any, backend: str) -> Any:
    """Return a rank's communicator; that of backend "alone" sends nothing, so that the losses mean nothing."""
    from shardwise.runtime.alone import AloneCommunicator
    from shardwise.runtime.connect import connect

    if backend == "alone":
        return AloneCommunicator(plan.mesh, rank, task.place)
    return connect(plan.mesh, task.place, backend=backend)


def context_parallel(
    rank: int, ranks: int, *, task: Task, kind: Literal["gathered", "ring", "heads"],
    backend: Literal["auto", "gloo"] = "gloo",
) -> Step:  # fmt: skip
    """Make the step of shardwise's context parallelism."""
    from shardwise import Plan
    from shardwise.parallel import context
    from shardwise.runtime.connect import connect

    plan = context.context_parallel(Plan.of(precision=task.precision), ranks, kind)
    trainer, given = undivided(task, plan, ranks, comm=connect(plan.mesh, task.place, backend=backend))
    return lambda: trainer.step(given).loss


def expert_parallel(
    rank: int, ranks: int, *, task: Task, backend: Literal["auto", "gloo", "alone"] = "gloo", **more: Any
) -> Step:
    """Make the step of shardwise's expert parallelism, whose ranks read the rows of all; ``more`` are options of the
    plan."""
    from shardwise import Plan
    from shardwise.parallel import experts

    plan = experts.expert_parallel(Plan.of(precision=task.precision, **more), ranks)
    trainer, given = undivided(task, plan, ranks, comm=connected(rank, task, plan, backend))
    return lambda: trainer.step(given).loss
