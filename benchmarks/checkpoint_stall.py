"""Measure how long a checkpoint stalls training: shardwise against ``torch.distributed.checkpoint.async_save`` (DCP).

    python benchmarks/checkpoint_stall.py [--rounds 5] [--json]

The state is that of a GPT of 110 M parameters in fp32 with AdamW's two moments: 1.3 GB, replicated on two processes as
under DDP, with gloo on loopback and one thread each.  With shardwise each rank saves its half of every flat buffer.
DCP gets the full state dict on both ranks, as its users pass it; its planner drops duplicates when it writes.  For each
rival two processes are started, in which all save in turns; every file is synced.

*stall* is how long the call blocks the slower rank, *done* the time until the checkpoint is complete on both ranks, and
*memory* the most that a rank's process takes beside its state: kept between saves, and at the peak of one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardwise.checkpoint import CheckpointWriter, Piece
from shardwise.core.flat import FlatBuffer
from shardwise.models.gpt import GPT

RANKS = 2
BOUND = 128 << 20
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
RIVALS = ("DCP async_save", "DCP, stager kept", "DCP, cached blocking stager", "DCP, process, shared memory")
Save = Callable[[int], Callable[[], Any]]
"""Save a step and return a function that waits until the checkpoint is complete; the call itself is the stall."""


@dataclass
class Variant:
    """One way to save, and on one rank its stalls and times until done (seconds) and its memory (bytes)."""

    name: str
    save: Save
    close: Callable[[], Any] = lambda: None
    stall: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    kept: int = 0
    peak: int = 0


def shapes() -> list[tuple[str, tuple[int, ...], int]]:
    """Return name, shape and group (1: without weight decay) of each parameter of the model."""
    with torch.device("meta"):
        model = GPT(vocabulary=32768, width=768, layers=12, heads=12, context=1024)
    return [(name, tuple(one.shape), int(one.dim() < 2)) for name, one in model.named_parameters()]


def memory() -> int:
    """Return the resident bytes of this process that are anonymous or shared memory; files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


