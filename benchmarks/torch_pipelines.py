"""The peer of shardwise's pipelines: ``torch.distributed.pipelining``, used as it is meant to be.

Stages are made of the GPT's own modules.  Embedding and head are one parameter: the first and the last stage each have
it and sum its gradients over both after backward; in a V both stages are on one rank and share one tensor.

The loss of a microbatch is divided by the number of microbatches before backward, and ``scale_grads`` is off: torch
would divide the gradients after the last backward of each stage, so twice those of a tensor that two stages share.
Outputs (the logits of all microbatches) are not kept.  In bf16 autocast is around the whole step, so that weights are
cast once, not for every microbatch.

Stages may be shared by the ranks of a mesh (pp, dp, tp), as torch's own parts do it: DTensor shards them over tp
(torch_tensor.py), and over dp there is DDP, or FSDP2 with blocks that stay gathered for the step, since they would
otherwise be gathered for each microbatch.  torch reduces gradients over dp after the last microbatch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from peers import shard_fully
from shardwise.models.gpt import token_loss
from stages import Pipeline
from task import by_mesh, fast_matmul, fused_adamw
from torch_tensor import parallelized


class Stage(nn.Module):
    """Some units of a GPT, under the GPT's own names.

    ``forward`` maps tokens (rows, sequence) or hidden states (rows, sequence, width) to hidden states or logits."""

    def __init__(self, model: nn.Module, units: range) -> None:
        super().__init__()
        blocks = len(model.blocks)
        self.first, self.last = 0 in units, blocks + 1 in units
        self.blocks = nn.ModuleDict({str(unit - 1): model.blocks[unit - 1] for unit in units if 1 <= unit <= blocks})
        if self.first:
            self.wte, self.wpe = model.wte, model.wpe
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x, _ = block(x)
        return self.lm_head(self.norm(x)) if self.last else x


class TorchPipeline:
    """The step of one rank.  It returns the loss times the number of stages' ranks on the ranks of the last stage and 0
    on the others, so that the mean over ranks is the loss.  With ``split_loss`` logits stay sharded over tp.
    """

    def __init__(self, rank: int, ranks: int, *, pipeline: Pipeline, split_loss: bool = False) -> None:
        from torch.distributed import pipelining

        fast_matmul(pipeline.task)
        dist.init_process_group("gloo")
        task, kind, last = pipeline.task, pipeline.kind, pipeline.last
        sizes = (pipeline.ranks, pipeline.dp, pipeline.tp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
        at, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self.pipeline, self.split_loss, mine = pipeline, split_loss, kind.stages(at, pipeline.ranks)
        self.first, self.last = 0 in mine, last in mine
        model, cut = task.model(), pipeline.cut()
        self.stages = [Stage(model, cut[at]) for at in mine]
        modules = [
            pipelining.PipelineStage(
                self._shared(stage, mesh), at, last + 1, torch.device(task.device), group=mesh.get_group("pp")
            )
            for stage, at in zip(self.stages, mine, strict=True)
        ]
        self.schedule = getattr(pipelining, str(kind.torch))(
            modules if kind.stages_per_rank > 1 else modules[0],
            pipeline.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.tied = _ends(mesh) if not kind.v else None
        both = {"wte.weight", "lm_head.weight"} & self.parameters.keys()
        self.shared = [self.parameters[name] for name in both] if self.tied is not None else []
        if self.first and self.last:
            del self.parameters["lm_head.weight"]  # it is the same tensor as wte.weight
        self.optimizer = fused_adamw(by_mesh(self.parameters.values()))
        share = pipeline.ranks * pipeline.tp
        batch = task.batch(range(replica * share, replica * share + share))
        self.inputs = (batch["input_ids"],) if self.first else ()
        self.labels = batch["labels"] if self.last else None

    def _shared(self, stage: Stage, mesh: DeviceMesh) -> nn.Module:
        """Share a stage over tp and dp, and return what to call for it."""
        pipeline = self.pipeline
        if pipeline.kind.v and pipeline.all_ranks > pipeline.ranks:
            raise ValueError("a V has both ends of the model on a rank, whose common weight this does not share")
        if pipeline.tp > 1:
            parallelized(stage, mesh["tp"], sequence=False, split_loss=self.split_loss)
        if pipeline.zero == 3:
            shard_fully(stage, mesh["dp"], stage.blocks.values(), pipeline.task, reshard=False)
        elif pipeline.dp > 1:
            return nn.parallel.DistributedDataParallel(
                stage, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True
            )
        return stage

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits, labels) / self.pipeline.microbatches

    def __call__(self) -> Tensor | float:
        from torch.distributed.tensor.parallel import loss_parallel

        losses: list[Tensor] = []
        pipeline = self.pipeline
        autocast = pipeline.task.precision == "bf16" and pipeline.zero != 3  # FSDP2 casts by a policy of its own
        self.optimizer.zero_grad(set_to_none=True)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            loss_parallel() if self.split_loss else nullcontext(),
        ):
            self.schedule.step(*self.inputs, target=self.labels, losses=losses, return_outputs=False)
        for parameter in self.shared:
            if isinstance(parameter, DTensor):  # an embedding's gradient comes whole on each rank of tp
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            dist.all_reduce(_local(parameter.grad), group=self.tied)
        if pipeline.task.clip_norm is not None:
            self._clip(pipeline.task.clip_norm)
        self.optimizer.step()
        return _local(torch.stack(losses).sum().detach()) * pipeline.ranks if self.last else 0.0

    def _clip(self, most: float) -> None:
        """Clip gradients to the norm ``most`` over all stages; a parameter that two ranks have counts once."""
        if self.pipeline.all_ranks > self.pipeline.ranks:
            raise NotImplementedError("the norm of stages that several ranks share")
        twice = {id(parameter) for parameter in self.shared} if not self.first else set()
        grads = [p.grad for p in self.parameters.values() if id(p) not in twice]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), most, square.sqrt())


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks with the first and with the last stage of this rank's pipeline, between which there
    is the same shard of the embedding."""
    mine = None
    for ends in mesh.mesh[[0, -1]].flatten(1).t().tolist():
        group = dist.new_group(ends)
        if dist.get_rank() % len(mesh.mesh[0].flatten()) == ends[0]:
            mine = group
    assert mine is not None
    return mine
