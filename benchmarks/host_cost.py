"""Measure what an instruction costs the host: the CPU time of steps of a model that is so small that it computes almost
nothing, with its layers whole and cut into segments.

    python benchmarks/host_cost.py [--tensor 1d-sp] [--layers 8] [--microbatches 4] [--rounds 15]

One rank of two runs its program and sends nothing.  Under overlap = "pairs" its layers are cut at what they exchange,
so the program has more instructions, which compute the same: the difference in time is what these cost.  It is that of
the fastest of all steps; the other cores do not matter, as it is CPU time.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from task import Task, under_keys

UNIT = 5e-3  # seconds of a unit, of which the cost of an instruction is to be at most 1 %


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", choices=["1d", "1d-sp"], default="1d")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15, help="turns of a step each")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(options.tensor, options.layers, options.microbatches, options.rounds)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {options.tensor}")
    for way in ("none", "pairs"):
        print(f'overlap = "{way}": {found[way]["seconds"] * 1e3:.1f} ms, {found[way]["instructions"]} instructions')
    one, layer = found["instruction"], found["layer"]
    print(f"an instruction: {one * 1e6:.0f} µs, {one / UNIT:.2%} of {UNIT * 1e3:.0f} ms")
    print(f"a layer that is cut, in a microbatch: {layer * 1e6:.0f} µs")
    if options.json is not None:
        options.json.write_text(json.dumps(found))


def measured(tensor: str, layers: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Return the seconds and instructions of a step in either way, and the seconds of one more instruction and of
    cutting a layer in a microbatch."""
    task = Task(width=32, layers=layers, sequence=8, rows=microbatches, heads=2, vocabulary=64)
    ways = {}
    for way in ("none", "pairs"):
        keys = {"tp": 2, "tensor": tensor, "overlap": way, "microbatches": microbatches}
        ways[way] = under_keys(0, 2, task=task, keys=keys, backend="alone")
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(rounds + 2):
        for way, (trainer, batch) in ways.items():
            start = time.process_time()
            trainer.step(batch)
            if turn > 1:
                best[way] = min(best[way], time.process_time() - start)
    found: dict[str, Any] = {}
    for way, (trainer, _) in ways.items():
        (program,) = trainer.compiled.programs(trainer.compiled.general, microbatches)
        found[way] = {"seconds": best[way], "instructions": len(program.instructions)}
    more = best["pairs"] - best["none"]
    found["instruction"] = more / (found["pairs"]["instructions"] - found["none"]["instructions"])
    found["layer"] = more / layers / microbatches
    return found


if __name__ == "__main__":
    main()
