"""Dumps of the last collectives, in the format that torch writes them in: read, compared, and asked for from live
processes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.backend import Backend
from shardwise.launch import flight


def entry(
    number: int, name: str, state: str, *, group: str = "5", message: bool = False, at: int = 0, sizes: Any = ((8,),)
) -> dict[str, Any]:
    """As torch 2.13 writes it (version 2.10); what is not read here is there too."""
    return {
        "frames": [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 3}],
        "record_id": at, "pg_id": 1, "process_group": (group, "undefined"), "thread_name": "pt_main_thread",
        "thread_id": "1",
        "collective_seq_id": 0 if message else number, "p2p_seq_id": number if message else 0, "op_id": number,
        "profiling_name": f"nccl:{name}", "time_created_ns": 10**9 + at, "duration_ms": 0.5,
        "input_sizes": [list(one) for one in sizes],
        "input_dtypes": ["Float"], "output_sizes": [[16]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": False,
        "timeout_ms": 600000,
        "is_p2p": message,
    }  # fmt: skip


def dump(*entries: dict[str, Any], groups: dict[str, str] | None = None) -> bytes:
    config = {
        name: {"name": name, "desc": "undefined", "ranks": ranks} for name, ranks in (groups or {"5": "[0, 1]"}).items()
    }
    return pickle.dumps(
        {
            "version": "2.10",
            "comm_lib_version": "2.28.9",
            "pg_config": config,
            "pg_status": {},
            "entries": list(entries),
        },
        protocol=2,
    )


def reported(*dumps: bytes) -> list[str]:
    return flight.report({rank: flight.parse(one) for rank, one in enumerate(dumps)})


def test_a_collective_that_one_rank_has_not_posted() -> None:
    before = [entry(number, "all_reduce", "completed", at=number) for number in (10, 11)]
    lines = reported(
        dump(*before, entry(12, "_allgather_base", "started", at=12), entry(13, "all_reduce", "scheduled", at=13)),
        dump(*before),
    )
    assert lines[0] == (
        "collectives differ first at _allgather_base 12 of group 5 among ranks [0, 1]: rank 0 started, rank 1 has not "
        "posted it"
    )
    assert lines[1] == (
        "rank 0, collectives: _allgather_base 12 of group 5 among ranks [0, 1]: started; "
        "all_reduce 13 of group 5 among ranks [0, 1]: scheduled"
    )
    assert lines[2] == "rank 1, collectives: all_reduce 11 of group 5 among ranks [0, 1]: completed"


def test_the_first_in_time_is_named_of_several_groups() -> None:
    groups = {"5": "[0, 1]", "7": "[0, 1]"}
    late, early = entry(3, "all_reduce", "started", at=90), entry(40, "all_reduce", "started", group="7", at=50)
    lines = reported(dump(early, late, groups=groups), dump(groups=groups))
    assert "differ first at all_reduce 40 of group 7" in lines[0]


def test_another_collective_under_the_same_number() -> None:
    lines = reported(dump(entry(2, "all_reduce", "started")), dump(entry(2, "broadcast", "started")))
    assert "rank 0 started, rank 1 has posted broadcast of [8]" in lines[0]
    lines = reported(dump(entry(2, "all_reduce", "started")), dump(entry(2, "all_reduce", "started", sizes=((9,),))))
    assert "rank 1 has posted all_reduce of [9]" in lines[0]


def test_what_all_have_posted_and_not_all_have_ended() -> None:
    lines = reported(dump(entry(2, "broadcast", "completed")), dump(entry(2, "broadcast", "started")))
    assert "rank 0 completed, rank 1 started" in lines[0]
    assert not any("differ" in line for line in reported(*[dump(entry(2, "all_reduce", "started"))] * 2))


def test_a_message_has_two_names_and_numbers_of_its_own() -> None:
    send, receive = entry(4, "send 0->1", "started", message=True), entry(4, "recv 1<-0", "started", message=True)
    assert not any("differ" in line for line in reported(dump(send), dump(receive)))
    lines = reported(dump(send), dump(entry(4, "all_reduce", "completed")))
    assert "send 0->1 4 of group 5" in lines[0] and "rank 1 has not posted it" in lines[0]


def test_what_the_ring_has_lost_is_over() -> None:
    lines = reported(dump(entry(2, "all_reduce", "started")), dump(entry(900, "all_reduce", "completed")))
    assert "rank 0 started, rank 1 completed" in lines[0]


def test_ranks_without_a_dump_are_left_out() -> None:
    alone = flight.parse(dump(entry(2, "all_reduce", "started"), groups={"5": "[0, 1, 2]"}))
    assert flight.report({2: alone}) == ["rank 2, collectives: all_reduce 2 of group 5 among ranks [0, 1, 2]: started"]
    assert flight.report({}) == [] and reported(dump()) == ["rank 0, collectives: none"]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


@pytest.mark.parametrize(
    "found", [b"", b"text", dump()[:-9], pickle.dumps([1]), pickle.dumps({"entries": []}), pickle.dumps(Evil())]
)
def test_anything_else_is_refused(found: bytes) -> None:
    with pytest.raises(ValueError, match="no dump of collectives"):
        flight.parse(found)


RANK = """
import os, sys, time
folder, rank, answer = sys.argv[1:]
pipe = f"{folder}/pipes/flight_{rank}.pipe"
os.mkfifo(pipe)
file = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
while not os.read(file, 128):
    time.sleep(0.05)
