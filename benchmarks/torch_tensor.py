"""The peer of shardwise's tensor parallelism, DTensor and ``parallelize_module`` used as they are meant to be, and the
limit.

A DTensor cannot shard queries, keys and values of one weight part by part.  So the weight's rows are put in the order
of heads: a rank's shard has whole heads, and there still is one product.  Attention is computed on local tensors.
Embedding and head are one parameter, sharded by the vocabulary; ``parallelize_module`` makes two of it, which are tied
again here.

Without sequence parallelism norms and positions are ordinary parameters, the same on all ranks.  Fused AdamW takes no
mixture of these and DTensors, so each kind is a group of its own.  In bf16 autocast is around forward, as in other
loops, or FSDP2 casts what it shards further.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from alternate import Step
from peers import shard_fully
from shardwise.models.gpt import Attention, attend
from task import Task, by_mesh, fast_matmul, fused_adamw, loop

COLUMNS = ("qkv", "up", "lm_head")
"""The linear layers of which a rank has some outputs."""
ROWS = ("proj",)
"""The linear layers of which a rank has some inputs, so that its outputs are partial sums."""


class HeadsMajor(nn.Module):
    """A GPT's attention on as many heads as ``qkv`` has, whose outputs are ordered by heads, then q, k, v."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self.size = self.proj.in_features // attention.heads
        for parameter in self.qkv.parameters():
            parts = parameter.data.unflatten(0, (3, attention.heads, self.size))
            parameter.data = parts.transpose(0, 1).flatten(0, 2).contiguous()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.size)).transpose(1, 2).unbind(3)
        return self.proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))


def heads_major(model: nn.Module) -> nn.Module:
    """Give this GPT, or units of one, :class:`HeadsMajor` attention, with which it computes the same; return it."""
    for block in list(model.modules()):
        if isinstance(getattr(block, "attention", None), Attention):
            block.attention = HeadsMajor(block.attention)
    return model


def parallelized(model: nn.Module, mesh: DeviceMesh, *, sequence: bool, split_loss: bool) -> nn.Module:
    """Shard this GPT, or these units of one, over ``mesh`` and return it; with ``sequence`` norms and residuals are
    sharded along the sequence, with ``split_loss`` logits stay sharded.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    between = Shard(1) if sequence else Replicate()
    logits = {"use_local_output": False} if split_loss else {"output_layouts": Replicate()}
    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.qkv": ColwiseParallel(input_layouts=between),
        "blocks.*.attention.proj": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=between),
        "blocks.*.mlp.proj": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, **logits),
    }
    if sequence:
        plan["wpe"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        plan |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
    has = {name.partition(".")[0] for name, _ in model.named_modules()}
    parallelize_module(
        heads_major(model), mesh, {name: style for name, style in plan.items() if name.partition(".")[0] in has}
    )
    if {"lm_head", "wte"} <= has:
        model.lm_head.weight = model.wte.weight
    return model


def dtensor(
    rank: int,
    ranks: int,
    *,
    task: Task,
    dp: int = 1,
    sequence: bool = False,
    split_loss: bool = False,
    model: nn.Module | None = None,
) -> Step:
    """Make the step of an ordinary loop over a parallelized GPT (by default the task's).

    With ``sequence`` it uses SequenceParallel, with ``split_loss`` loss_parallel.  With ``dp`` its shards are sharded
    by FSDP2 over that many ranks, which have different rows; it frees those of a block after use.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    fast_matmul(task)
    dist.init_process_group("gloo")
    tp = ranks // dp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = task.model() if model is None else model
    parallelized(model, mesh["tp"], sequence=sequence, split_loss=split_loss)
    if dp > 1:
        shard_fully(model, mesh["dp"], model.blocks, task, reshard=True)
    optimizer = fused_adamw(by_mesh(model.parameters()))
    batch = task.batch(range(rank // tp * tp, rank // tp * tp + tp))
    step = loop(task, model, optimizer, batch, autocast=task.precision == "bf16" and dp == 1)

    def run() -> Tensor:
        with loss_parallel() if split_loss else nullcontext():
            loss = step()
        return loss.to_local() if split_loss else loss

    return run


def shares(rank: int, ranks: int, *, task: Task, sequence: bool = False, model: nn.Module | None = None) -> Step:
    """Make the step of what a rank computes, without communication: an ordinary loop over its shards of the GPT and the
    rows of all ranks.

    Partial sums are not summed, and tokens of other ranks' vocabulary become some of its own.  With ``sequence`` its
    part of the sequence is repeated where those of others would be gathered."""
    fast_matmul(task)
    model = heads_major(task.model() if model is None else model)
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in ROWS:
            module.weight.data = module.weight.data.chunk(ranks, 1)[rank].clone()
        elif kind in COLUMNS and kind != "lm_head":
            for parameter in module.parameters():
                parameter.data = parameter.data.chunk(ranks)[rank].clone()
        if sequence and kind in COLUMNS:
            module.register_forward_pre_hook(lambda _, given: (given[0].repeat(1, ranks, 1),))
        elif sequence and kind in (*ROWS, "wte"):
            module.register_forward_hook(lambda _, given, out: out.chunk(ranks, 1)[rank].contiguous())
        elif sequence and kind == "wpe":
            module.register_forward_pre_hook(lambda _, given: (given[0].chunk(ranks)[rank],))
    model.wte.weight.data = model.wte.weight.data.chunk(ranks)[rank].clone()  # the head has the same weight
    batch = {name: tokens % (task.vocabulary // ranks) for name, tokens in task.batch(range(ranks)).items()}
    return loop(task, model, fused_adamw(model.parameters()), batch, autocast=task.precision == "bf16")
