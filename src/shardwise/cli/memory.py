"""``shardwise memory`` predicts the bytes of a plan on a device, or shows those of a run, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.estimate.devices import Device, named
from shardwise.launch.forecast_shown import account, headline, servers
from shardwise.launch.subject import forecast, load_anywhere
from shardwise.report.figures import check_format
from shardwise.report.memory import MemoryProfile, chart, comparison, draw, read_memory, table
from shardwise.report.tables import WIDTH, make_console, pairs, print_json, show, size


def run(path: Path | None, overrides: Sequence[str], json: bool, device: str | None, picture: Path | None) -> None:
    """Predict, print and draw the memory that the ranks of a config need; nothing is trained, and no weight is made."""
    if picture is not None:
        check_format(picture, "--picture")
    config = load_anywhere(path, overrides)
    found = forecast(config, None if device is None else named(device))
    worst, others = account(found.worst), [account(one) for one in found.others()]
    here = config.notices if device is None else ()
    notes = [*here, *found.compiled.notes, *([found.note] if found.note else [])]
    notes += [f"not known: {', '.join(ops)} in {name}" for name, ops in found.worst.unknown.items()]
    fit = None if found.fits else found.nearest()
    if picture is not None:
        draw(worst, picture, headline(found), found.budget)
    if json:
        values: dict[str, Any] = {
            "device": found.device.to_dict(), "budget_bytes": found.budget, "beside_bytes": dict(found.beside),
            "plan": found.plan.to_toml(),
            "ranks": [one.to_dict() for one in (worst, *others)], "fits": found.fits, "notes": notes,
        }  # fmt: skip
        if found.servers:
            values |= {"servers": [one.to_dict() for one in found.servers]}
        if fit is not None:
            values |= {"misfit": found.misfit(), "nearest": None if fit.changes is None else dict(fit.changes)}
            values |= {"nearest_peak_bytes": fit.peak, "least_bytes": fit.least, "least": dict(fit.least_changes)}
        print_json(values)
        return
    console = make_console()
    console.print(Text(headline(found), style="bold"), "")
    _print(console, table(f"rank {worst.rank}", worst), worst, found.device, found.budget, found.beside, others)
    if found.servers:
        show(console, pairs("", {"servers": servers(found)}))
    for note in notes:
        console.print(Text(f"note: {note}"))
    if fit is not None:
        console.print(Text(f"does not fit: {found.misfit()}\n{found.advice(fit)}", style="bold red"))
    if picture is not None:
        print(picture)


def run_folder(folder: Path, json: bool, picture: Path | None) -> None:
    """Print and draw the memory that a run has predicted and measured."""
    if picture is not None:
        check_format(picture, "--picture")
    values = read_memory(folder)
    predicted, measured = values["predicted"], values["measured"]
    if picture is not None:
        draw(predicted, picture, values["title"], values["budget_bytes"], measured)
    if json:
        print_json({**values, "predicted": predicted.to_dict(), "measured": measured and measured.to_dict()})
        return
    console, title = make_console(), f"rank {predicted.rank}"
    console.print(Text(values["title"], style="bold"), "")
    if measured is None:
        head = table(f"{title}, not measured: the run has not taken two steps", predicted)
    else:
        head = comparison(title, predicted, measured)
    _print(
        console,
        head,
        predicted,
        Device.from_dict(values["device"]),
        values["budget_bytes"],
        values.get("beside_bytes", {}),
        [],
    )
    if measured is not None and measured.where != predicted.where:
        console.print(Text(f"measured peak: {measured.where}"))
    if picture is not None:
        print(picture)


def _print(
    console: Console, head: Any, worst: MemoryProfile, device: Device, budget: int, beside: Mapping[str, int],
    others: Sequence[MemoryProfile]
) -> None:  # fmt: skip
    left = budget - worst.peak_bytes
    lines = {
        "peak": worst.where,
        "device": f"{device.name}: {size(device.memory)}, of which a rank may take "
        f"{size(budget)}{' for tensors' if beside else ''}",
        "taken": f"{size(device.taken)} by other processes" if device.taken else None,
        "beside tensors": "\n".join(f"{what} {size(n)}" for what, n in beside.items() if n) or None,
        "left": size(left) if left >= 0 else f"none: {size(-left)} too much",
        "host": f"{size(worst.host)} a rank" if worst.host else None,
    }
    lines |= {f"rank {one.rank}": f"{size(worst.peak_bytes - one.peak_bytes)} less" for one in others}
    show(console, head, pairs("", lines))
    console.print(chart(worst, min(console.width, WIDTH), budget), "")
