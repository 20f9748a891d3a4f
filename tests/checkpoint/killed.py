"""Run by ``test_folder``: fork a process that saves in a loop, kill it at a random moment, look at what it left; again
and again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from saving_of_checkpoints import flat_pieces, on_ranks  # noqa: E402

from shardwise.checkpoint.atoms import Gather  # noqa: E402
from shardwise.checkpoint.reader import Checkpoint, latest  # noqa: E402
from shardwise.checkpoint.writer import CheckpointWriter  # noqa: E402

SHAPES = {"model.a": (301, 77), "model.b": (1000,), "optimizer.a": (301, 77), "optimizer.step": ()}


def save_in_a_loop(folder: Path) -> None:
    """Go on from the last checkpoint, saving every step, for ever."""
    last = latest(folder)
    first = Checkpoint.open(last).step if last else 0

    def work(rank: int, gather: Gather) -> None:
        writer = CheckpointWriter(folder, rank, 2, gather, warn=print, staging_bytes=100_000 if first % 2 else None)
        step = first
        while True:
            step += 1
            tensors = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}
            writer.save(step, flat_pieces(tensors, rank, 2), {"step": step})
            assert not [one for one in writer.poll() if one.error]

    on_ranks(2, work)


def look(folder: Path, least: int) -> int:
    """The last complete checkpoint is whole, of one step, and not older than before; its step."""
    last = latest(folder)
    if last is None:
        assert least == 0
        return 0
    opened = Checkpoint.open(last)
    opened.verify()
    for name, shape in SHAPES.items():
        values = opened.read(name)
        assert values.shape == shape and bool((values == opened.step).all()), (name, opened.step)
    assert opened.meta == {"step": opened.step} and opened.step >= least
    return opened.step


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    generator, step, leftovers = random.Random(0), 0, 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            try:
                save_in_a_loop(folder)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.05, 0.35))
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = look(folder, step)
        leftovers += any(folder.glob("*.part"))  # there may be no folder yet
    print(f"kills: {kills}\nsteps: {step}\nleftovers: {leftovers}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
