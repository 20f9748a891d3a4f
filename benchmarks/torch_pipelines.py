"""The peer of shardwise's pipelines: ``torch.distributed.pipelining``, used as it is meant to be.

Stages are made of the GPT's own modules.  Embedding and head are one parameter: the first and the last stage each have
it and sum its gradients over both after backward; in a V both stages are on one rank and share one tensor.

The loss of a microbatch is divided by the number of microbatches before backward, and ``scale_grads`` is off: torch
would divide the gradients after the last backward of each stage, so twice those of a tensor that two stages share.
Outputs (the logits of all microbatches) are not kept.  In bf16 autocast is around the whole step, so that weights are
cast once, not for every microbatch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.models.gpt import token_loss
from stages import Pipeline
from task import fast_matmul, fused_adamw


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
    """The step of one rank.  It returns the loss times the number of ranks on the rank of the last stage and 0 on the
    others, so that the mean over ranks is the loss.
    """

    def __init__(self, rank: int, ranks: int, *, pipeline: Pipeline) -> None:
        from torch.distributed import pipelining

        fast_matmul(pipeline.task)
        dist.init_process_group("gloo")
        task, kind, last = pipeline.task, pipeline.kind, pipeline.last
        self.pipeline, self.ranks, mine = pipeline, ranks, kind.stages(rank, ranks)
        self.first, self.last = 0 in mine, last in mine
        model, cut = task.model(), pipeline.cut()
        self.stages = [Stage(model, cut[at]) for at in mine]
        modules = [
            pipelining.PipelineStage(stage, at, last + 1, torch.device(task.device))
            for stage, at in zip(self.stages, mine, strict=True)
        ]
        self.schedule = getattr(pipelining, str(kind.torch))(
            modules if kind.stages_per_rank > 1 else modules[0],
            pipeline.microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.parameters = {name: p for stage in self.stages for name, p in stage.named_parameters()}
        self.tied = dist.new_group([0, ranks - 1]) if not kind.v else None
        both = {"wte.weight", "lm_head.weight"} & self.parameters.keys()
        self.shared = [self.parameters[name] for name in both] if self.tied is not None else []
        if self.first and self.last:
            del self.parameters["lm_head.weight"]  # it is the same tensor as wte.weight
        self.optimizer = fused_adamw(self.parameters.values())
        batch = task.batch(range(ranks))
        self.inputs = (batch["input_ids"],) if self.first else ()
        self.labels = batch["labels"] if self.last else None

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits, labels) / self.pipeline.microbatches

    def __call__(self) -> Tensor | float:
        losses: list[Tensor] = []
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.pipeline.task.precision == "bf16"):
            self.schedule.step(*self.inputs, target=self.labels, losses=losses, return_outputs=False)
        for parameter in self.shared:
            dist.all_reduce(parameter.grad, group=self.tied)
        if self.pipeline.task.clip_norm is not None:
            self._clip(self.pipeline.task.clip_norm)
        self.optimizer.step()
        return torch.stack(losses).sum().detach() * self.ranks if self.last else 0.0

    def _clip(self, most: float) -> None:
        """Clip gradients to the norm ``most`` over all stages; a parameter that two ranks have counts once."""
        twice = {id(parameter) for parameter in self.shared} if not self.first else set()
        grads = [p.grad for p in self.parameters.values() if id(p) not in twice]
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), most, square.sqrt())
