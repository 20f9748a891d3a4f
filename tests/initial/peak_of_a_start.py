"""How much memory a rank takes to start: ``python peak_of_a_start.py lazy|whole`` prints it as JSON (Linux).

``whole`` is the control: the same engine, made from a whole module.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.initial.initial import record
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks


class Tower(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def resident(key: str) -> int:
    """``VmRSS``, or ``VmHWM``, its maximum since :func:`forget`: the figure of this process alone, unlike
    ``ru_maxrss``.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def forget() -> None:
    """Begin a new maximum."""
    Path("/proc/self/clear_refs").write_text("5")


def start(how: str, width: int, layers: int) -> Engine:
    recorded = record(lambda: Tower(width, layers))
    batch = {"x": torch.zeros(4, width)}
    if how == "whole":
        compiled = Compiled(recorded.materialise_all(1, "cpu"), Plan.of(Mesh.of(dp=1)), batch)
    else:
        compiled = Compiled(recorded.module, Plan.of(Mesh.of(dp=1)), batch, initial=Values.of_recorded(recorded, 1))
    return run_ranks(Mesh.of(dp=1), lambda comm: Engine(compiled, comm, OptimizerChoice("sgd", lr=0.1)))[0]


def main() -> None:
    start(sys.argv[1], 8, 12)  # imports, caches
    width, layers = 3000, 11
    before = resident("VmRSS")
    forget()
    engine = start(sys.argv[1], width, layers)
    peak = resident("VmHWM") - before
    held = {
        t.untyped_storage().data_ptr(): t.nbytes for b in engine.memory.buckets.values() for t in (b.param, b.master)
    }
    largest = max(leaf.nbytes for leaf in engine.memory.leaves.values())
    print(json.dumps({"peak": peak, "engine": sum(held.values()), "largest": largest}))


if __name__ == "__main__":
    main()
