"""What a start takes, a batch of another shape, and a second start: in seconds, and beside what torch.export takes.

    python benchmarks/startup.py [--layers 12] [--rounds 3]

Each is a median over rounds, whose captures on disk are in a folder of their own.  "A start" is all that
``Compiled`` does for one rank: capture, trial, sharding, units and program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.capture.stored import SWITCH
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled


class WithLoss(nn.Module):
    """What torch.export gets: the model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, fields: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return self.model(**fields).loss


def model(layers: int) -> nn.Module:
    """Return a model with a tenth of the width of a real one: its width changes nothing here."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=8
    )
    return LlamaForCausalLM(config)


def batch(length: int) -> dict[str, Tensor]:
    """Return rows of a length."""
    ids = torch.randint(0, 1000, (8, length))
    return {"input_ids": ids, "labels": ids.clone()}


def exported(layers: int) -> None:
    """Run torch.export alone, with a symbolic batch dim."""
    rows = torch.export.Dim("rows", min=1, max=1 << 30)
    fields = batch(64)
    shapes = ({name: {0: rows} for name in fields},)
    torch.export.export(WithLoss(model(layers)), (fields,), strict=False, dynamic_shapes=shapes)


def started(one: Compiled) -> Compiled:
    """Make the program, too."""
    one.programs(one.general, 1)
    return one


def round_of(layers: int) -> dict[str, float]:
    """Return the seconds of each, measured once."""
    found: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        begin = time.perf_counter()
        run()
        found[name] = time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as folder:
        os.environ[SWITCH] = folder
        first = model(layers)
        timed("torch.export", lambda: exported(layers))
        kept: list[Compiled] = []
        timed("a start", lambda: kept.append(started(Compiled(first, Plan.of(), batch(64)))))
        timed("a second shape", lambda: started(kept[0].fitting(batch(48))))
        timed("a third shape", lambda: started(kept[0].fitting(batch(80))))
        timed("a second start", lambda: started(Compiled(model(layers), Plan.of(), batch(64))))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    round_of(1)  # imports
    rounds = [round_of(given.layers) for _ in range(given.rounds)]
    export = statistics.median(one["torch.export"] for one in rounds)
    print(f"{given.layers} layers, medians of {given.rounds} rounds")
    for name in rounds[0]:
        seconds = statistics.median(one[name] for one in rounds)
        print(f"{name:16} {seconds:6.2f} s  {seconds / export:5.2f} x")


if __name__ == "__main__":
    main()
