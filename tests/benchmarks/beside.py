"""Ranks of torch's peers beside an ordinary loop; a module of its own, as the ranks import it."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from alternate import Step
from stages import Pipeline
from task import Task, plain
from torch_experts import transformers_experts, transformers_experts_ddp
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
        dist.all_reduce(loss)  # over ranks that may have different rows
        apart = [(loss / ranks - wanted).abs()]
        for name, parameter in mine.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            apart.append((whole - expected.pop(name, model.lm_head.weight)).abs().max())
        assert not expected, f"parameters that the parallelized model does not have: {', '.join(expected)}"
        return float(torch.stack(apart).max())

    return step


def with_experts_beside(rank: int, ranks: int, *, task: Task, **sizes: int) -> Step:
    """Steps of a mixture that transformers distributes, with FSDP2 or, without ``sizes``, with DDP; each gives how far
    its gradients and its parameters then are from an ordinary loop's, as a part of the largest of each.
    """
    mine, model = task.model(), task.model()
    make = transformers_experts if sizes else transformers_experts_ddp
    peer, loop = make(rank, ranks, task=task, model=mine, **sizes), plain(0, 1, task=task, rows_of=ranks, model=model)

    def step() -> float:
        peer(), loop()
        expected, found = dict(model.named_parameters()), dict(mine.named_parameters())
        assert found.keys() == expected.keys()
        return apart(found, expected)

    return step


def shared_stages_beside(rank: int, ranks: int, *, pipeline: Pipeline, **options: bool) -> Step:
    """Steps of a pipeline whose stages several ranks share, in fp64; each gives how far gradients and parameters of the
    rank's stages then are from an ordinary loop's, as a part of the largest of each.
    """
    torch.set_default_dtype(torch.float64)
    peer = TorchPipeline(rank, ranks, pipeline=pipeline, **options)
    model = pipeline.task.model()
    loop = plain(0, 1, task=pipeline.task, rows_of=ranks, model=heads_major(model) if pipeline.tp > 1 else model)
    expected = dict(model.named_parameters(remove_duplicate=False))

    def step() -> float:
        peer(), loop()
        return apart(peer.parameters, expected)

    return step


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far parameters of a distributed model and their gradients are from those of one on this rank, as a part of
    the largest of each."""
    most = 0.0
    for name, one in found.items():
        for this, wanted in ((one, expected[name]), (one.grad, expected[name].grad)):
            assert this is not None and wanted is not None
            whole = this.full_tensor() if isinstance(this, DTensor) else this
            most = max(most, float((whole - wanted).abs().max() / wanted.abs().max()))
    return most
