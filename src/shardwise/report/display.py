"""A run is shown while it goes on, from the metrics that it writes; at the end its result is shown."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from shardwise.runtime.progress import Record, read_record

from . import speed
from .files import ABOUT, EVALUATIONS, METRICS, STARTING, current, measured, parsed_line
from .starting import Phases, in_words
from .tables import count, decimal, duration, flops, pairs, plural, show, size

RECENT = 20  # the number of steps whose median speed is shown
LINE_INTERVAL = 10.0  # seconds between two lines where there is no terminal
RANKS, FIRST_STEP = "starting the ranks", "the first step"  # phases of a start
WIDE = 100  # columns
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
    """Shows a progress bar on a terminal, else a line now and then; :meth:`update` reads what is new and shows it.

    Before the first step, that is the phase of the start that rank 0 is in; ``phases`` are those before the ranks.
    """

    def __init__(
        self, console: Console, run_dir: Path, steps: int, start: str, first: int = 0, phases: Phases | None = None
    ) -> None:
        self._console, self._steps, self._start = console, steps, start
        self._evaluations, self._evaluated, self._first = Follower(run_dir / EVALUATIONS), first, first
        self._run_dir, self._phases = run_dir, phases or Phases(None)
        self._about: Metrics = {}
        self._phase, self._since = "", time.monotonic()
        self._began = self._since
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
        begun = not (self._run_dir / STARTING).exists()  # else the files are those of an earlier run
        self.show([one for one in self._follower.read() if one["step"] >= self._first] if begun else [])
        if not self._recent:
            self._show_phase(read_record(self._run_dir, 0))

    @property
    def steps_done(self) -> int:
        """The number of steps that the run has written about."""
        return self._recent[-1]["step"] + 1 if self._recent else 0

    def show(self, new: list[Metrics]) -> None:
        """Show these steps, the newest last."""
        self._describe()
        if new and not self._recent:
            self._show_start(new[0])
        self._recent.extend(new)
        if not (self._run_dir / STARTING).exists():
            self._show_evaluations()
        if self._bar is not None:
            if new:
                self._bar.show(new[-1], _numbers(new[-1], self._speed, self._left, self._wide))
            self._bar.refresh()
        elif new and self._due(new[-1]["step"]):
            self._shown = time.monotonic()
            self.say(self._line(new[-1]))

    def _describe(self) -> None:
        """Show what the run says of itself before its first step, once it does."""
        if self._about:
            return
        with suppress(OSError, ValueError):  # it is written, or moved, just now
            self._about = json.loads(current(self._run_dir, ABOUT).read_bytes())
            for line in describe(self._about):
                self.say(line)

    def _show_phase(self, record: Record | None) -> None:
        """Show what rank 0 does before its first step: on a terminal always, else if it takes long."""
        if record is None:
            return
        phase = FIRST_STEP if record.step >= 0 else RANKS if record.doing == "starting" else record.doing
        if phase != self._phase:
            self._phase, self._since = phase, time.monotonic()
            self._shown = max(self._shown, self._began)
        seconds = time.monotonic() - self._since
        if self._bar is not None:
            self._bar.phase(f"{phase} {seconds:.0f} s")
            self._bar.refresh()
        elif time.monotonic() > self._shown + LINE_INTERVAL:
            self._shown = time.monotonic()
            self.say(f"{phase}, {seconds:.0f} s")

    def _show_start(self, first: Metrics) -> None:
        """Show how long the start took, and what of it."""
        self._shown = float("-inf")
        ranks = [(RANKS if at == 0 else text, taken) for at, (text, taken) in enumerate(self._about.get("phases", ()))]
        phases = [*self._phases.done, *ranks, (FIRST_STEP, first["step_seconds"])]
        self.say(in_words(self._phases.seconds, phases))

    def _show_evaluations(self) -> None:
        for one in self._evaluations.read():
            if one["step"] > self._evaluated:
                self._evaluated = one["step"]
                self.say(f"after step {one['step']}: validation loss {evaluation(one)}")

    def _due(self, step: int) -> bool:
        return step + 1 == self._steps or time.monotonic() > self._shown + LINE_INTERVAL

    @property
    def _speed(self) -> float:
        return speed.median(self._recent) or 0.0

    @property
    def _wide(self) -> bool:
        """Whether a line has room for everything."""
        return self._console.width >= WIDE

    @property
    def _left(self) -> float:
        """The estimated seconds to the last step."""
        return float(statistics.median(one["step_seconds"] for one in self._recent)) * (self._steps - self.steps_done)

    def _line(self, last: Metrics) -> str:
        digits = len(str(self._steps))
        return f"step {last['step'] + 1:>{digits}}/{self._steps}  {_numbers(last, self._speed, self._left, self._wide)}"


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
        lines.append(f'float32 matmul: "{matmul["precision"]}" (fast kernels are {found} the default here)')
    every = (
        f"every {plural(about['checkpoint_every'], 'step')} and at the end"
        if about["checkpoint_every"]
        else "at the end"
    )
    lines.append(f"checkpoints {every}; saving one takes {size(about['staging_bytes'])} a rank")
    return lines + [f"note: {note}" for note in about["notes"]]


def _numbers(last: Metrics, median: float, left: float, wide: bool) -> str:
    use = _use(last) if wide else _use(last)[-1:]
    return "  ".join([f"loss {decimal(last['loss'])}", speed.in_words(last, median), *use, f"{duration(left)} left"])


def _use(values: Metrics) -> list[str]:
    """Return the FLOP/s and the MFU of a step or of a run, where they are known."""
    found = [flops(values["tflops_per_second"] * 1e12)] if values.get("tflops_per_second") is not None else []
    mfu = values.get("mfu")
    return found + ([f"{mfu:.{0 if mfu >= 0.1 else 1}%} MFU"] if mfu is not None else [])


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

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def show(self, last: Metrics, numbers: str) -> None:
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
    times = plural(stopped["evaluations"], "evaluation")
    return f"after step {stopped['step']}: {best if stopped['best_step'] is not None else never} in {times}"


def show_result(console: Console, result: Metrics, seconds: float | None) -> None:
    """Print the result of a run (``result.json``, ``seconds`` in all) as a table, and the text that the model wrote."""
    first, last = decimal(result["loss_first"]), decimal(result["loss_last"])
    median = result.get(speed.key_of(result))
    training = f"{duration(result['training_seconds'])} training"
    stopped, best = result.get("stopped_early"), result.get("best")
    rows: dict[str, str | None] = {
        "loss": f"{first} at the first step, {last} at the last of {result['steps']}",
        "validation": evaluation(result.get("evaluation", {})) if "validation_loss" in result else None,
        "best": None
        if best is None
        else f"{best['metric']} {decimal(best['value'])} after step {best['step']} ({best['checkpoint']})",
        "stopped early": None if stopped is None else stopped_early(stopped),
        "speed": None
        if median is None
        else f"{speed.in_words(result, median)} ({result['step_seconds'] * 1e3:,.0f} ms a step, medians)",
        "model": ", ".join(_use(result)) or None,
        "time": training if seconds is None else f"{duration(seconds)}, of it {training}",
        "ranks": f"{result['ranks']} ({result['device']}), at most {size(result['peak_memory_bytes'] or 0)} on rank 0",
        "files": result["run_dir"],
        **{name: Path(result[name]).name for name in ("weights", "adapter") if name in result},
    }
    show(console, pairs("result", rows))
    if "sample" in result and Path(result["sample"]).exists():
        lines = Path(result["sample"]).read_text(encoding="utf-8").strip("\n").splitlines()
        text = Text("\n".join(printable(line) for line in lines[:SAMPLE_LINES]), overflow="fold")
        show(console, Panel(text, title="a sample of what the model writes", title_align="left"))


def printable(line: str) -> str:
    """Replace control characters, which an untrained model writes too."""
    return "".join(c if c.isprintable() else "\ufffd" if c != "\t" else "    " for c in line)
