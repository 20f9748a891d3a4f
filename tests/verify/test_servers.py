"""Parameter servers that wait for all ranks compute what one device does, as all-reduce does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from covering import covering
from models import captured
from shardwise.core.plan import CHOICES, Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import parameter_server
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

PRODUCT = [
    (name, dp, servers, microbatches, recompute)
    for name, dp, servers, microbatches, recompute in itertools.product(
        ("gpt", "llama", "bert", "conv"), (2, 3, 4), (1, 2, 3, 4), (1, 3), CHOICES["recompute"]
    )
    if servers <= dp
]


def check(name: str, plan: Plan, clip_norm: float | None = 1.0) -> None:
    one, make, loss = captured(name)
    torch.manual_seed(len(name) + plan.mesh.size)
    batches = [make(rows) for rows in (13, 12, 7)]
    report = verify(one.module, batches, plan, loss=loss, captured=one, clip_norm=clip_norm)
    assert report.passed, (report.largest, report.worst[:3], report.low_precision)
    assert report.compared > 20 and report.ranks_agree


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "dp", "servers", "microbatches", "recompute"), list(covering(PRODUCT)))
def test_servers_equal_one_device(name: str, dp: int, servers: int, microbatches: int, recompute: Any) -> None:
    plan = data_parallel(Plan.of(microbatches=microbatches, recompute=recompute), dp)
    check(name, parameter_server(plan, servers))


@pytest.mark.full
@pytest.mark.parametrize(("name", "dp", "servers", "microbatches", "recompute"), PRODUCT)
def test_all_servers_equal_one_device(name: str, dp: int, servers: int, microbatches: int, recompute: Any) -> None:
    test_servers_equal_one_device(name, dp, servers, microbatches, recompute)


@pytest.mark.quick(3)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("inner", ["tp", "pp", "replicas", "islands"])
def test_servers_with_all_else(servers: int, inner: str) -> None:
    plan = Plan.of(microbatches=2)
    if inner == "tp":
        plan = parameter_server(data_parallel(tensor_parallel(plan, 2), 2), servers)
    elif inner == "pp":
        plan = parameter_server(pipeline(data_parallel(plan, 2), 2), servers)
    elif inner == "replicas":
        plan = parameter_server(data_parallel(plan, 4, replicas=2), servers)
    else:
        plan = local_training(parameter_server(data_parallel(plan, 2), servers), 2, 2)
    check("gpt", plan)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "fields", [{"precision": "bf16"}, {"precision": "fp16"}, {"offload": "optimizer"}], ids=str
)  # fmt: skip
def test_precision_and_offload(fields: dict[str, Any]) -> None:
    check("llama", parameter_server(data_parallel(Plan.of(microbatches=2, **fields), 3), 2))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["mlp", "contrastive", "static", "own-llama", "mixtral", "vit"])
def test_frozen_uneven_and_static_models(name: str) -> None:
    check(name, parameter_server(data_parallel(Plan.of(microbatches=2), 3), 2), clip_norm=None)
