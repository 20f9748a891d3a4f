"""``shardwise bench`` measures what links between ranks carry, and how training scales over ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.core.errors import ConfigError

from .common import Arguments, Json, reported, split_arguments

app = typer.Typer(help="Measure what links between ranks carry, and how training scales.", no_args_is_help=True)

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FACTOR = 8  # between a size and the next


@app.command()
def collectives(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks, each measured by itself.", min=2)] = None,
    host: Annotated[
        int | None, typer.Option(help="Ranks of a host, for hierarchical algorithms. (default: as torchrun says)")
    ] = None,
    least: Annotated[str, typer.Option("--from", help="The smallest size, such as 1KiB.")] = "1KiB",
    most: Annotated[str, typer.Option("--to", help="The largest size.")] = "32MiB",
    of: Annotated[list[str] | None, typer.Option("--of", help="Which collectives. (default: all)")] = None,
    by: Annotated[list[str] | None, typer.Option("--by", help="Which algorithms. (default: all)")] = None,
    backend: Annotated[str, typer.Option(help="auto, shared, gloo, or the one of this machine's devices.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A profile, which parallel.links reads.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Time each collective by each algorithm, over sizes and numbers of ranks: of this machine, or under torchrun."""
    with reported(json):
        sizes = sizes_between(least, most)
        from .bench_collectives import run

        run(tuple(ranks or ()), host, sizes, tuple(of or ()), tuple(by or ()), backend, out, picture, json)


@app.command()
def scaling(
    arguments: Arguments = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Numbers of ranks. (default: 1, 2, 4, … up to this machine's devices)", min=1),
    ] = None,
    axis: Annotated[
        Literal["dp", "tp", "pp", "cp", "ep"],
        typer.Option(help="The key of parallel that grows with the ranks."),
    ] = "dp",
    kind: Annotated[
        Literal["strong", "weak", "both"],
        typer.Option(help="strong: the config's batch for all; weak: it grows with the ranks."),
    ] = "both",
    steps: Annotated[int, typer.Option(help="Steps to measure, in each round.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before these.", min=0)] = 3,
    rounds: Annotated[int, typer.Option(help="How often all numbers of ranks take their turn.", min=1)] = 3,
    earlier: Annotated[
        Path | None, typer.Option("--with", metavar="FILE.json", help="What --out wrote before, to show beside it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Every measured step, and what follows from them.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .png, .svg or .pdf.")] = None,
    json: Json = False,
) -> None:
    """Measure strong and weak scaling of a config, and where the time goes: on this machine, or under torchrun."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])
        from shardwise.launch.scaling import Job

        from .bench_scaling import Files, run

        files = Files(earlier, out, picture)
        run(path, overrides, ranks or (), axis, kind, Job(steps, warmup), rounds, files, json)


def sizes_between(least: str, most: str) -> tuple[int, ...]:
    """Return sizes in bytes from ``least`` to ``most``, each :data:`FACTOR` times the one before."""
    first, last = bytes_of("--from", least), bytes_of("--to", most)
    if first > last:
        raise ConfigError.on("--from", f"{least} is more than --to {most}", "at most that")
    found = [first]
    while found[-1] * FACTOR <= last:
        found.append(found[-1] * FACTOR)
    return tuple(found) if found[-1] == last else (*found, last)


def bytes_of(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        number = float(match[1]) * UNITS[match[2].upper()] if match else 0
    except (ValueError, KeyError):
        number = 0
    if not 1 <= number <= 2**40:
        raise ConfigError.on(option, f"{text} is not a size", "such as 512, 64KiB, 32MiB or 1GiB")
    return int(number)
