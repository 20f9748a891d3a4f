"""The peers of shardwise's expert parallelism: that of transformers, with FSDP2 or DDP for all that is no expert.

transformers (``DistributedConfig``) gives each rank of ``ep`` some whole experts.  Ranks have different rows; rows go
to the ranks with their experts and back by torch's ``all_to_all_single_autograd``, in parts as long as they are.  All
other parameters are sharded by ``fully_shard``, and those of a layer are freed after use.  Where several ranks have the
same experts, these are sharded over them too.  ``tp`` ranks may share the heads of attention and the same rows.

shardwise's ``ep`` keeps all that is no expert whole on each rank.  So there is a second peer of the same parts, which
does that too: the same experts and exchange, and DDP for the rest.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from alternate import Step
from task import Task, by_mesh, fast_matmul, fused_adamw, loop


def transformers_experts(
    rank: int, ranks: int, *, task: Task, ep: int, tp: int = 1, model: nn.Module | None = None
) -> Step:
    """Make the step of a mixture (by default the task's) that transformers distributes over ``ep`` ranks that share
    experts, ``tp`` of which have the same rows; FSDP2 is over all others.

    In bf16 its policy is that of the other FSDP2 here: bf16 parameters, and gradients that are reduced in fp32.
    """
    from transformers.distributed import DistributedConfig

    fast_matmul(task)
    model = task.model() if model is None else model
    config = DistributedConfig(
        fsdp_size=ranks // tp, tp_size=tp, ep_size=ep, fsdp_mixed_precision=task.precision == "bf16"
    )
    config, _, mesh = model.model.prepare_distribute_model(config)
    model.model = model.model.maybe_distribute_model(model.model, config, mesh)
    same = range(rank // tp * tp, rank // tp * tp + tp)
    return loop(task, model, fused_adamw(by_mesh(model.parameters())), task.batch(same), autocast=False)


def transformers_experts_ddp(rank: int, ranks: int, *, task: Task, model: nn.Module | None = None) -> Step:
    """Make the step of a mixture whose experts transformers divides among all ranks, with DDP for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    fast_matmul(task)
    dist.init_process_group("gloo")
    model = task.model() if model is None else model
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
    _, plan, _ = model.model._resolve_parallel_plans(DistributedConfig(fsdp_size=ranks, ep_size=ranks))
    apply_expert_parallelism(model.model, mesh["ep"], mesh["tp"], plan)
    experts = {name: one for name, one in model.named_parameters() if isinstance(one, DTensor)}
    for one in experts.values():
        one.register_hook(_share(ranks))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = fused_adamw(by_mesh(model.parameters()))
    return loop(task, model, optimizer, task.batch([rank]), autocast=task.precision == "bf16")


def _share(ranks: int) -> object:
    """Return a hook that makes the sum of an expert's gradients over the rows of all ranks their mean, as DDP's are."""

    def hook(gradient: Tensor) -> Tensor:
        return gradient / ranks

    return hook
