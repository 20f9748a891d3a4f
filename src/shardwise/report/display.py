"""A run is shown while it goes on, from the metrics that it writes; at the end its result is shown."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from .files import ABOUT, EVALUATIONS, METRICS, measured, parsed_line
from .tables import count, decimal, duration, pairs, show, size

RECENT = 20  # the number of steps whose median speed is shown
LINE_INTERVAL = 10.0  # seconds between two lines where there is no terminal
SAMPLE_LINES = 24  # the lines of generated text that are shown at the end

Metrics = dict[str, Any]


class Follower:
    """Reads a file of JSON lines as it grows; a line that is not complete yet waits for its end, and one that is not
    JSON (cut by a full disk) is passed over.

    A file that has been replaced (by a run that goes on from a checkpoint) is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, 0

    def read(self) -> list[Metrics]:
        """Return the objects written since the last call."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._offset, self._inode = 0, inode
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [values for line in whole.splitlines() if (values := parsed_line(line)) is not None]


class Display:
    """Shows a progress bar on a terminal, else a line now and then; :meth:`update` reads what is new and shows it."""

    def __init__(self, console: Console, run_dir: Path, steps: int, start: str, first: int = 0) -> None:
        self._console, self._steps, self._start = console, steps, start
        self._evaluations, self._evaluated, self._first = Follower(run_dir / EVALUATIONS), first, first
        self._about = run_dir / ABOUT
        self._described = False
        self._follower = Follower(run_dir / METRICS)
        self._recent: deque[Metrics] = deque(maxlen=RECENT)
        self._shown = float("-inf")
        self._bar = _Bar(console, steps, start) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        else:
            self.say(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(Text(text))

    def update(self) -> None:
        """Show what the run has written since the last call."""
        self.show([one for one in self._follower.read() if one["step"] >= self._first])

    @property
    def steps_done(self) -> int:
        """The number of steps that the run has written about."""
        return self._recent[-1]["step"] + 1 if self._recent else 0

    def show(self, new: list[Metrics]) -> None:
        """Show these steps, the newest last."""
        if not self._described and self._about.exists():
            self._described = True
            for line in describe(json.loads(self._about.read_text(encoding="utf-8"))):
                self.say(line)
        self._recent.extend(new)
        self._show_evaluations()
        if self._bar is not None:
            if new:
                self._bar.show(new[-1], self._speed, self._left)
            self._bar.refresh()
        elif new and self._due(new[-1]["step"]):
            self._shown = time.monotonic()
            self.say(self._line(new[-1]))

    def _show_evaluations(self) -> None:
        for one in self._evaluations.read():
            if one["step"] > self._evaluated:
                self._evaluated = one["step"]
                self.say(f"after step {one['step']}: validation loss {evaluation(one)}")

    def _due(self, step: int) -> bool:
        return step + 1 == self._steps or time.monotonic() > self._shown + LINE_INTERVAL

    @property
    def _speed(self) -> float:
        return float(statistics.median(one["tokens_per_second"] for one in self._recent))

    @property
    def _left(self) -> float:
        """The estimated seconds to the last step."""
        return float(statistics.median(one["step_seconds"] for one in self._recent)) * (self._steps - self.steps_done)

    def _line(self, last: Metrics) -> str:
        digits = len(str(self._steps))
        return f"step {last['step'] + 1:>{digits}}/{self._steps}  {_numbers(last, self._speed, self._left)}"


def describe(about: Metrics) -> list[str]:
    """Return what a run says of itself before its first step (``about.json``), in lines for people."""
    threads = f" x {about['threads']} thread{'s' if about['threads'] > 1 else ''}" if about["device"] == "cpu" else ""
    matmul = about["float32_matmul"]
    lines = [
        f"{about['ranks']} rank{'s' if about['ranks'] > 1 else ''}{threads} on {about['device']}, "
        f"{count(about['parameters'])} parameters in {about['units']} units, started in {about['start_seconds']:.1f} s"
    ]
    if matmul is not None:
        found = "as accurate as" if matmul["fast_error"] <= 4 * matmul["safe_error"] else "less accurate than"
        lines.append(f'float32 matmul: "{matmul["precision"]}" (the fast kernels are {found} the default here)')
    every = f"every {about['checkpoint_every']} steps and at the end" if about["checkpoint_every"] else "at the end"
    lines.append(f"checkpoints {every}; saving stages at most {size(about['staging_bytes'])} a rank")
    return lines + [f"note: {note}" for note in about["notes"]]


def _numbers(last: Metrics, speed: float, left: float) -> str:
    mfu = f"{last['mfu']:.0%} MFU  " if "mfu" in last else ""
    return f"loss {decimal(last['loss'])}  {speed:,.0f} tokens/s  {mfu}{duration(left)} left"


class _Bar:
    """The progress bar of a terminal."""

    def __init__(self, console: Console, steps: int, start: str) -> None:
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=console, auto_refresh=False, expand=True,
        )  # fmt: skip
        self._steps = steps
        self._task = self._progress.add_task(start, total=None, numbers="")
        self.start, self.stop, self.refresh = self._progress.start, self._progress.stop, self._progress.refresh

    def show(self, last: Metrics, speed: float, left: float) -> None:
        numbers = _numbers(last, speed, left)
        done = last["step"] + 1
        description = f"step {done}/{self._steps}" if done < self._steps else "saving"
        self._progress.update(self._task, description=description, total=self._steps, completed=done, numbers=numbers)


def evaluation(values: Metrics) -> str:
    """Return the loss and the metrics of an evaluation, in a line."""
    loss = decimal(values.get("validation_loss"))
    each = [f"perplexity {values['perplexity']:.2f}"] if values.get("perplexity") is not None else []
    each += [f"{name} {decimal(value)}" for name, value in measured(values).items()]
    return ", ".join([loss, *each])


def stopped_early(stopped: Metrics) -> str:
    """Say why training has ended before its last step."""
    never = f"{stopped['metric']} was never a number"
    best = f"{stopped['metric']} {decimal(stopped['best'])} of step {stopped['best_step']} was not bettered"
    times = f"{stopped['evaluations']} evaluation{'s' if stopped['evaluations'] > 1 else ''}"
    return f"after step {stopped['step']}: {best if stopped['best_step'] is not None else never} in {times}"


def show_result(console: Console, result: Metrics, seconds: float) -> None:
    """Print the result of a run (``result.json``, ``seconds`` in all) as a table, and the text that the model wrote."""
    first, last = decimal(result["loss_first"]), decimal(result["loss_last"])
    speed = result["tokens_per_second"]
    stopped, best = result.get("stopped_early"), result.get("best")
    rows = {
        "loss": f"{first} at the first step, {last} at the last of {result['steps']}",
        "validation": evaluation(result.get("evaluation", {})) if "validation_loss" in result else None,
        "best": None
        if best is None
        else f"{best['metric']} {decimal(best['value'])} after step {best['step']} ({best['checkpoint']})",
        "stopped early": None if stopped is None else stopped_early(stopped),
        "speed": None
        if speed is None
        else f"{speed:,.0f} tokens/s ({result['step_seconds'] * 1e3:,.0f} ms a step, medians)",
        "MFU": f"{result['mfu']:.1%}" if result.get("mfu") is not None else None,
        "time": f"{duration(seconds)}, of it {duration(result['training_seconds'])} training",
        "ranks": f"{result['ranks']} ({result['device']}), at most {size(result['peak_memory_bytes'] or 0)} on rank 0",
        "files": result["run_dir"],
        "weights": Path(result["weights"]).name,
    }
    show(console, pairs("result", rows))
    if "sample" in result:
        lines = Path(result["sample"]).read_text(encoding="utf-8").strip("\n").splitlines()
        text = Text("\n".join(_printable(line) for line in lines[:SAMPLE_LINES]), overflow="fold")
        show(console, Panel(text, title="a sample of what the model writes", title_align="left"))


def _printable(line: str) -> str:
    """Replace control characters, which an untrained model writes too."""
    return "".join(c if c.isprintable() else "\ufffd" if c != "\t" else "    " for c in line)
