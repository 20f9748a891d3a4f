"""The parts "waits", "repeats", "verify" and "tests": whether what runs on a card is right."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from task import Task, divided

from . import runs
from .contenders import task_for
from .fast import environment
from .parts import ROOT, Part, call, in_child

LLAMA = (
    "model.name=llama", "model.width=64", "model.layers=2", "model.heads=4", "model.kv_heads=2",
    "data.sequence_length=16",
    "data.batch_size=8", "validation.share=0", "train.threads=1",
)  # fmt: skip
GPT = (
    "model.name=gpt", "model.width=64", "model.layers=2", "model.heads=4", "model.dropout=0.1",
    "data.sequence_length=16",
    "data.batch_size=8", "validation.share=0", "train.threads=1",
)  # fmt: skip
BF16 = ("parallel.precision=bf16", "parallel.microbatches=2")
COVERING: dict[str, tuple[str, ...]] = {
    "llama, one rank": (*LLAMA, *BF16),
    "gpt, zero 3, selective": (*GPT, *BF16, "parallel.dp=2", "parallel.zero=3", "parallel.recompute=selective"),
    "gpt, one rank, full": (*GPT, *BF16, "parallel.recompute=full"),
    "llama, one rank, selective": (*LLAMA, *BF16, "parallel.recompute=selective"),
    "llama, zero 3": (*LLAMA, *BF16, "parallel.dp=2", "parallel.zero=3"),
    "llama, zero 1, fp16": (*LLAMA, "parallel.precision=fp16", "parallel.dp=2", "parallel.zero=1"),
    "llama, tp 1d-sp": (*LLAMA, *BF16, "parallel.dp=1", "parallel.tp=2", "parallel.tensor=1d-sp"),
    "gpt, tp 2d": (*GPT, *BF16, "parallel.dp=1", "parallel.tp=4", "parallel.tensor=2d"),
    "gpt, pp 1f1b": (*GPT, *BF16, "parallel.dp=1", "parallel.pp=2", "parallel.schedule=1f1b"),
    "llama, pp zb-h1": (*LLAMA, *BF16, "parallel.dp=1", "parallel.pp=2", "parallel.schedule=zb-h1"),
    "gpt, pp zbv": (*GPT, *BF16, "model.layers=4", "parallel.dp=1", "parallel.pp=2", "parallel.schedule=zbv"),
    "llama, pp × zero 3 × tp": (
        *LLAMA, *BF16, "data.batch_size=8", "parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.zero=3",
        "parallel.tensor=1d-sp",
    ),
    "gpt, zero 2, offload": (*GPT, *BF16, "parallel.dp=2", "parallel.zero=2", "parallel.offload=optimizer"),
}  # fmt: skip
"""Plans that together have both models and every kind of instruction; ranks are threads, so one card is enough."""
TINY_COVERING = ("gpt, zero 3, selective",)
WAITED = "called a synchronizing"  # what torch's debugger says of an op for which the host waits


# ---- the host --------------------------------------------------------------------------------------------------------


def waits(part: Part) -> None:
    """Check that the host does not wait for the device within a step."""
    what = "a step without waits of the host"
    if not part.time_for(what, 15.0):
        return
    with part.guarded(what):
        options = part.options
        found = in_child(
            "gpu.right:waits_of_steps",
            min(part.left, 150.0),
            environment(options.device),
            device=options.device,
            tiny=options.tiny,
        )
        part.figures["waits"] = found
        for plan, one in found.items():
            if one["warnings"] is None:
                part.leave_out(
                    f"{what}, {plan}", f"torch tells of no waits on {options.device}; {one['steps']} steps ran"
                )
                continue
            worst = "; ".join(f"{n} × {place}" for place, n in one["places"].items())
            part.check(
                f"{what}, {plan}",
                one["warnings"] == 0,
                f"{one['warnings'] / one['steps']:g} a step{': ' + worst if worst else ''}",
            )


def waits_of_steps(device: str, tiny: bool) -> dict[str, Any]:
    """Count the warnings of torch's synchronisation debugger, with their places, in three steps of each plan on batches
    as a loader gives them.

    The counts are None on a device that the debugger does not know: it exists for CUDA and ROCm alone.
    """
    import torch

    from shardwise.backend import Backend

    # At full size the queue is never empty.  It clips, since the host must not read the coefficient.
    task = (
        task_for(device, True)
        if tiny
        else Task("bf16", "llama", 4096, 512, 4, 8, 4, 1024, 512, 4, device, clip_norm=1.0)
    )
    plans: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute": "selective"},
        "2 microbatches": {"microbatches": 2},
    }
    found = {}
    for name, changes in {"none": {}}.items() if tiny else plans.items():
        trainer, given = microbatched(task, changes)
        for _ in range(3):
            trainer.step(given)
        debugger = torch.cuda if Backend.of(device).type == "cuda" else None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if debugger is not None:
                debugger.set_sync_debug_mode("warn")
            for _ in range(3):
                trainer.step(given)
            if debugger is not None:
                debugger.set_sync_debug_mode("default")
        texts = [one for one in seen if WAITED in str(one.message)]
        places = Counter(f"{one.filename.rpartition('/src/')[2]}:{one.lineno}" for one in texts)
        told = None if debugger is None else len(texts)
        found[name] = {"warnings": told, "steps": 3, "places": dict(places.most_common(5))}
    return found


def microbatched(task: Task, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Make a Trainer of one rank, and its batch on the host, pinned where the device supports that."""
    from shardwise.backend import Backend
    from shardwise.core.layout import rank_rows
    from shardwise.data.loader import Batch

    trainer, given = divided(0, 1, task=task, changes=changes)
    pins = Backend.of(task.place).pins
    fields = {name: value.cpu().pin_memory() if pins else value.cpu() for name, value in given.fields.items()}
    spans = rank_rows(task.rows, trainer.plan.microbatches, 1, 0)
    return trainer, Batch(fields, task.rows, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


# ---- runs ------------------------------------------------------------------------------------------------------------


def repeats(part: Part) -> None:
    """Check that the losses are the same with launches that block, and after a rank was killed."""
    with tempfile.TemporaryDirectory() as folder:
        _repeats(part, Path(folder), runs.text_file(Path(folder)))


def _repeats(part: Part, folder: Path, source: str) -> None:
    options = part.options
    hidden = {} if options.gpu else {"CUDA_VISIBLE_DEVICES": ""}
    keys = (
        *runs.MODEL,
        "train.devices=1",
        "train.threads=1",
        "parallel.dp=1",
        source,
        "train.deterministic=true",
    )
    what = "ten steps with CUDA_LAUNCH_BLOCKING=1 have the same losses, bit for bit"
    if part.time_for(what, 30.0):
        with part.guarded(what):
            each = min(part.left / 2, 120.0)
            free, blocked = (
                runs.whole(
                    folder / f"blocking {flag}",
                    *keys,
                    "train.steps=10",
                    seconds=each,
                    environment={**hidden, "CUDA_LAUNCH_BLOCKING": flag},
                )
                for flag in "01"
            )
            off = runs.apart(free.curve(), blocked.curve())
            part.figures["blocking"] = {"apart": off, "losses": [loss for _, loss, _ in free.curve()]}
            part.check(what, len(free.curve()) == 10 and off == 0.0, f"apart by {off:.0e}")
    what = "a run whose rank is killed goes on, with the losses of one that is not, bit for bit"
    if not part.time_for(what, 40.0):
        return
    with part.guarded(what):
        steps = (
            ("train.steps=120", "checkpoint.every=20") if options.tiny else ("train.steps=600", "checkpoint.every=50")
        )
        reference = runs.whole(folder / "whole", *keys, *steps, seconds=min(part.left / 2, 120.0), environment=hidden)
        after = 30 if options.tiny else 120
        run, found = runs.killed(
            folder / "killed", *keys, *steps, rank=0, after=after, seconds=min(part.left, 150.0), environment=hidden
        )
        found["apart"] = off = runs.apart(reference.curve(), run.curve())
        part.figures["killed"] = found
        words = f"apart by {off:.0e}; the ranks were ready again after {found['restart_seconds']:.1f} s"
        part.check(what, off == 0.0 and found["named"] and found["went_on"], words)


# ---- verify ----------------------------------------------------------------------------------------------------------


def verified(part: Part) -> None:
    """Run ``shardwise verify`` for the plans of :data:`COVERING`, several at a time."""
    with tempfile.TemporaryDirectory() as folder:
        _verified(part, runs.text_file(Path(folder)))


def _verified(part: Part, source: str) -> None:
    options = part.options
    plans = {name: keys for name, keys in COVERING.items() if not options.tiny or name in TINY_COVERING}
    jobs = 1 if options.tiny else 4
    with ThreadPoolExecutor(jobs) as pool:
        reports = {name: pool.submit(verify, part, (*keys, source)) for name, keys in plans.items()}
        for name, report in reports.items():
            with part.guarded(f"verify, {name}"):
                found = report.result()
                if found is None:
                    part.leave_out(f"verify, {name}", "the time was over")
                    continue
                part.figures.setdefault("verify", {})[name] = {
                    key: found[key] for key in ("passed", "largest", "low_precision", "seconds")
                }
                low = found["low_precision"]
                words = f"largest error {found['largest']:.0e}" + (
                    f", in its precision {low['ratio']:.2f} of one device's" if low else ""
                )
                part.check(f"verify, {name}", found["passed"] and found["ranks_agree"], words)


def verify(part: Part, keys: Sequence[str]) -> dict[str, Any] | None:
    """Return the report of ``shardwise verify`` for one plan; None where there was no time for it."""
    if part.left < 20.0:
        return None
    device = ("--device", part.options.device) if part.options.gpu else ()
    code, output = call(
        [sys.executable, "-m", "shardwise", "verify", "--json", *device, *keys], min(part.left - 5.0, 200.0)
    )
    start = output.find("{")
    if code is None or start < 0:
        raise RuntimeError(
            f"shardwise verify {'was too slow' if code is None else f'ended with code {code}'}: {output[-600:]}"
        )
    found: dict[str, Any] = json.JSONDecoder().raw_decode(output[start:])[0]
    if "error" in found:
        raise RuntimeError(f"shardwise verify: {found['error']}")
    return found


# ---- tests -----------------------------------------------------------------------------------------------------------


def marked_tests(part: Part) -> None:
    """Run the tests that are marked ``gpu``; pytest reads only their files, since others may import what is missing."""
    with tempfile.TemporaryDirectory() as folder:
        _marked_tests(part, Path(folder))


def _marked_tests(part: Part, folder: Path) -> None:
    what = "gpu-marked tests"
    files = sorted((ROOT / "tests" / "device").glob("test_*.py"))
    if not part.options.gpu:
        part.leave_out(what, f"they need a card; {len(files)} files have some")
        return
    if not part.time_for(what, 60.0):
        return
    with part.guarded(what):
        report = folder / "tests.xml"
        # The project's options are left out, since they name plugins that may not be installed.
        side_by_side = ["-n", "6"] if find_spec("xdist") else []
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            "pyproject.toml",
            "-o",
            "addopts=",
            "-q",
            "-m",
            "gpu",
            *side_by_side,
            f"--junitxml={report}",
            *map(str, files),
        ]
        code, output = call(command, part.left - 10.0)
        if not report.exists():
            ended = "were not done in time" if code is None else f"ended with code {code}"
            part.check(what, False, f"{ended}: {output[-800:]}")
            return
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = [
            f"{one.get('classname')}.{one.get('name')}"
            for one in suite.iter("testcase")
            if any(e.tag in ("failure", "error") for e in one)
        ]
        part.figures["tests"] = {**counts, "failed": failed}
        words = ", ".join(f"{n} {key}" for key, n in counts.items())
        ran = counts["tests"] > counts["skipped"]
        part.check(what, ran and code == 0, words + (f"; {', '.join(failed[:8])}" if failed else ""))
