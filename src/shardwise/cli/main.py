"""Define the ``shardwise`` command.  Modules that need torch are imported inside the commands, so that ``--help`` and
wrong arguments answer at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise import __version__
from shardwise.core.errors import ConfigError

from . import bench, checkpoint, tokenizer
from .common import Arguments, Json, reported, split_arguments
from .looks import LOOKS

app = typer.Typer(
    name="shardwise",
    help="Train any PyTorch model on any set of devices as if they were one device.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(tokenizer.app, name="tokenizer")


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train any PyTorch model on any set of devices as if they were one device."""


@app.command()
def init(
    name: Annotated[
        str,
        typer.Argument(
            metavar="gpt|image|factory|finetune|sft",
            help="gpt: a small GPT on text; image: a convolutional network on pictures; factory: your model and your "
            "data; finetune: the weights of a Hugging Face folder, on text; sft: the same, on answers.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Where to write; by default a folder of this name.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a config that trains as it is, with the Python files that it names; nothing is overwritten."""
    with reported(json):
        from .init import run

        run(name, folder, json)


@app.command()
def train(arguments: Arguments = None, json: Json = False) -> None:
    """Train on all local devices; without arguments, train a small GPT on the source of Python's standard library."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .train import run

        run(path, overrides, json)


@app.command()
def join(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that is training.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Be one more worker of a run with parameter servers, on this host, until its batches are done."""
    with reported(json):
        from .join import run

        run(folder)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[section.key=value]...", help="Other data, metrics or devices than the run's.", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Whose weights: best, last, or a step.")] = "last",
    json: Json = False,
) -> None:
    """Evaluate the weights of a run on its validation data, all of it, or on other data."""
    with reported(json):
        path, given = split_arguments(overrides or [])  # before torch is imported
        if path is not None:
            raise ConfigError(f"{path}: legal: section.key=value after the run's folder, whose config is used")
        from .evaluate import run

        run(run_dir, checkpoint, given, json)


@app.command()
def encode(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Texts: .txt (lines), .jsonl or .parquet (rows).")],
    model: Annotated[
        str, typer.Option(help="The folder of a transformers model, or file.py:function that makes texts -> vectors.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.npy", help="Where the vectors go: .npy or .parquet.")],
    field: Annotated[str, typer.Option(help="The column of texts in .jsonl and .parquet.")] = "text",
    pooling: Annotated[
        str | None, typer.Option(help="mean, cls or max. (default: what the folder says, or mean)")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Vectors of norm 1. (default: what the folder says, or no)"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens that a text is cut to. (default: what the folder says, or 512)")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts that a rank computes at once.", min=1)] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    ranks: Annotated[int | None, typer.Option(help="Processes. (default: one for each GPU, else one)", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each. (default: cores / ranks)", min=1)] = None,
    json: Json = False,
) -> None:
    """Turn each row of a corpus into a vector, in order, on all devices; the same command goes on after a kill."""
    with reported(json):
        from .encode import run

        run(source, model, out, field, pooling, normalize, max_length, batch_size, precision, ranks, threads, json)


@app.command()
def verify(
    arguments: Arguments = None,
    json: Json = False,
    ranks_as: Annotated[str, typer.Option(help="How ranks are run: threads (any number) or processes.")] = "threads",
    device: Annotated[
        str,
        typer.Option(
            help="Where ranks and what they are compared with compute: cpu, or the type of this machine's GPU (cuda, "
            "xpu)."
        ),
    ] = "cpu",
) -> None:
    """Check that the plan computes the same as one device, by comparing a few fp64 steps of both tensor by tensor."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .verify import run

        run(path, overrides, json, ranks_as, device)


for look in LOOKS:
    app.command()(look)


@app.command()
def config(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml] [section.key=value]... | [section.key | section]...",
            help="A config, or keys to explain.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[bool, typer.Option("--reference", help="Print the page of all keys, as Markdown.")] = False,
    json: Json = False,
) -> None:
    """Show the values of a config with all its defaults, or what keys mean."""
    with reported(json):
        from .config import run

        run(arguments or [], reference, json)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A YAML of Accelerate, a JSON of DeepSpeed, or FSDP arguments.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="accelerate, deepspeed or fsdp; by default told by the keys"),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Data-parallel ranks, for batch sizes.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the config.")] = None,
    json: Json = False,
) -> None:
    """Say what each key of another library's config becomes here, and write it as a config of shardwise."""
    with reported(json):
        from .convert import run

        run(file, source, ranks, out, json)


@app.command()
def generate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR | FOLDER", help="The folder of a run, of a Hugging Face model, or of an adapter of peft."
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to go on from.", show_default=False)],
    chat: Annotated[
        bool, typer.Option("--chat", help="Take PROMPT as a user's message, by the chat template, and answer it.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="The most tokens to write. (default: 100, or what has room)", min=1)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0: the likeliest token. (default: that of the folder's generation config; own models 0.8)", min=0.0
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens.", min=1)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up P.", min=0.0, max=1.0)
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of what is drawn.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Let a trained model write: go on from a prompt, or answer it."""
    with reported(json):
        from .generate import run

        run(folder, prompt, json, chat, tokens, temperature, top_k, top_p, seed)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch(
    script: Annotated[Path, typer.Argument(help="A Python script; what follows it are its own arguments.")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes to start. (default: one for each device)", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each. (default: cores / ranks)", min=1)] = None,
    run_dir: Annotated[Path, typer.Option(help="The folder of logs.")] = Path("runs/launch"),
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait in a step for one that does not move.", min=1.0)
    ] = 20.0,
    json: Json = False,
) -> None:
    """Run your script on all local devices, as `shardwise train` runs its ranks."""
    with reported(json):
        from .launch import run

        run(script, arguments or [], ranks, threads, run_dir, json, hang_timeout)


def _with_keys_to_explain(arguments: list[str]) -> list[str]:
    """Return the arguments of the command: ``… --help section.key`` is ``config section.key``."""
    if len(arguments) >= 2 and arguments[-2] in ("--help", "-h") and "launch" not in arguments:
        return ["config", arguments[-1]]
    return arguments


def main() -> None:
    """Run the command.

    After a failure the process ends at once, since threads of torchelastic have kept processes alive whose ranks had
    been ended.
    """
    try:
        app(_with_keys_to_explain(sys.argv[1:]))
    except SystemExit as end:
        if end.code in (None, 0):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
