"""Ranks of a pipeline of torch beside an ordinary loop; a module of its own, as the ranks import it."""

from __future__ import annotations

import torch

from alternate import Step
from stages import Pipeline
from task import plain
from torch_pipelines import TorchPipeline


def beside(rank: int, ranks: int, *, pipeline: Pipeline, summed: bool = True) -> Step:
    """Steps in fp64; each gives how far the rank's parameters, and the loss where it is, then are from those of an ordinary loop.

    Not ``summed``: without the sum of the embedding's gradients over the first and the last stage.
    """
    torch.set_default_dtype(torch.float64)
    peer = TorchPipeline(rank, ranks, pipeline=pipeline)
    if not summed:
        peer.shared = []
    model = pipeline.task.model()
    loop = plain(0, 1, task=pipeline.task, rows_of=ranks, model=model)
    expected = dict(model.named_parameters(remove_duplicate=False))

    def step() -> float:
        loss, wanted = peer(), loop()
        apart = [(mine - expected[name]).abs().max() for name, mine in peer.parameters.items()]
        if peer.last:
            apart.append((torch.as_tensor(loss) / ranks - wanted).abs())
        return float(torch.stack(apart).max())

    return step
