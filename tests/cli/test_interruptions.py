"""Ctrl-C and SIGTERM: before ranks are there, and while they evaluate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.checkpoint import checkpoints
from shardwise.cli import train as command
from shardwise.cli.main import app
from shardwise.runtime.progress import read_record

TINY = [
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=16", "data.batch_size=4",
    "train.devices=1", "train.threads=1",
]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("phase", ["build_data", "check_callbacks", "check_plan", "stage", "run_with_restarts"])
def test_before_the_first_step(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, phase: str, number: signal.Signals
) -> None:
    """While text is tokenised, the model is captured, ranks start: the command ends at once, with words and 130."""

    def interrupted(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(10)
        raise AssertionError("it went on")

    monkeypatch.setattr(command, phase, interrupted)
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, ["train", *TINY, text, f"train.run_dir={folder}"])
    assert done.exit_code == 130 and "interrupted" in done.output, done.output
    assert "Traceback" not in done.output and signal.getsignal(signal.SIGTERM) is before
    assert ("is as it was" in " ".join(done.output.split())) == (phase == "run_with_restarts")


@pytest.mark.slow
def test_while_ranks_evaluate(tmp_path: Path) -> None:
    """The first Ctrl-C stops after the next step, with a checkpoint; the second ends the run at once."""
    folder = tmp_path / "run"
    documents = tmp_path / "songs.jsonl"
    verses = (f"{number} bottles of beer on the wall, {number} bottles of beer. " * 3 for number in range(3000))
    documents.write_text("\n".join(json.dumps({"text": verse}) for verse in verses))
    arguments = [
        sys.executable, "-m", "shardwise", "train", *TINY, f"data.source={documents}", "validation.share=0.3",
        "validation.every=1", f"train.run_dir={folder}", "train.steps=100000", "checkpoint.every=0",
    ]  # fmt: skip

    def evaluating(batches: int) -> subprocess.Popen[str]:
        (folder / "monitor" / "rank_0").unlink(missing_ok=True)
        process = subprocess.Popen(
            [*arguments, f"validation.batches={batches}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 90
        while (record := read_record(folder, 0)) is None or not record.doing.startswith("evaluating after step"):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return process

    once = evaluating(300)
    once.send_signal(signal.SIGINT)
    output = " ".join(once.communicate(timeout=90)[0].split())
    assert once.returncode == 130 and "with a checkpoint; the same command goes on" in output, output
    done = len((folder / "metrics.jsonl").read_text().splitlines())
    assert checkpoints(folder / "checkpoints")[-1].name == f"step_{done:08d}"
    assert json.loads((folder / "evaluations.jsonl").read_text().splitlines()[0])["step"] == 1

    twice = evaluating(100_000)  # tens of seconds: it is still evaluating when the second signal arrives
    twice.send_signal(signal.SIGINT)
    assert twice.stdout is not None
    told = ""
    while "once more" not in told:
        assert (line := twice.stdout.readline()), told
        told += line
    twice.send_signal(signal.SIGINT)
    start = time.monotonic()
    output = " ".join((told + twice.communicate(timeout=90)[0]).split())
    assert twice.returncode == 130 and "once more: at once" in output and "interrupted" in output, output
    assert time.monotonic() - start < 30
