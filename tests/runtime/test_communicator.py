"""All backends against one suite, and what each of them does when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import communicator_cases as cases
import pytest
import torch
from torch.distributed import TCPStore

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.mesh import Mesh
from shardwise.runtime import segments, shared
from shardwise.runtime.call import CommunicationError, CommunicationTimeout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.rendezvous import rendezvous
from shardwise.runtime.threads import run_ranks

MESHES = ("dp=1", "dp=2", "dp=3", "dp=2,tp=2")
LIMIT = 150.0  # seconds for a set of processes


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    errors: str

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


def run_processes(ranks: int, *arguments: str) -> list[Ended]:
    """Run the cases' program once per rank, as torchrun would; whatever still runs at the limit is killed."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # hosted here: no port is free and then taken
    source = str(Path(shared.__file__).parents[2])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    common |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
    }
    command = [sys.executable, cases.__file__, *arguments]
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    deadline, late = time.monotonic() + LIMIT, False
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    for process in processes:
        late |= process.poll() is None
        process.kill()
    ended = [Ended(process.returncode, *process.communicate()) for process in processes]
    assert not late, f"still running after {LIMIT:.0f} s:\n" + "\n".join(
        f"rank {rank}: {one}" for rank, one in enumerate(ended)
    )
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [one if one == "dp=2,tp=2" else pytest.param(one, marks=pytest.mark.full) for one in MESHES]
)
def test_processes(mesh: str) -> None:
    """All cases on both backends, in one set of processes."""
    ended = run_processes(cases.parse_mesh(mesh).size, "conformance", mesh)
    for rank, process in enumerate(ended):
        assert process.code == 0, process.errors
        results = {backend: found for line in process.lines() for backend, found in line.items()}
        wanted = [(b, case) for b in cases.BACKENDS[:2] for case in cases.CASES] + [
            ("staged", one.__name__) for one in cases.STAGED
        ]
        problems = {(b, case): results[b].get(case, "not reached") for b, case in wanted}
        assert not any(problems.values()), (rank, {key: problem for key, problem in problems.items() if problem})


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_threads(mesh: str, case: str) -> None:
    run_ranks(cases.parse_mesh(mesh), cases.CASES[case], timeout=20)


@pytest.mark.parametrize("case", ["messages", "messages_both_ways", "many_outstanding", "subgroups_side_by_side"])
@pytest.mark.parametrize("sends_wait", [False, True])
def test_threads_with_delays(case: str, sends_wait: bool) -> None:
    run_ranks(Mesh.of(pp=3, dp=2), cases.CASES[case], timeout=20, delay_seed=7, sends_wait=sends_wait)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_a_missing_rank_is_named_in_time(backend: str) -> None:
    ended = run_processes(3, "missing", backend, "dp=3")
    for rank in (0, 2):
        (found,) = ended[rank].lines()
        assert found["timed_out"]
        assert found["missing"] == [1]
        assert found["rank"] == rank
        assert "all_reduce of the sum over dp" in found["text"]
        assert cases.TIMEOUT * 0.9 <= found["seconds"] <= cases.TIMEOUT + 3.0


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_a_killed_rank_does_not_hang_the_others(backend: str) -> None:
    files = set(os.listdir("/dev/shm"))
    ended = run_processes(3, "killed", backend, "dp=3")
    assert ended[1].code == -9
    for rank in (0, 2):
        (found,) = ended[rank].lines()
        assert 1 in found["missing"]
        assert found["seconds"] <= cases.TIMEOUT + 3.0
        if backend == "shared":
            assert found["missing"] == [1]
            assert not found["timed_out"]
            assert found["seconds"] < 0.75 * cases.TIMEOUT  # noticed, not waited out
    assert not {name for name in set(os.listdir("/dev/shm")) - files if "shardwise" in name}


def test_processes_that_disagree_are_told() -> None:
    for rank, ended in enumerate(run_processes(3, "disagree", "shared", "dp=3")):
        (found,) = ended.lines()
        assert not found["timed_out"]
        assert "has posted another operation, size or dtype" in found["text"]
        assert f"rank {rank}: all_reduce" in found["text"]


def test_results_come_in_rank_order() -> None:
    assert run_ranks(Mesh.of(dp=2, tp=3), lambda c: (c.rank, c.mesh.coordinates(c.rank)["tp"])) == [
        (rank, rank % 3) for rank in range(6)
    ]


def test_threads_run_single_threaded_and_leave_the_setting() -> None:
    before = torch.get_num_threads()
    assert run_ranks(Mesh.of(dp=2), lambda c: torch.get_num_threads()) == [1, 1]
    assert torch.get_num_threads() == before


def test_the_first_failure_stops_all_at_once_and_is_raised() -> None:
    def fail(c: Communicator) -> None:
        if c.rank == 2:
            raise ZeroDivisionError("the cause")
        c.barrier()

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="the cause") as raised:
        run_ranks(Mesh.of(dp=4), fail, timeout=30)
    assert raised.value.__notes__ == ["raised on rank 2 of 4"]
    assert time.monotonic() - start < 5


