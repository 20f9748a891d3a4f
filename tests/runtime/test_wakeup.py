"""A rank sleeps until it is woken, whenever that was, and not for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from shardwise.runtime.wakeup import Waker, WakeupPipe


def test_waking_before_or_during_sleep_ends_it() -> None:
    pipe = WakeupPipe()
    waker = Waker(os.getpid(), pipe.fd)
    waker.wake()
    begun = time.monotonic()
    pipe.sleep(5.0)
    threading.Timer(0.1, waker.wake).start()
    pipe.sleep(5.0)
    assert 0.05 < time.monotonic() - begun < 2.0
    begun = time.monotonic()
    pipe.sleep(0.05)  # both have been read
    assert time.monotonic() - begun >= 0.04
    pipe.close()


def test_waking_many_times_wakes_once_and_never_blocks() -> None:
    pipe = WakeupPipe()
    waker = Waker(os.getpid(), pipe.fd)
    for _ in range(100_000):  # more than a pipe holds
        waker.wake()
    begun = time.monotonic()
    for _ in range(100):
        pipe.sleep(0.01)
    assert time.monotonic() - begun > 0.5, "it sleeps again when it has read them"
    pipe.close()
    waker.wake()  # nobody is there
    waker.close()


def test_the_rank_of_another_process() -> None:
    code = (
        "import sys; from shardwise.runtime.wakeup import WakeupPipe; pipe = WakeupPipe(); print(pipe.fd, flush=True); "
        "pipe.sleep(30.0); print('awake', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        waker = Waker(process.pid, int(process.stdout.readline()))
        begun = time.monotonic()
        waker.wake()
        assert process.stdout.readline() == "awake\n" and time.monotonic() - begun < 10.0
        process.wait(timeout=10)
    waker.wake()
    with pytest.raises(OSError, match=str(process.pid)):
        Waker(process.pid, 3)
