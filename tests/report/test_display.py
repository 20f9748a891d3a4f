"""What people see of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.report import display
from shardwise.report.display import Display, Follower, describe, show_result
from shardwise.report.starting import Phases
from shardwise.report.tables import count, decimal, duration, grid, pairs, print_json, show, size
from shardwise.runtime.progress import Progress, record_path


def metrics(step: int, loss: float | None = 2.5, seconds: float = 0.5) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens_per_second": 1000 / seconds, "step_seconds": seconds}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False)


def written(one: Console) -> str:
    assert isinstance(one.file, io.StringIO)
    return one.file.getvalue()


def test_follower_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text('{"step": 0}\n{"step"')
    assert follower.read() == [{"step": 0}]
    assert follower.read() == []
    with path.open("a") as file:
        file.write(': 1}\n{"step": 2}\n')
    assert follower.read() == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('{"step": 3, "lo{"step": 4}\n[5]\n{"step": 6}\n')  # cut by a full disk
    assert follower.read() == [{"step": 6}]


def test_plain_lines_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out = console()
    with Display(out, tmp_path, 200, "starting 2 ranks") as shown:
        for step in range(200):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics(step)) + "\n")
            now[0] += 0.5
            shown.update()
        shown.update()
    lines = written(out).splitlines()
    assert lines[0] == "starting 2 ranks"
    assert lines[1] == "the first step ended after 0.5 s: the first step 0.5 s"
    assert lines[2] == "step   1/200  loss 2.5000  2,000 tokens/s  1:40 left"
    assert lines[-1] == "step 200/200  loss 2.5000  2,000 tokens/s  0:00 left"
    assert len(lines) == 13  # the start, every ten seconds of a hundred, the first and the last
    assert shown.steps_done == 200


def test_a_start_is_shown_phase_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a phase gets a line only if it is long; at the end a line has them all."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out, progress, phases = console(), Progress(record_path(tmp_path, 0)), Phases(None)
    with phases.phase("reading the text"):
        now[0] += 2
    with Display(out, tmp_path, 10, "starting 2 ranks", phases=phases) as shown:
        for phase, seconds in (("connecting", 1), ("capturing the model", 25)):
            progress.phase(phase)
            for _ in range(seconds):
                shown.update()
                now[0] += 1
        about = {
            "checkpoint_every": 0, "staging_bytes": 3, "ranks": 2, "device": "cpu", "threads": 1, "parameters": 10,
            "units": 1, "start_seconds": 30.0, "notes": [], "float32_matmul": None,
            "phases": [["starting", 3.0], ["connecting", 0.01], ["capturing the model", 25.0]],
        }  # fmt: skip
        (tmp_path / "about.json").write_text(json.dumps(about))
        (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics(0)) + "\n")
        shown.update()
    lines = written(out).splitlines()
    assert [one for one in lines if one.startswith("capturing")] == [
        "capturing the model, 10 s",
        "capturing the model, 21 s",
    ]
    assert max(map(len, lines)) <= 80 and not any(one.startswith("connecting") for one in lines)
    told = " ".join(" ".join(lines).split())
    assert "the first step ended after 28.0 s: reading the text 2.0 s, starting the ranks 3.0 s, " in told
    assert "capturing the model 25.0 s, the first step 0.5 s" in told


def test_many_short_phases_are_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out, progress = console(), Progress(record_path(tmp_path, 0))
    with Display(out, tmp_path, 10, "starting 2 ranks") as shown:
        for phase in ("connecting", "building the model", "opening the data", "capturing the model"):
            progress.phase(phase)
            for _ in range(6):
                shown.update()
                now[0] += 1
    assert written(out).splitlines() == ["starting 2 ranks", "building the model, 5 s", "capturing the model, 4 s"]


def test_a_terminal_shows_the_phase_under_way(tmp_path: Path) -> None:
    out, progress = console(terminal=True), Progress(record_path(tmp_path, 0))
    with Display(out, tmp_path, 10, "starting 2 ranks") as shown:
        for phase in ("capturing the model", "predicting the memory"):
            progress.phase(phase)
            shown.update()
        progress.begin(0)
        shown.update()
    assert all(
        f"{phase} 0 s" in written(out) for phase in ("capturing the model", "predicting the memory", "the first step")
    )


def test_an_earlier_run_is_not_shown_as_this_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics(0)) + "\n")
    (tmp_path / "evaluations.jsonl").write_text('{"step": 5, "validation_loss": 1.0}\n')
    (tmp_path / "starting").mkdir()
    out = console()
    with Display(out, tmp_path, 10, "starting 1 rank") as shown:
        shown.update()
        assert written(out).splitlines() == ["starting 1 rank"]
        (tmp_path / "starting").rmdir()
        shown.update()
    assert "step  1/10" in written(out) and "validation loss" in written(out)


def test_other_data_than_text_counts_samples(tmp_path: Path) -> None:
    out = console()
    one = {
        "step": 0,
        "loss": 2.5,
        "samples_per_second": 8.25,
        "step_seconds": 0.5,
        "tflops_per_second": 1.5,
        "mfu": 0.42,
    }
    with Display(out, tmp_path, 2, "starting") as shown:
        shown.show([one])
        assert "step 1/2  loss 2.5000  8.2 samples/s  42% MFU  0:00 left" in written(out)
    wide = Console(file=io.StringIO(), width=120)
    with Display(wide, tmp_path, 2, "starting") as shown:
        shown.show([one])
    assert "8.2 samples/s  1.5 TFLOP/s  42% MFU" in written(wide)


def test_bar_on_a_terminal_fits_its_width(tmp_path: Path) -> None:
    out = console(terminal=True)
    with Display(out, tmp_path, 12000, "starting 8 ranks") as shown:
        shown.update()
        shown.show([metrics(11110, seconds=1.0)])
    text = Console(file=io.StringIO(), width=80).render_str(written(out)).plain
    assert "step 11111/12000" in text and "loss 2.5000" in text and "1,000 tokens/s" in text and "14:49 left" in text


def test_run_describes_itself(tmp_path: Path) -> None:
    about = {
        "checkpoint_every": 20, "staging_bytes": 3 << 20,
        "ranks": 2, "device": "cpu", "threads": 1, "parameters": 1_853_760, "units": 6, "start_seconds": 5.04,
        "notes": ["batch dim is static"],
        "float32_matmul": {"precision": "medium", "fast_error": 3e-7, "safe_error": 2e-7},
    }  # fmt: skip
    lines = describe(about)
    assert lines[0] == "2 ranks x 1 thread on cpu, 1.9 M parameters in 6 units, started in 5.0 s"
    assert '"medium"' in lines[1] and "as accurate as" in lines[1]
    assert lines[2] == "checkpoints every 20 steps and at the end; saving one takes 3.0 MiB a rank"
    assert lines[3] == "note: batch dim is static"
    assert max(map(len, lines)) <= 80
    (tmp_path / "about.json").write_text(json.dumps(about))
    out = console()
    with Display(out, tmp_path, 10, "starting") as shown:
        shown.update()
        shown.update()
    assert written(out).count("1.9 M parameters") == 1


def test_result_with_a_sample(tmp_path: Path) -> None:
    (tmp_path / "sample.txt").write_text("\n".join(["def f(\x00\x1b[31m):", "x" * 200, *"abcdefghijklmnopqrstuvwxyz"]))
    result = {
        "steps": 600, "loss_first": 5.5, "loss_last": None, "tokens_per_second": 34120.4, "step_seconds": 0.06,
        "training_seconds": 61.0,
        "peak_memory_bytes": 3 << 20, "ranks": 2, "device": "cpu", "run_dir": "runs/train",
        "weights": "runs/train/weights.safetensors",
        "sample": str(tmp_path / "sample.txt"),
    }  # fmt: skip
    out = console()
    show_result(out, result, 75)
    text = written(out)
    for words in (
        "5.5000 at the first step, not finite at the last of 600",
        "34,120 tokens/s",
        "60 ms a step",
        "1:15, of it 1:01",
        "3.0 MiB",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 80
    assert "\x00" not in text and "\x1b" not in text and "def f(" in text
    assert text.count("x") >= 200 and "│ v " in text and "│ w " not in text  # long lines are folded, long samples cut


def test_numbers() -> None:
    assert [count(n) for n in (0, 999, 1000, 1.85e6, 2e15)] == ["0", "999", "1.0 K", "1.9 M", "2.0 P"]
    assert [size(n) for n in (4, 1536, 3 << 30)] == ["4 B", "1.5 KiB", "3.0 GiB"]
    assert [duration(s) for s in (0.4, 65, 3725)] == ["0:00", "1:05", "1:02:05"]
    assert decimal(1.23456) == "1.2346"


def test_tables() -> None:
    out = console()
    show(
        out,
        pairs("a title", {"name": "[value]", "none": None}),
        grid("", ("a", ">b"), [("x", 1), ("y", 20)], totals=("sum", 21)),
    )
    lines = [line.rstrip() for line in written(out).splitlines()]
    assert lines[:2] == ["a title", "name  [value]"] and "none" not in written(out)
    assert any(line.split() == ["sum", "21"] for line in lines)


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("inf"), "b": [float("nan"), 1.5, (2, "x")]})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.5, [2, "x"]]}
