"""``shardwise bench`` measures what links between ranks carry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shardwise.core.errors import ConfigError

from .common import Json, reported

app = typer.Typer(help="Measure what links between ranks carry.", no_args_is_help=True)

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
