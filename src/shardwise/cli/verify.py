"""``shardwise verify`` checks that a plan computes the same as one device."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from shardwise.backend import Backend
from shardwise.config import Config
from shardwise.core.errors import ConfigError, check_choice
from shardwise.launch.devices import check_kernels, check_torch
from shardwise.launch.local import clear_logs, launch_local, run_folder
from shardwise.launch.subject import check_plan, load_anywhere
from shardwise.launch.verifying import verify_config
from shardwise.report.files import CONFIG
from shardwise.report.tables import grid, make_console, print_json, show

WORST = 5  # the number of tensors shown if the plan is the same; otherwise all of the report are


def run(path: Path | None, overrides: Sequence[str], json: bool, ranks_as: str, device: str) -> None:
    """Verify, print the report, and exit with 1 where the plan is not the same as one device."""
    check_choice("--ranks-as", ranks_as, ("threads", "processes"))
    where, warnings = _device(device, ranks_as)
    config = load_anywhere(path, overrides)
    console = make_console(stderr=json)
    if not json:
        for warning in warnings:
            console.print(f"note: {warning}", markup=False, soft_wrap=True)
        on = f" on {Backend.of(where).name(where)}" if where.type != "cpu" else ""
        ranks = f"{config.train.devices} ranks ({ranks_as}){on}, {config.microbatches_of_step} microbatches"
        console.print(Text(f"verifying {ranks}, recompute {config.parallel.recompute}"))
    report = verify_config(config, device=where).to_dict() if ranks_as == "threads" else _processes(config)
    if json:
        print_json(report)
    else:
        _show(console, report)
    if not report["passed"]:
        raise typer.Exit(1)


def _device(name: str, ranks_as: str) -> tuple[torch.device, list[str]]:
    """Return the device that ``--device`` names, which ranks as threads share, and warnings; raise :class:`ConfigError`
    if this machine lacks it."""
    here = Backend.here()
    try:
        warnings = check_torch()
    except ConfigError:
        if name != "cpu":
            raise
        warnings = []  # the CPU does not need the GPU that torch cannot use
    legal = ["cpu", *([here.type] if here.asynchronous and here.widest_float is torch.float64 else [])]
    if name not in legal:
        lacks = f": {name} computes in no more than float32" if name == here.type else ""
        raise ConfigError("; ".join([f"--device {name}: legal on this machine: {', '.join(legal)}{lacks}", *warnings]))
    if name != "cpu" and ranks_as != "threads":
        raise ConfigError(f"--device {name} --ranks-as {ranks_as}: legal: ranks as threads, which share one device")
    if name == "cpu":
        return torch.device("cpu"), warnings
    check_kernels(1)
    return here.device(0), warnings


def _processes(config: Config) -> dict[str, Any]:
    check_plan(config, torch.device("cpu"))
    folder = Path(config.train.run_dir) / "verify"
    with run_folder(folder):
        (folder / "report.json").unlink(missing_ok=True)
        clear_logs(folder)
        (folder / CONFIG).write_text(config.resolved(), encoding="utf-8")
        command = ["-m", "shardwise.launch.verifying", str(folder)]
        # The timeout is long, since ranks wait for each other while each computes the whole single-device run.
        launch_local(
            command,
            config.train.devices,
            folder,
            threads=config.train.threads,
            hang_timeout=max(300.0, config.train.hang_timeout),
        )
        report: dict[str, Any] = jsonlib.loads((folder / "report.json").read_text(encoding="utf-8"))
        return report


def _show(console: Console, report: Mapping[str, Any]) -> None:
    tolerance, largest = report["tolerance"], report["largest"]
    rows = [(what, f"{error:.1e}") for what, error in report["summary"].items()]
    show(console, grid("largest relative errors", ("", ">error"), rows))
    worst = report["worst"] if not report["passed"] else report["worst"][:WORST]
    limits = [max(tolerance, one["limit"]) for one in worst]
    cells = [
        (one["name"], one["what"], one["step"], f"{one['error']:.1e}", f"{limit:.0e}")
        for one, limit in zip(worst, limits, strict=True)
    ]
    show(console, grid("worst tensors", ("name", "what", ">step", ">error", ">limit"), cells))
    for note in report["notes"]:
        console.print(Text(f"note: {note}"))
    if not report["ranks_agree"]:
        console.print(Text("the ranks do not have the same parameters after the last step", style="red"))
    low = report["low_precision"]
    if low is not None:
        console.print(Text(
            f"in the plan's own precision: gradients {low['plan']:.2e} from fp64 truth, "
            f"one device's {low['one_device']:.2e}: "
            f"ratio {low['ratio']:.3f} (at most 1.25)"
        ))  # fmt: skip
    beyond = any(one["error"] > max(tolerance, one["limit"]) for one in report["worst"])
    limit = f"{'>' if beyond else '<='} {tolerance:.0e}"
    if largest > tolerance and not beyond:
        limit = "within the limits above"
    verdict = "same as one device" if report["passed"] else "NOT the same as one device"
    if report["microbatches"] > 1:
        verdict += f" that takes {report['microbatches']} microbatches (see the notes)"
    error = "infinite" if math.isinf(largest) else f"{largest:.1e}"
    console.print(Text(
        f"{verdict}: largest error {error} {limit}, {report['compared']} comparisons in "
        f"{report['seconds']:.1f} s",
        style="green" if report["passed"] else "bold red",
    ))  # fmt: skip
