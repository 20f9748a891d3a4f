"""Runs over torch.distributed, in processes: what is prepared suffices; groups that others have made do not disturb."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import distributed_runs as runs
import pytest
import torch
import torch.distributed as dist

from processes import run_processes
from shardwise.backend import Backend
from shardwise.core.communicators import CONTROL, Members
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.runtime.call import Call, CommunicationTimeout
from shardwise.runtime.connect import connect
from shardwise.runtime.distributed import DistributedCommunicator
from shardwise.runtime.threads import run_ranks


def found(ranks: int, what: str) -> list[Any]:
    return [
        json.loads(output.splitlines()[-1])
        for output in run_processes(ranks, [runs.__file__, what], 150, OMP_NUM_THREADS=1)
    ]


@cache
def alone() -> dict[str, float]:
    """The same on one rank."""
    return run_ranks(
        Mesh.of(dp=1), lambda comm: runs.results(comm, runs.compiled(Plan.of(microbatches=2, precision="fp64")))
    )[0]


def check(each: list[dict[str, float]]) -> None:
    for one in each:
        for name, value in alone().items():
            assert math.isclose(one[name], value, rel_tol=1e-10), (name, one[name], value)


@pytest.mark.slow
def test_three_stages_of_two_ranks_with_tied_weights_over_gloo() -> None:
    check(found(6, "steps"))


@pytest.mark.slow
def test_a_process_group_of_the_users_is_used_and_stays() -> None:
    """Also where ranks have made different numbers of groups before."""
    each = found(6, "guest")
    check(each)
    assert {(one["kind"], one["after"]) for one in each} == {("DistributedCommunicator", 6.0)}


def test_messages_reach_all_ranks_or_the_first_alone() -> None:
    sent = ["0 ", "70000 bbb", "3 \0\xff!"]
    for rank, one in enumerate(found(3, "talk")):
        assert one == {"all": sent, "first": sent if rank == 0 else [], "again": sent}


def test_what_was_not_prepared_is_named() -> None:
    for one in found(2, "unprepared"):
        assert "all_reduce of a sum over dp" in one["text"]
        assert "(collectives among ranks [0, 1] on lane reduce) was not prepared" in one["text"]
        assert one["sum"] == "2.0"


def test_a_backend_that_this_torch_lacks_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Backend, "count", property(lambda self: 2))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(
        ConfigError,
        match=r'built without "nccl", by which 2 ranks .* install a build of torch that has it.*backend="gloo"',
    ):
        connect(Mesh.of(dp=2), device)
    with pytest.raises(
        ConfigError, match=r'backend: "mpi" is not possible between devices of type cuda; legal: shared, gloo, nccl'
    ):
        connect(Mesh.of(dp=2), device, backend="mpi")
    with pytest.raises(ConfigError, match=r"torch has none, .* devices of type mps; legal: shared, gloo$"):
        connect(Mesh.of(dp=2), torch.device("mps"))
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 ranks on this host and 2 devices"):
        connect(Mesh.of(dp=2), device)


def test_the_backend_that_is_asked_for_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between GPUs gloo is behind copies to the host."""
    from shardwise.runtime import connect as module

    made: list[Any] = []

    def from_environment(mesh: Mesh, device: torch.device, *_: object) -> Any:
        made.append(device)
        return next(iter(run_ranks(mesh, lambda comm: comm)))

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Backend, "select", lambda self, device: None)
    monkeypatch.setattr(module.DistributedCommunicator, "from_environment", from_environment)
    comm = connect(Mesh.of(dp=2), torch.device("cuda", 0), backend="gloo")
    assert type(comm).__name__ == "StagedCommunicator"
    assert comm.device == torch.device("cuda", 0)
    assert made == [torch.device("cpu")]
    assert comm.host.device.type == "cpu"


def test_a_wait_that_has_failed_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting again fails again, until the operation is complete."""
    ends = [RuntimeError("timed out"), RuntimeError("timed out"), None]
    done: list[str] = []

    def wait(limit: timedelta) -> None:
        end = ends.pop(0)
        if end is not None:
            raise end

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    everyone: Any = object()
    comm = DistributedCommunicator(Mesh.of(dp=2), torch.device("cpu"), everyone=everyone)
    call = Call("all_gather", comm.group("dp"), CONTROL, "x")
    work: Any = SimpleNamespace(wait=wait)
    handle = comm._start(call, lambda group: work, lambda: done.append("permuted"))
    for _ in range(2):
        with pytest.raises(CommunicationTimeout):
            handle.wait()
    assert not done
    handle.wait()
    handle.wait()
    assert done == ["permuted"] and not ends


def test_groups_of_a_device_are_made_for_its_transport_and_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What communicates is taken up before what computes; gloo's have no such choice, and messages between CPUs need no
    group.
    """
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: asked.append({"ranks": ranks, **how}))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    options = SimpleNamespace(Options=lambda is_high_priority_stream: {"urgent": is_high_priority_stream})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    everyone: Any = object()
    for device, made in {"cuda:1": ("nccl", {"urgent": True}), "xpu:1": ("xccl", None), "cpu": ("gloo", None)}.items():
        comm = DistributedCommunicator(Mesh.of(dp=2), torch.device(device), everyone=everyone)
        comm.rank = 2  # of no group: nobody answers here
        comm._make(Members((1, 0), "reduce"))
        assert asked.pop() == {
            "ranks": [0, 1],
            "timeout": timedelta(seconds=300),
            "backend": made[0],
            "pg_options": made[1],
        }
        comm._make(Members((1, 0), "forward", pair=True))
        assert len(asked) == (device != "cpu")
        asked.clear()
