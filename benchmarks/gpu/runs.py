"""``shardwise train`` as its users run it: a run that is watched, killed and compared with an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .parts import ROOT, ChildFailed, finish

MODEL = (
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=16", "data.batch_size=4",
    "validation.share=0",
    "train.sample_every=0", "train.trace_steps=[]",
)  # fmt: skip
"""A small GPT; on a card its steps take a few milliseconds, so that killing it takes many of them."""


class Run:
    """A running ``shardwise train`` in a new folder."""

    def __init__(self, folder: Path, *keys: str, environment: Mapping[str, str] | None = None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        command = [sys.executable, "-m", "shardwise", "train", *keys, f"train.run_dir={folder}"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "COLUMNS": "120", **(environment or {})}, text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def end(self, seconds: float) -> str:
        """Wait for the end and return the output; :class:`ChildFailed` unless it ends well within ``seconds``."""
        code, output = finish(self.process, seconds)
        if code != 0:
            ended = f"was stopped after {seconds:.0f} s" if code is None else f"ended with code {code}"
            raise ChildFailed("\n".join([f"shardwise train {ended}", *output.splitlines()[-12:]]))
        return output

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until ``step`` steps are in its metrics; :class:`ChildFailed` if it ends before or takes too long."""
        deadline = time.monotonic() + seconds
        while len(self.metrics()) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end(0.0)
                raise ChildFailed(f"shardwise train was over before step {step}")
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of its ranks, in the order of ranks."""
        found = [p for p in psutil.Process(self.process.pid).children() if "shardwise.launch.worker" in p.cmdline()]
        return sorted(found, key=lambda p: int(p.environ()["RANK"]))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of its steps so far."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def curve(self) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm of every step."""
        return [(one["step"], one["loss"], one["grad_norm"]) for one in self.metrics()]


def whole(folder: Path, *keys: str, seconds: float, environment: Mapping[str, str] | None = None) -> Run:
    """Run to the end without disturbing the run."""
    run = Run(folder, *keys, environment=environment)
    run.end(seconds)
    return run


def killed(
    folder: Path, *keys: str, rank: int, after: int, seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[Run, dict[str, Any]]:
    """Run to the end, with SIGKILL to ``rank`` after ``after`` steps; return the run and what happened."""
    run = Run(folder, *keys, environment=environment)
    run.wait_for_step(after, seconds)
    victim = run.ranks()[rank]
    victim.kill()
    begun, before = time.time(), len(run.metrics())
    output = " ".join(run.end(seconds).split())
    about = run.folder / "about.json"  # written anew when the ranks are ready again
    return run, {
        "steps_before": before, "named": f"rank {rank} was killed" in output,
        "went_on": "starting again from" in output,
        "restart_seconds": about.stat().st_mtime - begun,
    }  # fmt: skip


def apart(first: Sequence[tuple[int, *tuple[float, ...]]], second: Sequence[tuple[int, *tuple[float, ...]]]) -> float:
    """Return the largest relative difference of the steps' losses and norms; inf where the steps are not the same."""
    if not first or [one[0] for one in first] != [one[0] for one in second]:
        return float("inf")
    pairs = [(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one[1:], two[1:], strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) if a == a and b == b else float("inf") for a, b in pairs)


def text_file(folder: Path) -> str:
    """Write a file of made-up words and return the config key for it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, words = folder / "text.txt", random.Random(0)
    path.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(3000)))
    return f"data.source={path}"
