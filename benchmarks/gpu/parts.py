"""What all parts of an acceptance share: options, a time limit, verdicts line by line, and a JSON file that is never
half written.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOUND = "FOUND "  # the prefix of the JSON that a child process prints last
GIB = 2.0**30
MOST_RANKS = 8
GRACE = 10.0  # seconds by which a part may exceed its time before it is stopped


@dataclass(frozen=True)
class Options:
    """How a part runs.

    ``device`` is a device type of torch, such as "cuda" or "cpu"; ``tiny`` chooses models and sizes that a CPU runs in
    seconds; ``out`` is the folder of the JSON files; ``minutes`` is the time limit of a part; ``ranks`` is None where
    each part chooses.
    """

    device: str
    tiny: bool
    out: Path
    minutes: float = 9.0
    ranks: int | None = None

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"


class TimeIsOver(RuntimeError):
    """The error of a part that has not ended long after its time was over."""


class ChildFailed(RuntimeError):
    """The error of a measuring process that failed or was too slow; the message has the last lines that it printed."""


@dataclass
class Part:
    """One part of the acceptance: it prints a line for each verdict, and its file has all of them whenever it ends.

    A verdict is right (True), wrong (False) or unknown (None: it was left out, and the detail says why).
    """

    name: str
    options: Options
    begun: float = field(default_factory=time.monotonic)
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """The seconds that this part still has."""
        return self.options.minutes * 60 - (time.monotonic() - self.begun)

    @property
    def wrong(self) -> bool:
        return any(one["right"] is False for one in self.verdicts)

    def check(self, what: str, right: bool, detail: str = "") -> bool:
        """Note whether something is right, and return it."""
        self._note(what, bool(right), detail)
        return bool(right)

    def leave_out(self, what: str, why: str) -> None:
        """Note that something stays unknown."""
        self._note(what, None, why)

    def time_for(self, what: str, seconds: float) -> bool:
        """Return whether there are about ``seconds`` left for something; if not, note that it stays unknown."""
        if self.left >= seconds:
            return True
        self.leave_out(
            what, f"the time was over: {max(self.left, 0):.0f} s were left of {self.options.minutes:g} minutes"
        )
        return False

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn an exception inside into a verdict, so that the part goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other verdicts of the part are worth having
            traceback.print_exc()
            self.check(what, False, f"{type(error).__name__}: {error}".strip())

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.name} {time.monotonic() - self.begun:4.0f} s] {text}", flush=True)

    def save(self) -> None:
        """Write the part's file, whole or not at all."""
        values = {
            "part": self.name, "device": self.options.device, "tiny": self.options.tiny,
            "machine": _machine(self.options.device),
            "seconds": time.monotonic() - self.begun, "verdicts": self.verdicts, "figures": self.figures,
        }  # fmt: skip
        self.options.out.mkdir(parents=True, exist_ok=True)
        path = self.options.out / f"{self.name}.json"
        whole = path.with_suffix(".part")
        whole.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        whole.replace(path)

    def _note(self, what: str, right: bool | None, detail: str) -> None:
        self.verdicts.append({"what": what, "right": right, "detail": detail})
        word = {True: "right", False: "WRONG", None: "unknown"}[right]
        self.say(f"{word}: {what}{': ' + detail if detail else ''}")
        self.save()


def machine(device: str) -> dict[str, Any]:
    """Return what the figures were measured on: card, driver and versions."""
    import torch

    from shardwise.backend import Backend

    backend = Backend.of(device)
    here = backend.device(0)
    return {
        "card": backend.name(here) if backend.asynchronous else None,
        "cards": backend.count if backend.asynchronous else 0,
        "memory_gib": round(backend.free_and_total(here)[1] / GIB, 2) if backend.asynchronous else None,
        "driver": _driver() if backend.asynchronous else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "system": platform.platform(),
    }


@functools.cache
def _machine(device: str) -> dict[str, Any]:
    """Return :func:`machine` from another process, so that this one takes nothing of a card's memory."""
    found: dict[str, Any] = machine(device) if device == "cpu" else in_child("gpu.parts:machine", 120.0, device=device)
    return found


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where its tool is missing."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None


