"""Snapshots of parameter servers: as the memory was when they began, whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise.core.plan import Plan
from shardwise.launch.snapshots import remove_parts, snapshot_facts, write_snapshot, write_weights
from shardwise.lower.compiled import Compiled

LARGE = 1 << 26  # elements, which take a while to be written


def test_it_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.safetensors"
    state = {"0.step": torch.tensor(3, dtype=torch.int64), "0.master": torch.arange(5000.0), "1.sum": torch.zeros(0)}
    before = {name: value.clone() for name, value in state.items()}
    writing = write_snapshot(path, state, {"version": 7})
    for value in state.values():
        value.fill_(-1)
    writing.wait()
    found = load_file(path)
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in found)
    assert snapshot_facts(path) == {"version": 7} and snapshot_facts(tmp_path / "other") is None
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.slow
def test_what_writes_it_has_none_of_the_sockets(tmp_path: Path) -> None:
    """Else the port of a server that is lost would be taken while its snapshot is written."""
    listening = socket.create_server(("127.0.0.1", 0))
    writing = write_snapshot(tmp_path / "one.safetensors", {"x": torch.zeros(LARGE)}, {})
    links, deadline = list[str](), time.monotonic() + 20
    while not any(str(writing.part) in one for one in links):
        assert time.monotonic() < deadline
        links = []
        for one in Path(f"/proc/{writing.child}/fd").iterdir():
            try:
                links.append(os.readlink(one))
            except OSError:  # closed meanwhile
                continue
    assert not [one for one in links if one.startswith("socket:")]
    address = listening.getsockname()
    listening.close()
    socket.create_server(address).close()
    writing.wait()


def test_what_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    path, state = tmp_path / "run" / "snapshot.safetensors", {"x": torch.ones(4)}
    path.parent.mkdir()
    write_snapshot(path, state, {"version": 1}).wait()
    killed = write_snapshot(path, {"x": torch.zeros(LARGE)}, {"version": 2})
    os.kill(killed.child, signal.SIGKILL)
    with pytest.raises(OSError, match="ended by signal 9"):
        killed.wait()
    assert snapshot_facts(path) == {"version": 1} and torch.equal(load_file(path)["x"], state["x"])
    left = path.with_name(f"{path.name}.00000000.part")
    left.write_bytes(b"what a process had written when it was ended")
    remove_parts(path)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    path.rename(tmp_path / "moved")
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError) as error:
        write_snapshot(path, state, {"version": 3}).wait()
    assert error.value.errno == errno.ENOENT and "snapshot" in str(error.value.filename)


def test_signals_of_a_server_are_not_those_of_what_writes(tmp_path: Path) -> None:
    writing = write_snapshot(tmp_path / "one.safetensors", {"x": torch.zeros(LARGE)}, {"version": 1})
    while not writing.part.exists():
        time.sleep(0.001)
    for sign in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(writing.child, sign)
    writing.wait()
    assert load_file(writing.path)["x"].numel() == LARGE


def test_weights_for_which_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its room before it is mapped: a write to a map without would end the process."""
    module = nn.Linear(1000, 100)
    compiled = Compiled(module, Plan.of(), {"input": torch.zeros(2, 1000)}, lambda y, _: y.square().mean())
    path = tmp_path / "weights.safetensors"

    def full(file: int, start: int, size: int) -> None:
        assert size > 400_000
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            write_weights(path, compiled, iter(()), {})
    assert not list(tmp_path.iterdir())
    write_weights(path, compiled, iter(()), {})
    assert load_file(path).keys() == {"weight", "bias"} and path.stat().st_size > 400_000
