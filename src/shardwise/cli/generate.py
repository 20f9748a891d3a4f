"""``shardwise generate`` lets a trained model write."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from shardwise.launch.generating import Choice, Writer
from shardwise.report.tables import print_json


def run(
    folder: Path,
    prompt: str,
    json: bool,
    chat: bool,
    tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> None:
    """Print what the model of ``folder`` writes after ``prompt``, and nothing else."""
    writer = Writer.open(folder)
    began = time.monotonic()
    written = writer.write(prompt, Choice(tokens, temperature, top_k, top_p, seed), chat)
    if json:
        print_json({**asdict(written), "seconds": time.monotonic() - began})
    else:
        print(written.text.strip() if chat else written.text)