def finish(process: subprocess.Popen[str], seconds: float) -> tuple[int | None, str]:
    """Wait for a process that leads its own session; return its exit code (None if it was too slow and was killed) and
    its output.
    """
    try:
        output, _ = process.communicate(timeout=max(seconds, 1.0))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def call(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command from the repository's root for at most ``seconds``; return its exit code (None if it was too slow)
    and its output.
    """
    process = subprocess.Popen(
        list(command), cwd=ROOT, env={**os.environ, **(environment or {})}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    return finish(process, seconds)


def in_child(function: str, seconds: float, environment: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Call ``function`` ("gpu.module:name") with plain data in a process of its own and return its result;
    :class:`ChildFailed` where that fails.
    """
    code, output = call([sys.executable, "-m", "gpu.child", function, json.dumps(arguments)], seconds, environment)
    lines = output.splitlines()
    answers = [line for line in lines if line.startswith(FOUND)]
    if code == 0 and answers:
        return json.loads(answers[-1].removeprefix(FOUND))
    ended = f"was stopped after {seconds:.0f} s" if code is None else f"ended with code {code}"
    raise ChildFailed("\n".join([f"{function} {ended}", *lines[-12:]]))


def parse(
    about: str, names: Sequence[str], arguments: Sequence[str] | None = None, *, ranks: bool = False
) -> tuple[list[str], Options]:
    """Parse the command line; return the chosen parts, by default all, and the options."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(names)}; by default all")
    parser.add_argument(
        "--device", help="a type of torch's, such as cuda or cpu; by default the accelerator that there is"
    )
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to try the script itself")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the JSON files")
    parser.add_argument("--minutes", type=float, default=9.0, help="that each part takes at most")
    if ranks:
        parser.add_argument("--ranks", type=int, help="by default the cards that there are; 2 on a CPU")
    chosen = parser.parse_args(arguments)
    for part in chosen.parts:
        if part not in names:
            parser.error(f"part {part!r} is not legal; legal: {', '.join(names)}")
    if not 0 < chosen.minutes <= 60:
        parser.error(f"--minutes {chosen.minutes:g} is not legal; legal: more than 0, at most 60")
    device = chosen.device or _device_here()
    if (problem := _missing(device)) is not None:
        parser.error(f"--device {device} is not legal here: {problem}")
    if getattr(chosen, "ranks", None) is not None and not 2 <= chosen.ranks <= MOST_RANKS:
        parser.error(f"--ranks {chosen.ranks} is not legal; legal: 2 to {MOST_RANKS}")
    return chosen.parts or list(names), Options(
        device, chosen.tiny, chosen.out.resolve(), chosen.minutes, getattr(chosen, "ranks", None)
    )


def _missing(device: str) -> str | None:
    """Return why nothing can run on a type of device, None if something can."""
    from shardwise.backend import Backend

    try:
        found = Backend.of(device).count
    except (RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None if found else "this torch sees none; legal: cpu, or a torch and a driver for it"


def _device_here() -> str:
    from shardwise.backend import Backend

    return Backend.here().type


def run(name: str, options: Options, function: Callable[[Part], None]) -> Part:
    """Run a part to its end, whatever happens in it; a part that exceeds its time is stopped a little later."""
    part = Part(name, options)
    part.say(f"on {options.device}, for at most {options.minutes:g} minutes")

    def ring(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, GRACE)
        raise TimeIsOver(f"it was not over {time.monotonic() - part.begun:.0f} s after the part had begun")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, options.minutes * 60 + GRACE)
    try:
        with part.guarded(f"{name} as a whole"):
            function(part)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    part.save()
    return part


def main(
    about: str, parts: Mapping[str, Callable[[Part], None]], rewrite: Callable[[Options], Path], *, ranks: bool = False
) -> int:
    """Run the chosen parts one after the other, with a report after each; return 1 where anything was wrong, else 0."""
    chosen, options = parse(about, list(parts), ranks=ranks)
    wrong = False
    for name in chosen:
        wrong |= run(name, options, parts[name]).wrong
        try:
            print(f"{rewrite(options)} has what was found so far", flush=True)
        except Exception:  # noqa: BLE001 - the parts that follow are worth more than the document
            traceback.print_exc()
            wrong = True
    print("WRONG: the lines above say what" if wrong else "right: nothing was wrong", flush=True)
    return int(wrong)
