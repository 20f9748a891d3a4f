"""What a start of real models takes, a batch of another shape, and a second start, beside what torch.export takes.

    python benchmarks/startup.py [--layers 6] [--rounds 3] [--only NAME ...] [--clock]

Each is a median over rounds, in multiples of the torch.export of the same model with its loss and an open number of
rows; of the second shape also in multiples of an export with open lengths, as a shape that nobody has named needs one.
It is CPU time, which other programs on the machine hardly change, or with ``--clock`` time of the clock.  Captures on
disk are in a folder of the round's own.  "A start" is all that ``Compiled`` does for one rank: capture, trial,
sharding, units and program.  With a mask it makes a second program, for batches without padding.  A model decides "by
values" where its forward has a branch by values of the batch; another way is a batch that takes the other branch.  One
"with a part" is captured around a branch by values that follow from parameters.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from shardwise.capture.stored import SWITCH
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

Made = TypeVar("Made")

ROWS, WORDS = 8, 1000
LENGTHS = 64, 48, 80  # of the first shape, the second and the third
COLUMNS = ("start", "second shape", "(of an open export)", "third shape", "second start", "another way")


class WithLoss(nn.Module):
    """What torch.export gets: the model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, fields: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return self.model(**fields).loss


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


class AroundPart(nn.Module):
    """A model with a branch, behind its last layer, by values that follow from parameters."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        if hidden.mean() > 1:
            hidden = -hidden
        logits = self.model.lm_head(hidden)
        return self.model.loss_function(logits, labels, WORDS)  # type: ignore[no-any-return]


@dataclass
class Measured:
    """A model to measure: its class, its options for a number of layers, batches of a length, and what is around it."""

    kind: str
    config: Callable[[int], dict[str, Any]]
    batch: Callable[[int], dict[str, Tensor]]
    around: type[nn.Module] | None = None

    def exported(self, layers: int) -> nn.Module:
        """Return a model that torch.export takes, with a tenth of the width of a real one, which changes nothing."""
        kind = getattr(transformers, self.kind)
        return kind(kind.config_class(**self.config(layers), use_cache=False))  # type: ignore[no-any-return]

    def made(self, layers: int) -> nn.Module:
        """Return a model that is measured."""
        model = self.exported(layers)
        return model if self.around is None else self.around(model)


def tokens(length: int) -> dict[str, Tensor]:
    """Return rows of tokens, each of which is a target."""
    ids = torch.randint(0, WORDS, (ROWS, length))
    return {"input_ids": ids, "labels": ids.clone()}


def masked(length: int) -> dict[str, Tensor]:
    """Return rows of tokens with a mask."""
    return {**tokens(length), "attention_mask": torch.ones(ROWS, length, dtype=torch.int64)}


def images(length: int) -> dict[str, Tensor]:
    """Return images of twice the length on each side."""
    return {"pixel_values": torch.rand(ROWS, 3, 2 * length, 2 * length), "labels": torch.randint(0, 2, (ROWS,))}


def decoder(layers: int) -> dict[str, Any]:
    """Return the options that most models share."""
    sizes = {"vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 688}
    return {**sizes, "num_hidden_layers": layers, "num_attention_heads": 8}


def encoder_decoder(layers: int) -> dict[str, Any]:
    """Return the options of T5."""
    sizes = {"vocab_size": WORDS, "d_model": 256, "d_kv": 32, "d_ff": 688}
    return {**sizes, "num_layers": layers, "decoder_start_token_id": 0}


MODELS = {
    "Llama": Measured("LlamaForCausalLM", decoder, tokens),
    "Llama with a mask": Measured("LlamaForCausalLM", decoder, masked),
    "Llama by values": Measured("LlamaForCausalLM", decoder, tokens, ByValues),
    "Llama with a part": Measured("LlamaForCausalLM", decoder, tokens, AroundPart),
    "BERT": Measured("BertForMaskedLM", decoder, tokens),
    "GPT-2": Measured(
        "GPT2LMHeadModel", lambda n: {"vocab_size": WORDS, "n_embd": 256, "n_layer": n, "n_head": 8}, tokens
    ),
    "T5": Measured("T5ForConditionalGeneration", encoder_decoder, tokens),
    "Mixtral": Measured("MixtralForCausalLM", lambda n: {**decoder(n), "num_local_experts": 4}, tokens),
    "Mamba": Measured(
        "MambaForCausalLM", lambda n: {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": n}, tokens
    ),
    "ResNet-50": Measured("ResNetForImageClassification", lambda _: {"hidden_sizes": [32, 64, 128, 256]}, images),
}


def exported(one: nn.Module, fields: Mapping[str, Tensor], *, lengths: bool = False) -> None:
    """Run torch.export alone, with a symbolic batch dim, and with symbolic ``lengths``."""
    rows = torch.export.Dim("rows", min=1, max=1 << 30)
    dims = {n: range(2 if n == "pixel_values" else 1, v.dim() if lengths else 0) for n, v in fields.items()}
    shapes = {name: {0: rows} | dict.fromkeys(each, torch.export.Dim.AUTO) for name, each in dims.items()}
    torch.export.export(WithLoss(one), (dict(fields),), strict=False, dynamic_shapes=(shapes,))


def started(one: Compiled) -> Compiled:
    """Make the programs, too."""
    for masks in dict.fromkeys(((), one.masks)):
        one.programs(one.trace(masks, None), 1)
    return one


def round_of(one: Measured, layers: int, clock: bool = False) -> dict[str, float]:
    """Return the seconds of each, measured once."""
    found: dict[str, float] = {}
    now = time.perf_counter if clock else time.process_time

    def timed(name: str, run: Callable[[], Made]) -> Made:
        gc.collect()
        begin = now()
        made = run()
        found[name] = now() - begin
        return made

    first, *others = map(one.batch, LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SWITCH] = folder
        timed("export", lambda: exported(one.exported(layers), first))
        timed("open export", lambda: exported(one.exported(layers), first, lengths=True))
        made = timed("start", lambda: started(Compiled(one.made(layers), Plan.of(), first)))
        for name, batch in zip(("second shape", "third shape"), others, strict=True):
            timed(name, lambda batch=batch: started(made.fitting(batch)))
        timed("second start", lambda: started(Compiled(one.made(layers), Plan.of(), first)))
        if one.around is ByValues:
            other = {**first, "labels": first["labels"].masked_fill(first["labels"] < WORDS // 10, -100)}
            timed("another way", lambda: started(made.deciding(other, {})))
    return found


def row(name: str, rounds: list[dict[str, float]]) -> None:
    """Print a line of the table."""
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    shown = {key: f"{medians[key] / medians['export']:.2f} x" for key in COLUMNS if key in medians}
    shown["(of an open export)"] = f"{medians['second shape'] / medians['open export']:.2f} x"
    exports = f"{medians['export']:6.2f} s {medians['open export']:6.2f} s"
    print(f"{name:18} {exports}", *(f"{shown.get(key, ''):>{max(len(key), 7)}}" for key in COLUMNS), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clock", action="store_true", help="time of the clock in place of CPU time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{given.layers} layers, medians of {given.rounds} rounds, {'clock' if given.clock else 'CPU'} time")
    print(f"{'':18} {'export':>8} {'open':>8}", *(f"{key:>7}" for key in COLUMNS))
    for name in given.only:
        round_of(MODELS[name], 1)  # imports
        row(name, [round_of(MODELS[name], given.layers, given.clock) for _ in range(given.rounds)])


if __name__ == "__main__":
    main()
