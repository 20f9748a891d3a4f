"""``shardwise tokenizer`` makes a tokenizer from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import Json, reported

app = typer.Typer(name="tokenizer", help="Tokenizers for data.tokenizer.", no_args_is_help=True)


@app.callback()
def tokenizer() -> None:
    """Make tokenizers for data.tokenizer."""


@app.command()
def train(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help='Text: files, folders, globs, folders of Hugging Face datasets, or "stdlib".',
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The tokenizer.json to write.")] = Path("tokenizer.json"),
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Tokens, the 256 bytes and <|endoftext|> included.")
    ] = 8192,
    text_field: Annotated[
        str, typer.Option(metavar="NAME", help="The column of text in .jsonl, .parquet and datasets.")
    ] = "text",
    json: Json = False,
) -> None:
    """Make a byte-level BPE tokenizer of N tokens from text; the same text gives the same file."""
    with reported(json):
        from dataclasses import asdict

        from rich.filesize import decimal

        from shardwise.data.bpe import train_tokenizer
        from shardwise.data.progress import shown
        from shardwise.report.tables import make_console, print_json

        console = make_console(stderr=json)
        with shown("reading text", console) as progress:
            made = train_tokenizer(sources, out, vocabulary, field=text_field, progress=None if json else progress)
        if json:
            print_json(asdict(made))
            return
        lines = [f"{made.path}: {made.vocabulary} tokens from {made.documents} documents ({decimal(made.bytes)})"]
        if made.vocabulary < vocabulary:
            lines.append(f"note: the text has no pairs for more than {made.vocabulary} of {vocabulary} tokens")
        lines.append(f'use it with data.tokenizer="{made.path}"')
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)  # no hard line breaks in a path that may be copied
