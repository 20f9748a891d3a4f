"""Ranks of torch's peers beside an ordinary loop; a module of its own, as the ranks import it."""

from __future__ import annotations

import copy

import torch
from torch.distributed.tensor import DTensor

from alternate import Step
from stages import Pipeline
from task import Task, plain
from torch_pipelines import TorchPipeline
from torch_tensor import dtensor, heads_major


def beside(rank: int, ranks: int, *, pipeline: Pipeline, summed: bool = True) -> Step:
    """Steps in fp64; each gives how far the rank's parameters, and the loss where it is, then are from those of an
    ordinary loop.

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


def in_shards_beside(rank: int, ranks: int, *, task: Task, tied: bool = True, **options: bool) -> Step:
    """Steps of a parallelized GPT in fp64; each gives how far its parameters, gathered, and its loss then are from an
    ordinary loop's.

    Not ``tied``: its embedding and head are two parameters, as ``parallelize_module`` leaves them.
    """
    torch.set_default_dtype(torch.float64)
    mine, model = task.model(), task.model()
    peer, loop = (
        dtensor(rank, ranks, task=task, model=mine, **options),
        plain(0, 1, task=task, rows_of=ranks, model=model),
    )
    if not tied:
        mine.lm_head.weight = torch.nn.Parameter(mine.wte.weight.detach().clone())

    def step() -> float:
        loss, wanted = peer(), loop()
        expected = dict(heads_major(copy.deepcopy(model)).named_parameters())
        apart = [(loss - wanted).abs()]
        for name, parameter in mine.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            apart.append((whole - expected.pop(name, model.lm_head.weight)).abs().max())
        assert not expected, f"parameters that the parallelized model does not have: {', '.join(expected)}"
        return float(torch.stack(apart).max())

    return step
