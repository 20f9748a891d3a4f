"""Ranks that are threads, each with a stream of its own: nothing is read before it is written, nor memory given away
before it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.call import CommunicationError
from shardwise.runtime.threads import ThreadCommunicator
from shardwise.verify.verify import run_steps
from streams import Streams, run_in_streams

N = 3
BF16 = Plan.of(microbatches=2, precision="bf16")
SIZES: dict[str, Any] = {"vocabulary": 31, "width": 16, "layers": 2, "heads": 4, "context": 8}
PLANS: dict[str, Callable[[], Plan]] = {
    "zero 1": lambda: data_parallel(BF16, 2, 1),
    "zero 3, selective": lambda: data_parallel(BF16.replace(recompute="selective"), 2, 3),
    "tp 1d-sp": lambda: tensor_parallel(BF16, 2, "1d-sp"),
    "pp zbv": lambda: pipeline(BF16, 2, "zbv"),
    "pp, zero 3, tp": lambda: tensor_parallel(pipeline(data_parallel(BF16, 2, 3), 2, "1f1b"), 2, "1d-sp"),
}


def _value(comm: ThreadCommunicator, count: int = 4) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * comm.rank


def _reduce(comm: ThreadCommunicator) -> Tensor:
    x = _value(comm)
    comm.all_reduce(x, "dp").wait()
    return x + 1


def _gather(comm: ThreadCommunicator) -> Tensor:
    out = torch.empty(4 * N)
    comm.all_gather(out, _value(comm), "dp").wait()
    return out + 1


def _scatter(comm: ThreadCommunicator) -> Tensor:
    out = torch.empty(2)
    comm.reduce_scatter(out, _value(comm, 2 * N), "dp").wait()
    return out + 1


def _exchange(comm: ThreadCommunicator) -> Tensor:
    out = torch.empty(2 * N)
    comm.all_to_all(out, _value(comm, 2 * N), "dp").wait()
    return out + 1


def _broadcast(comm: ThreadCommunicator) -> Tensor:
    x = _value(comm)
    comm.broadcast(x, "dp", root=1).wait()
    return x + 1


def _ring(comm: ThreadCommunicator) -> Tensor:
    """A send that nobody waits for: its copy is let go of while the receiver may have yet to read it."""
    out = torch.empty(4)
    comm.send(_value(comm), (comm.rank + 1) % N)
    comm.receive(out, (comm.rank - 1) % N).wait()
    return out + 1


OPERATIONS = (_reduce, _gather, _scatter, _exchange, _broadcast, _ring)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ops_come_after_what_they_need(operation: Callable[[ThreadCommunicator], Tensor]) -> None:
    streams = Streams()
    run_in_streams(streams, Mesh.of(dp=N), operation, delay_seed=1)
    assert streams.waits > 0 and streams.found == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stream_that_does_not_wait_is_found(operation: Callable[[ThreadCommunicator], Tensor]) -> None:
    streams = Streams(deaf=True)
    run_in_streams(streams, Mesh.of(dp=N), operation)
    assert any("reads what is not known to be written" in one for one in streams.found)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_memory_that_the_allocator_may_give_away_is_found(operation: Callable[[ThreadCommunicator], Tensor]) -> None:
    streams = Streams(mute=True)
    run_in_streams(streams, Mesh.of(dp=N), operation)
    assert streams.found and all("of which the allocator does not know" in one for one in streams.found)


def test_what_ranks_share_past_the_communicator_is_found() -> None:
    """A race of a program's own: one rank reads a tensor that another has made, in time for the host, and without an
    event.
    """
    streams, shared, added = Streams(), list[Tensor](), threading.Event()

    def rank(comm: ThreadCommunicator) -> None:
        if comm.rank == 0:
            shared.append(torch.ones(3))
        comm.barrier()  # of the hosts; its event tells of what came before
        if comm.rank == 0:
            shared[0].add_(1)
            added.set()
        else:
            assert added.wait(10)  # a host that polls the value could read it before its write is noted
            shared[0].mul(2)

    run_in_streams(streams, Mesh.of(dp=2), rank)
    assert any("reads what is not known to be written" in one for one in streams.found)


def _written_early(comm: ThreadCommunicator) -> str:
    x = _value(comm)
    handle = comm.all_reduce(x, "dp", what="the sum")
    if comm.rank == 1:
        x.zero_()
    handle.wait()
    return "went on"


def test_a_tensor_that_is_written_before_its_wait_is_found_when_the_rank_has_ended() -> None:
    with pytest.raises(CommunicationError, match="the sum.*written before wait") as error:
        run_in_streams(Streams(), Mesh.of(dp=2), _written_early)
    assert error.value.rank == 1


def watched() -> list[Any]:
    """Every plan as it is, and without events; most are for test-all."""
    ordinary = {("pp, zero 3, tp", False), ("pp zbv", False), ("zero 3, selective", True)}
    cases = [(name, deaf) for name in PLANS for deaf in (False, True)]
    return [pytest.param(*one, marks=() if one in ordinary else pytest.mark.full) for one in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "deaf"), watched())
def test_steps_are_ordered(name: str, deaf: bool) -> None:
    """Whole steps, with every op of the ranks watched; without events, all plans are found wrong."""
    torch.manual_seed(0)
    plan = PLANS[name]()
    module = GPT(**SIZES, dropout=0.1) if "zero 3" in name else Llama(**SIZES, kv_heads=2)
    batches = [{"input_ids": torch.randint(0, 31, (6, 8)), "labels": torch.randint(0, 31, (6, 8))} for _ in range(2)]
    compiled = Compiled(module, plan, batches[0])
    compiled.programs(compiled.general, plan.microbatches)
    streams = Streams(deaf=deaf)
    run_in_streams(
        streams,
        plan.mesh,
        lambda comm: run_steps(compiled, comm, batches, OptimizerChoice("adamw", lr=1e-3), 1.0, 0),
        delay_seed=3,
        timeout=120,
    )
    assert bool(streams.found) == deaf, sorted(set(streams.found))[:10]
