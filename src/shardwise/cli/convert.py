"""``shardwise convert`` says what a config of Accelerate, DeepSpeed or FSDP becomes, and writes it as TOML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.config.toml import dumps, inline
from shardwise.core.errors import ConfigError
from shardwise.integrations.configs.answers import KINDS, Line
from shardwise.integrations.configs.read import convert
from shardwise.report.tables import grid, make_console, print_json, show


def run(path: Path, source: str | None, ranks: int | None, out: Path | None, json: bool) -> None:
    """Print a line for each key of the file, and write the config if ``out`` is given."""
    found = convert(path, source, ranks)
    text = dumps(found.sections)
    if out is not None:
        _write(out, f"# from {path.name}, by `shardwise convert`\n\n{text}")
    if json:
        lines = [
            {"key": line.key, "value": line.value, "kind": line.answer.kind, "settings": dict(line.answer.settings),
             "why": line.answer.why} for line in found.lines
        ]  # fmt: skip
        print_json({"from": found.source, "lines": lines, "config": found.sections, "out": str(out) if out else None})
        return
    console = make_console()
    for kind, words in KINDS.items():
        rows = [_row(line) for line in found.lines if line.answer.kind == kind]
        if rows:
            show(console, grid(words, ("key", "value", "here"), rows))
    print(text if out is None else f"written to {out}; next: shardwise show {out}")


def _row(line: Line) -> Sequence[Any]:
    settings = ", ".join(f"{name} = {inline(value)}" for name, value in line.answer.settings.items())
    return line.key, inline(line.value), ": ".join(filter(None, (settings, line.answer.why)))


def _write(out: Path, text: str) -> None:
    if out.exists():
        raise ConfigError(f"--out {out}: there is such a file; legal: a new file")
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written: {error.strerror}; legal: a file in a folder that exists"
        ) from error