with open(f"{folder}/flight_{rank}", "wb") as out:
    whole = bytes.fromhex(answer)
    out.write(whole[:20]); out.flush(); time.sleep(0.3); out.write(whole[20:])
time.sleep(30)
"""


def test_live_ranks_are_asked_through_their_pipes(tmp_path: Path) -> None:
    """As torch does it: a process looks into its pipe now and then, and writes its file in its own time; an old file
    does not count.
    """
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    answers = [dump(entry(1, "all_reduce", "started")), dump()]
    (tmp_path / "flight_1").write_bytes(dump(entry(99, "all_reduce", "started")))
    os.utime(tmp_path / "flight_1", (1, 1))
    os.mkfifo(pipes / "flight_7.pipe")  # of a rank that is gone: nobody reads it
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(n), one.hex()])
        for n, one in enumerate(answers)
    ]
    try:
        deadline = time.monotonic() + 20
        while not all((pipes / f"flight_{n}.pipe").exists() for n in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)  # they open it
        found = flight.collect(tmp_path, pipes)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert sorted(found) == [0, 1] and "rank 1 has not posted it" in flight.report(found)[0]
    started = time.monotonic()
    assert flight.collect(tmp_path, pipes) == {} and time.monotonic() - started < 2  # nobody is there any more


def test_a_rank_that_does_not_answer_costs_no_more_than_the_time_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "ANSWER_TIME", 0.5)
    os.mkfifo(tmp_path / "flight_0.pipe")
    reader = os.open(tmp_path / "flight_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    started = time.monotonic()
    assert flight.collect(tmp_path, tmp_path) == {}
    assert 0.4 < time.monotonic() - started < 3
    assert os.read(reader, 64)
    os.close(reader)


def test_the_environment_of_a_recorder() -> None:
    assert Backend("cpu").flight_recorder("/run/flight_") == {} == Backend("mps").flight_recorder("/run/flight_")
    assert not any("PIPE" in name for name in Backend("cuda").flight_recorder("/run/flight_"))
    variables = Backend("cuda").flight_recorder("/run/flight_", "/tmp/flight_")
    assert variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == "/tmp/flight_"
    assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == variables["TORCH_FR_DUMP_TEMP_FILE"] == "/run/flight_"
    assert int(variables["TORCH_FR_BUFFER_SIZE"]) == int(variables["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
