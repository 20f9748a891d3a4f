"""A rank sleeps until it is rung, whenever that was, and not for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from shardwise.runtime.bell import Bell, Rope


def test_a_ring_before_or_during_sleep_ends_it() -> None:
    bell = Bell()
    rope = Rope(os.getpid(), bell.fd)
    rope.pull()
    begun = time.monotonic()
    bell.sleep(5.0)
    threading.Timer(0.1, rope.pull).start()
    bell.sleep(5.0)
    assert 0.05 < time.monotonic() - begun < 2.0
    begun = time.monotonic()
    bell.sleep(0.05)  # both rings have been heard
    assert time.monotonic() - begun >= 0.04
    bell.close()


def test_many_rings_wake_once_and_none_blocks() -> None:
    bell = Bell()
    rope = Rope(os.getpid(), bell.fd)
    for _ in range(100_000):  # more than a pipe holds
        rope.pull()
    begun = time.monotonic()
    for _ in range(100):
        bell.sleep(0.01)
    assert time.monotonic() - begun > 0.5, "it sleeps again when it has read them"
    bell.close()
    rope.pull()  # nobody hears it
    rope.close()


def test_the_bell_of_another_process() -> None:
    code = (
        "import sys; from shardwise.runtime.bell import Bell; bell = Bell(); print(bell.fd, flush=True); "
        "bell.sleep(30.0); print('awake', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        rope = Rope(process.pid, int(process.stdout.readline()))
        begun = time.monotonic()
        rope.pull()
        assert process.stdout.readline() == "awake\n" and time.monotonic() - begun < 10.0
        process.wait(timeout=10)
    rope.pull()
    with pytest.raises(OSError, match=str(process.pid)):
        Rope(process.pid, 3)
