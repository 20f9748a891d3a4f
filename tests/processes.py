"""Ranks that are processes of this host, started as torchrun would start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore

import shardwise


def run_processes(ranks: int, command: Sequence[str], timeout: float, **more: object) -> list[str]:
    """What each of so many ranks of ``python *command`` prints; with ``more`` environment variables.  None of them
    outlives the call.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": Path(shardwise.__file__).parents[1], **more,
    }  # fmt: skip
    common = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    processes = [
        subprocess.Popen(
            [sys.executable, *command], env={**common, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), [errors[-2000:] for _, errors in ended]
    return [output for output, _ in ended]