@contextmanager
def peak_memory(found: list[int]) -> Iterator[None]:
    """Append to ``found`` the most bytes that the process had within the context."""
    stop, most = threading.Event(), [memory()]

    def watch() -> None:
        while not stop.wait(0.02):
            most[0] = max(most[0], memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    found.append(max(most[0], memory()))


def gather_over(group: dist.ProcessGroup) -> Callable[[bytes], list[bytes]]:
    """Return a function that gathers bytes of all ranks over ``group``."""

    def gather(data: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        found = [torch.empty(longest, dtype=torch.uint8) for _ in range(RANKS)]
        dist.all_gather(found, padded, group=group)
        return [one.numpy().tobytes()[: int(length)] for one, length in zip(found, lengths, strict=True)]

    return gather


def ours(
    name: str, rank: int, folder: Path, flats: dict[str, Tensor], buffer: FlatBuffer, bound: int | None
) -> Variant:
    """Make shardwise's way to save, in which each rank saves its half of every flat buffer."""
    shard = buffer.shard(RANKS, rank)
    pieces, offset = [], {entry.name: entry for entry in buffer.entries}
    for kind, flat in flats.items():
        at = {entry: max(shard.start - offset[entry].offset, 0) for entry in offset}
        for entry, box in shard.boxes(buffer):
            start = offset[entry].offset + at[entry]
            at[entry] += box.numel
            pieces.append(
                Piece(f"{kind}.{entry}", offset[entry].shape, box, flat[start : start + box.numel].view(box.shape))
            )
    writer = CheckpointWriter(
        folder / name.replace(" ", "_"),
        rank,
        RANKS,
        gather_over(dist.new_group(backend="gloo")),
        staging_bytes=bound,
        keep_last=1,
        warn=print,
    )

    def save(step: int) -> Callable[[], Any]:
        if not writer.staged_bytes:
            ceiling = writer.ceiling(pieces)
            writer.prepare(pieces)
            assert writer.staged_bytes == ceiling
        writer.save(step, pieces, {"step": step})

        def finish() -> None:
            writer.wait()
            assert [one.error for one in writer.poll()] == [None]

        return finish

    return Variant(name, save, writer.close)


def rival(name: str, rank: int, folder: Path, flats: dict[str, Tensor], buffer: FlatBuffer) -> Variant:
    """Make one of DCP's ways to save, for separate tensors, as modules and optimizers have them."""
    state = {
        kind: {one.name: flat[one.offset : one.stop].clone().view(one.shape) for one in buffer.entries}
        for kind, flat in flats.items()
    }
    options: dict[str, Any] = {"process_group": dist.new_group(backend="gloo")}
    if name == "DCP, stager kept":
        options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
    elif name == "DCP, cached blocking stager":
        options["async_stager"] = BlockingAsyncStager(cache_staged_state_dict=True)
    elif name == "DCP, process, shared memory":
        options["async_stager"] = DefaultStager(StagingOptions(False, True, False, False))
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def save(step: int) -> Callable[[], Any]:
        path = folder / f"dcp_{step}"
        answer = dcp.async_save(state, checkpoint_id=path, **options)

        def finish() -> None:
            (answer if hasattr(answer, "result") else answer.upload_completion).result()
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder / f"dcp_{step - 1}", ignore_errors=True)

        return finish

    return Variant(name, save, options["async_stager"].close if "async_stager" in options else lambda: None)


def measure(one: Variant, step: int) -> None:
    """Save once.  The first save allocates what is kept, and is not timed."""
    dist.barrier()
    before, peaks, start = memory(), [], time.perf_counter()
    with peak_memory(peaks):
        finish = one.save(step)
        stall = time.perf_counter() - start
        finish()
        done = time.perf_counter() - start
    if step == 0:
        one.kept = max(memory() - before, 0)
        one.peak = max(peaks) - before
        return
    one.peak = max(one.peak, max(peaks) - before + one.kept)
    one.stall.append(stall)
    one.done.append(done)


def worker(rank: int, port: int, name: str, rounds: int, folder: Path, results: Any) -> None:
    """Run one rank of the processes in which shardwise and one rival save in turns; a failure ends the process at once,
    with the threads of its groups.
    """
    try:
        take_turns(rank, port, name, rounds, folder, results)
    except Exception as error:
        print(f"{name}, rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def take_turns(rank: int, port: int, name: str, rounds: int, folder: Path, results: Any) -> None:
    """Run the body of :func:`worker`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    buffer = FlatBuffer.pack(shapes(), RANKS, 4)
    flats = {kind: torch.full((buffer.numel,), float(at)) for at, kind in enumerate(KINDS)}
    variants = [
        ours("shardwise", rank, folder, flats, buffer, None),
        ours(f"shardwise, {BOUND >> 20} MiB", rank, folder, flats, buffer, BOUND),
        rival(name, rank, folder, flats, buffer),
    ]
    for step in range(rounds + 1):
        for one in variants:
            measure(one, step)
            for flat in flats.values():
                flat += 1
    for one in variants:
        one.close()
    results.put((rank, [(one.name, one.stall, one.done, one.kept, one.peak) for one in variants]))
    dist.barrier()
    dist.destroy_process_group()


def against(name: str, rounds: int, limit: float) -> list[dict[str, Any]]:
    """Time shardwise and a rival in turns, by the slower rank; OSError or RuntimeError: the rival cannot run here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_stall_", dir="/tmp"))
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=worker, args=(rank, port, name, rounds, folder, results)) for rank in range(RANKS)
    ]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + limit
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"{name}: exit codes {[process.exitcode for process in processes]} within {limit:.0f} s")
        found = dict(results.get() for _ in range(RANKS))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for first, second in zip(found[0], found[1], strict=True):
        stalls = [max(pair) for pair in zip(first[1], second[1], strict=True)]
        dones = [max(pair) for pair in zip(first[2], second[2], strict=True)]
        rows.append({"name": first[0], "against": name, "stall_seconds": stalls, "done_seconds": dones} | {
            "kept_bytes": max(first[3], second[3]), "peak_bytes": max(first[4], second[4]),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each rival")
    # the blocking stager's cache is pinned memory, which torch allocates only where there is an accelerator
    able = [name for name in RIVALS if torch.accelerator.is_available() or "cached" not in name]
    parser.add_argument("--rivals", nargs="*", default=able, choices=RIVALS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = []
    for name in options.rivals:
        try:
            rows += against(name, options.rounds, options.limit)
        except (RuntimeError, OSError) as error:
            failed.append(str(error))
    if options.json:
        print(json.dumps({"load": os.getloadavg(), "rows": rows, "failed": failed}))
        return
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {options.rounds} rounds, medians [min–max]")
    print(f"{'':30} {'stall s':>22} {'done s':>8} {'kept MB':>8} {'peak MB':>8}")
    for row in rows:
        stall = row["stall_seconds"]
        spread = f"{statistics.median(stall):.3f} [{min(stall):.3f}–{max(stall):.3f}]"
        print(
            f"{row['name']:30} {spread:>22} {statistics.median(row['done_seconds']):8.2f} "
            f"{row['kept_bytes'] / 1e6:8.0f} {row['peak_bytes'] / 1e6:8.0f}"
        )
    for line in failed:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
