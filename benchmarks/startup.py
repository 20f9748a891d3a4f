"""What a start takes, a batch of another shape, and a second start: in seconds, and beside what torch.export takes.

    python benchmarks/startup.py [--layers 12] [--rounds 3]

Each is a median over rounds, whose captures on disk are in a folder of their own: CPU time, which other programs on the
machine hardly change, and time of the clock.  "A start" is all that ``Compiled`` does for one rank: capture, trial,
sharding, units and program.  With masks it makes a second program, for batches without padding.  A model decides "by
values" where its forward has a branch by values of the batch; another way is a batch that takes the other branch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.capture.stored import SWITCH
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

Made = TypeVar("Made")


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


class ByValues(nn.Module):
    """A model that reads its batch in Python."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """Return the model's output, of tokens in reverse order where a target is ignored."""
        if (labels < 0).any():
            input_ids = input_ids.flip(1)
        return self.model(input_ids=input_ids, labels=labels)


def batch(length: int, *, mask: bool = False, ignored: int = 0) -> dict[str, Tensor]:
    """Return rows of a length, with a mask, and with ignored targets."""
    ids = torch.randint(0, 1000, (8, length))
    found = {"input_ids": ids, "labels": ids.clone()}
    found["labels"][0, :ignored] = -100
    return {**found, "attention_mask": torch.ones_like(ids)} if mask else found


def exported(layers: int, *, mask: bool = False, lengths: bool = False) -> None:
    """Run torch.export alone, with a symbolic batch dim, and with symbolic ``lengths``."""
    rows = torch.export.Dim("rows", min=1, max=1 << 30)
    fields = batch(64, mask=mask)
    shapes = ({name: {0: rows, **({1: torch.export.Dim.AUTO} if lengths else {})} for name in fields},)
    torch.export.export(WithLoss(model(layers)), (fields,), strict=False, dynamic_shapes=shapes)


def started(one: Compiled) -> Compiled:
    """Make the programs, too."""
    for masks in dict.fromkeys(((), one.masks)):
        one.programs(one.trace(masks, None), 1)
    return one


def round_of(layers: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of each, of the process and of the clock, measured once."""
    found: dict[str, tuple[float, float]] = {}

    def timed(name: str, run: Callable[[], Made]) -> Made:
        own, begin = time.process_time(), time.perf_counter()
        made = run()
        found[name] = time.process_time() - own, time.perf_counter() - begin
        return made

    with tempfile.TemporaryDirectory() as folder:
        os.environ[SWITCH] = folder
        first, masked, by_values = model(layers), model(layers), ByValues(model(layers))
        timed("torch.export", lambda: exported(layers))
        timed("torch.export, any length", lambda: exported(layers, lengths=True))
        timed("torch.export with a mask", lambda: exported(layers, mask=True))
        one = timed("a start", lambda: started(Compiled(first, Plan.of(), batch(64))))
        timed("a second shape", lambda: started(one.fitting(batch(48))))
        timed("a third shape", lambda: started(one.fitting(batch(80))))
        timed("a second start", lambda: started(Compiled(model(layers), Plan.of(), batch(64))))
        timed("a start with a mask", lambda: started(Compiled(masked, Plan.of(), batch(64, mask=True))))
        one = timed("a start by values", lambda: started(Compiled(by_values, Plan.of(), batch(64))))
        timed("another way", lambda: started(one.deciding(batch(64, ignored=3), {})))
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
    print(f"{given.layers} layers, medians of {given.rounds} rounds: CPU time, and of the clock")
    medians = {name: [statistics.median(one[name][at] for one in rounds) for at in (0, 1)] for name in rounds[0]}
    for name, found in medians.items():
        export = medians["torch.export"]
        print(f"{name:25}" + "".join(f" {a:6.2f} s {a / b:5.2f} x " for a, b in zip(found, export, strict=True)))


if __name__ == "__main__":
    main()
