"""Provide what the commands share: the parsing of their arguments, and how errors reach people."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shardwise.core.errors import ConfigError, ShardwiseError

INTERRUPTED = 130


class Interrupted(KeyboardInterrupt):
    """An interruption, with words on what it has left."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [section.key=value]...",
        help="A TOML file and overrides, in any order.",
        show_default=False,
    ),
]


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split ``[CONFIG.toml] [section.key=value …]``, in any order, into the config file, if any, and the overrides."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).is_file()]
    files = [argument for argument in arguments if argument not in overrides]
    for file in files:
        if not file.endswith(".toml") and not Path(file).is_file():
            raise ConfigError(f"{file}: neither a config file nor section.key=value; legal: CONFIG.toml and overrides")
    if len(files) > 1:
        raise ConfigError(f"{' and '.join(files)}: more than one config file; legal: one at most")
    return (Path(files[0]) if files else None), overrides


@contextmanager
def reported(json: bool) -> Iterator[None]:
    """Turn errors into a message and exit code: 2 for wrong input, 1 for a run that failed, 130 for an interruption."""
    try:
        yield
    except ShardwiseError as error:
        _print_error(error, json)
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt as interruption:
        words = str(interruption) or "interrupted"
        if json:
            _print_json_error(words, "interrupted", None)
        else:
            print(words, file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def exit_code(error: Exception) -> int:
    """Return the exit code of a command that ends with this error: 2 for wrong input, else 1."""
    return 2 if isinstance(error, ShardwiseError) and error.cause == "config" else 1


def _print_error(error: ShardwiseError, json: bool) -> None:
    if json:
        _print_json_error(str(error), error.cause, getattr(error, "rank", None))
        return
    print(f"error: {error}", file=sys.stderr)
    for line in getattr(error, "details", ()) if error.cause != "config" else ():
        print(line, file=sys.stderr)


def _print_json_error(message: str, cause: str, rank: int | None) -> None:
    from shardwise.report.tables import print_json

    print_json({"error": message, "cause": cause, "rank": rank})
