"""A solver prices each axis by the link that it has: within a host, or between hosts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from shardwise.core.instruction import Op
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.rates import rates
from shardwise.estimate.traffic import step_traffic
from shardwise.initial.initial import record
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled
from shardwise.lower.traced_for import traced_for
from shardwise.models.gpt import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.shard.solver.cost_model import MicrobatchCost


@functools.cache
def gpt() -> Compiled:
    """GPT-2's sizes, one layer; on meta."""
    module = Values.of_recorded(
        record(lambda: GPT(vocabulary=50257, width=768, layers=1, heads=12, context=1024)), 0
    ).structure()
    example = {n: torch.zeros(2, 1024, dtype=torch.int64) for n in ("input_ids", "labels")}
    return Compiled(module, Plan.of(precision="bf16", mesh=Mesh(())), example, batch_rows=8, kind="gpu")


def on(per_host: int, kind: Any = "1d", **changes: int) -> Compiled:
    one = gpt()
    plan = tensor_parallel(Plan.of(precision="bf16", mesh=Mesh(())), 4, kind, "auto")
    return Compiled(
        one.module, plan, one.example, batch_rows=8, kind="gpu", per_host=per_host, _captures=one._captures, **changes
    )  # fmt: skip


def took(one: Compiled) -> MicrobatchCost:
    assert one.general.predicted is not None
    return one.general.predicted()


@pytest.mark.slow
def test_a_group_across_hosts_is_slower_and_may_choose_otherwise() -> None:
    within, across = on(4), on(2)
    assert took(within).total < took(across).total
    fast, slow = within.general.decisions, across.general.decisions
    assert fast is not None and slow is not None and (fast.ops, fast.parameters) != (slow.ops, slow.parameters)
    link = rates("gpu", "bf16", ["tp"])
    priced = [
        sum(link.collective(t.kind, t.nbytes, ["tp"], 4) for t in (*one.collectives, *one.once))
        for one in map(took, (within, across))
    ]
    assert took(across).communicating == pytest.approx(priced[1])
    assert took(across).total < took(within).computing + priced[0], "what is best within a host is not across"


@pytest.mark.parametrize("reduce", ["auto", "bf16"])
def test_gradients_are_summed_at_the_end_in_the_dtype_that_the_step_has(reduce: str) -> None:
    """In fp32 although parameters are bf16, unless ``reduce`` says otherwise."""
    module = GPT(vocabulary=30, width=32, layers=1, heads=2, context=4)  # a width that needs no padding
    example = torch.zeros(2, 4, dtype=torch.int64)
    plan = tensor_parallel(Plan.of(precision="bf16", mesh=Mesh(()), reduce=reduce), 2, "1d-sp")
    one = Compiled(module, plan, {"input_ids": example, "labels": example})
    moments = step_traffic([one.general], plan, OptimizerChoice(), rows=2)
    sent = [t for m in moments if m.instruction.op == Op.REDUCE and m.instruction.bucket >= 0 for t in m.traffic]
    assert sum(t.nbytes for t in took(one).once) == sum(t.nbytes for t in sent) > 0


@pytest.mark.slow
def test_each_axis_has_the_link_that_it_needs() -> None:
    found = [on(n, "2d")._machine() for n in (1, 2, 4, 8)]
    assert [set(one.rates.links) for one in found] == [{"tp_i", "tp_j"}, {"tp_i"}, set(), set()]
    assert found[1].rates.links["tp_i"].bandwidth < found[1].rates.link.bandwidth
    assert took(on(2, "2d")).total > took(on(4, "2d")).total


def test_a_trace_depends_on_who_is_on_a_host() -> None:
    """Of hosts of 6 ranks the first has all of one group of 4, and half of the next."""
    one = tensor_parallel(Plan.of(mesh=Mesh(())), 4, "1d", "auto")
    two = tensor_parallel(data_parallel(Plan.of(mesh=Mesh(()), microbatches=2), 2), 4, "1d", "auto")
    assert traced_for(one, 6)[2][-1] == () and traced_for(two, 6)[2][-1] == ("tp",)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_between_hosts_it_is_slower(kind: str) -> None:
    own = rates(kind, "fp32", ["tp"])
    assert own.links["tp"].bandwidth < own.link.bandwidth and own.links["tp"].latency > own.link.latency
    assert not rates(kind, "fp32").links