def test_a_rank_that_only_computes_ends_with_the_others() -> None:
    """Else it would go on beside what runs next, such as a capture, which changes modes of the whole process."""
    started = threading.Event()

    def compute(c: Communicator) -> None:
        if c.rank == 1:
            assert started.wait(5)
            raise ZeroDivisionError("the cause")
        started.set()
        while True:
            sum(range(1000))

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_ranks(Mesh.of(dp=2), compute, timeout=0.2)
    assert "rank 0" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_that_ends_early_is_named() -> None:
    def leave(c: Communicator) -> None:
        if c.rank != 1:
            c.barrier()

    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        run_ranks(Mesh.of(dp=3), leave, timeout=30)
    assert time.monotonic() - start < 5


def test_a_missing_thread_is_named_in_time() -> None:
    def late(c: Communicator) -> None:
        if c.rank == 1:
            time.sleep(1.0)
        c.all_reduce(torch.ones(3), "dp", what="gradients").wait()

    with pytest.raises(CommunicationTimeout, match="all_reduce of gradients") as raised:
        run_ranks(Mesh.of(dp=3), late, timeout=0.2)
    assert raised.value.missing == (1,)


def test_ranks_that_disagree_are_told() -> None:
    def disagree(c: Communicator) -> None:
        c.all_reduce(torch.ones(3 + c.rank), "dp").wait()

    with pytest.raises(CommunicationError, match=r"all_reduce .* of 3 elements"):
        run_ranks(Mesh.of(dp=2), disagree)


def test_a_missing_wait_shows() -> None:
    """Before wait() there is no result, whoever came first; a write to a pending tensor is an error."""

    def read(c: Communicator) -> bool:
        x = torch.ones(3)
        handle = c.all_reduce(x, "dp")
        c.barrier()
        pending = bool(x.isnan().all())
        handle.wait()
        return pending and x.tolist() == [2.0] * 3

    assert run_ranks(Mesh.of(dp=2), read) == [True, True]

    def write(c: Communicator, kind: str) -> None:
        x = torch.ones(3)
        handle = c.all_reduce(x, "dp") if kind == "out" else c.broadcast(x, "dp", root=c.rank * 0)
        x[1] = 5
        handle.wait()

    for kind in ("out", "in"):
        with pytest.raises(CommunicationError, match=r"written before wait\(\)"):
            run_ranks(Mesh.of(dp=2), lambda c, kind=kind: write(c, kind))


def test_only_sends_that_wait_find_one_that_relies_on_buffering() -> None:
    def both_send_first(c: Communicator) -> float:
        x = torch.tensor([float(c.rank)])
        c.send(x, 1 - c.rank).wait()
        out = torch.zeros(1)
        c.receive(out, 1 - c.rank).wait()
        return out.item()

    assert run_ranks(Mesh.of(pp=2), both_send_first) == [1.0, 0.0]
    with pytest.raises(CommunicationTimeout, match="send"):
        run_ranks(Mesh.of(pp=2), both_send_first, sends_wait=True, timeout=0.3)


def test_on_wait_of_threads_names_the_rank() -> None:
    heard: list[tuple[int, str | None]] = []

    def wait(c: Communicator) -> None:
        time.sleep(0.1 * c.rank)
        c.barrier(what="the end")

    run_ranks(Mesh.of(dp=2), wait, on_wait=lambda rank, text: heard.append((rank, text)))
    assert [rank for rank, _ in heard] == [0, 0]
    assert "barrier of the end" in str(heard[0][1])
    assert heard[1][1] is None


def test_available_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh.of(dp=4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if segments.unsupported() is None:
        assert shared.available(mesh) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "one host" in str(shared.available(mesh))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "x86-64" in str(shared.available(mesh))


@pytest.mark.parametrize(("limit", "free"), [("max", 8000 << 10), ("5000000", 5_000_000 - 3_000_000 + 1_200_000)])
def test_memory_that_the_kernel_can_take_back_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: int
) -> None:
    """In a control group that is cached files, which count as used."""
    monkeypatch.setattr(segments, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(segments, "CONTROL_GROUP", tmp_path)
    for name, text in {
        "meminfo": "MemTotal:       9000 kB\nMemAvailable:   8000 kB\nHugePages_Total:       0\n",
        "memory.max": limit, "memory.current": "3000000", "memory.stat": "anon 5\ninactive_file 1200000\nslab 7\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert segments.available_memory() == free


def test_an_arena_refuses_what_does_not_fit_and_finds_its_own() -> None:
    arena = segments.Arena()
    with pytest.raises(ShardwiseError, match="MiB wanted"):
        arena.allocate(1 << 50)
    first, second = arena.allocate(100).view(torch.float32), arena.allocate(segments.BLOCK + 64)
    assert arena.locate(first)[1] == 0
    assert arena.locate(first[3:])[1] == 12
    assert arena.locate(second[64:]) == (arena.locate(second)[0], 64)
    assert arena.locate(second)[0] != arena.locate(first)[0]
    assert arena.locate(torch.zeros(3)) is None
    arena.close()


@pytest.mark.parametrize(("name", "text"), [("RANK", ""), ("WORLD_SIZE", "two"), ("MASTER_PORT", "")])
def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=re.escape(f"{name}: {text!r}")):
        rendezvous("test", 1.0)
