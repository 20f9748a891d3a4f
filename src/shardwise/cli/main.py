"""The ``shardwise`` command.  What needs torch is imported inside the commands: ``--help`` and wrong arguments answer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import reported, split_arguments

app = typer.Typer(
    name="shardwise",
    help="Train any PyTorch model on any set of devices as if they were one device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [section.key=value]...", help="A TOML file and overrides, in any order.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command()
def train(arguments: Arguments = None, json: Json = False) -> None:
    """Train on all local devices; without arguments a small GPT on the Python standard library's source text."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .train import run

        run(path, overrides, json)


@app.command()
def verify(
    arguments: Arguments = None,
    json: Json = False,
    ranks_as: Annotated[str, typer.Option(help="How ranks are run: threads (any number) or processes.")] = "threads",
) -> None:
    """Is the plan, for this model, the same as one device?  Three steps of both in fp64 are compared, tensor by tensor."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .verify import run

        run(path, overrides, json, ranks_as)


@app.command()
def show(
    arguments: Arguments = None,
    json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the program of a step instead of printing it.")
    ] = None,
) -> None:
    """The plan, the model's units with their costs, and the program of a step."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .show import run

        run(path, overrides, json, picture)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    script: Annotated[Path, typer.Argument(help="A Python script; what follows it are its own arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes to start.  [default: one for each device]", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each.  [default: cores / ranks]", min=1)] = None,
    run_dir: Annotated[Path, typer.Option(help="The folder of logs.")] = Path("runs/launch"),
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait in a step for one that does not move.", min=1.0)
    ] = 20.0,
    json: Json = False,
) -> None:
    """Run a script of yours on all local devices, as `shardwise train` runs its ranks."""
    with reported(json):
        from .launch import run

        run(script, arguments or [], ranks, threads, run_dir, json, hang_timeout)


def main() -> None:
    """The entry point."""
    app()
