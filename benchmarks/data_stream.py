"""Measure how fast text becomes tokens and tokens become batches, and how much memory that takes.

    python benchmarks/data_stream.py [--mib 256] [--tokenizer tokenizer.json] [--json]

It makes a corpus of --mib MiB of varied lines (a quarter of the files .jsonl, the rest text), tokenises it, and streams
whole epochs through the loader, as one rank and as rank 0 of 2. Memory is sampled over the epoch: it should stay flat.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from shardwise.core.mesh import Mesh
from shardwise.data.corpus import open_corpus
from shardwise.data.loader import Loader
from shardwise.data.windows import PackedWindows

LENGTH, ROWS = 128, 16  # those of the default config
POINTS = 8  # points of an epoch at which memory is read
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "this",
    "are",
    "or",
    "his",
    "from",
    "at",
    "which",
    "but",
    "have",
    "an",
    "had",
    "they",
]


def make_corpus(folder: Path, mib: int) -> int:
    """Write files of 1 KiB to 1 MiB until they have ``mib`` MiB; return the bytes written."""
    dice, written, number = random.Random(0), 0, 0
    while written < mib << 20:
        size = int(2 ** dice.uniform(10, 20))
        lines = []
        while size > 0:
            words = dice.choices(WORDS, k=dice.randint(2, 14))
            lines.append(f"{number} {' '.join(words)} {dice.getrandbits(32):x}")
            size -= len(lines[-1]) + 1
        if number % 4 == 0:
            text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
            path = folder / f"{number:06}.jsonl"
        else:
            text, path = "\n".join(lines), folder / f"{number:06}.txt"
        path.write_text(text)
        written, number = written + len(text), number + 1
    return written


def resident() -> dict[str, float]:
    """Return the resident MiB of this process, and those that are not pages of files."""
    found = psutil.Process().memory_info()
    return {"rss_mib": found.rss / 2**20, "anonymous_mib": (found.rss - found.shared) / 2**20}


def stream(dataset: PackedWindows, parts: int) -> dict[str, Any]:
    """Stream one epoch as rank 0 of ``parts``; return tokens/s of that rank's rows, and the memory along the way."""
    start = time.perf_counter()
    with Loader(dataset, Mesh.of(dp=parts), 0, ROWS) as loader:
        batch = next(loader)
        first, tokens, rows = time.perf_counter() - start, 0, 0
        memory, begin = [resident()], time.perf_counter()
        step = max(1, len(dataset) // POINTS)
        while loader.state[0] == 0:
            batch = next(loader)
            tokens += batch.fields["input_ids"].numel()
            rows += batch.rows
            if rows >= step * len(memory):
                memory.append(resident())
        seconds = time.perf_counter() - begin
    return {
        "ranks": parts,
        "first_batch_seconds": first,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "memory": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="shardwise-data-"))
    try:
        (root / "corpus").mkdir()
        written = make_corpus(root / "corpus", options.mib)
        arguments: dict[str, Any] = {
            "tokenizer": options.tokenizer, "validation": 0.01, "cache_dir": str(root / "cache"),
            "workers": options.workers,
        }  # fmt: skip
        start = time.perf_counter()
        open_corpus(str(root / "corpus"), **arguments)
        made = time.perf_counter() - start
        start = time.perf_counter()
        corpus = open_corpus(str(root / "corpus"), **arguments)
        dataset = corpus.train(LENGTH)
        opened = time.perf_counter() - start
        result: dict[str, Any] = {
            "corpus_mib": written / 2**20, "tokenizer": options.tokenizer, "tokens": corpus.cache.train.tokens,
            "documents": corpus.cache.train.documents, "tokenise_seconds": made,
            "tokenise_mb_per_second": written / 1e6 / made,
            "open_seconds": opened, "streams": [stream(dataset, parts) for parts in (1, 2)],
        }  # fmt: skip
    finally:
        shutil.rmtree(root)
    print(json.dumps(result, indent=2) if options.json else report(result))


def report(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [
        f"{result['corpus_mib']:.0f} MiB of text, {result['documents']} documents, {result['tokens']} tokens "
        f"({result['tokenizer']})",
        f"tokenised in {result['tokenise_seconds']:.1f} s: {result['tokenise_mb_per_second']:.1f} MB/s",
        f"opened again in {result['open_seconds'] * 1e3:.0f} ms",
    ]
    for one in result["streams"]:
        lines.append(
            f"rank 0 of {one['ranks']}: {one['tokens_per_second']:.0f} tokens/s over an epoch of {one['seconds']:.1f} "
            "s, "
            f"first batch after {one['first_batch_seconds'] * 1e3:.0f} ms"
        )
        lines.append("  resident MiB: " + " ".join(f"{point['rss_mib']:.0f}" for point in one["memory"]))
        lines.append("  of which not files: " + " ".join(f"{point['anonymous_mib']:.0f}" for point in one["memory"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
