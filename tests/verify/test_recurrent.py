"""Recurrent networks that drop elements between their layers: what is dropped is keyed by sample, as of any dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

LENGTH, WORDS, WIDTH = 5, 11, 6
ONE = Plan.of(Mesh(()))
PLANS = {
    "one device": ONE,
    "dp and microbatches": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(ONE, 3, zero=3),
    "tp": tensor_parallel(data_parallel(Plan.of(microbatches=2), 2), 2),
    "pp": pipeline(Plan.of(microbatches=2), 2),
}
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "lstm, time first": (nn.LSTM, {}),
    "lstm of three layers, both directions, projected": (
        nn.LSTM, {"batch_first": True, "num_layers": 3, "bidirectional": True, "proj_size": 4}
    ),
    "gru": (nn.GRU, {"batch_first": True}),
    "gru, both directions, time first": (nn.GRU, {"bidirectional": True}),
    "rnn_tanh": (nn.RNN, {"batch_first": True, "bias": False}),
    "rnn_relu, time first": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip


class Tagger(nn.Module):
    """Two recurrent networks one after the other, whose last states count in the loss, too; ``unseen`` says that a
    hook on a tensor keeps it from being captured."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any], unseen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"num_layers": 2, "dropout": 0.3, **options}
        self.first, self.unseen = bool(options.get("batch_first")), unseen
        self.words = nn.Embedding(WORDS, WIDTH)
        width = (options.get("proj_size") or WIDTH) * (2 if options.get("bidirectional") else 1)
        self.cells = nn.ModuleList([kind(WIDTH, WIDTH, **options), kind(width, WIDTH, **options)])
        self.out = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        x = self.words(words)
        if self.unseen:
            x.register_hook(lambda gradient: gradient)
        last = x.new_zeros(())
        for cell in self.cells:
            x, states = cell(x if self.first else x.transpose(0, 1))
            x = x if self.first else x.transpose(0, 1)
            for one in states if isinstance(states, tuple) else (states,):
                last = last + one.square().mean()
        return F.cross_entropy(self.out(x).flatten(0, 1), tags.flatten(), reduction="none").mean() + last


def _batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{name: torch.randint(WORDS, (rows, LENGTH)) for name in ("words", "tags")} for rows in (6, 5)]


@pytest.mark.quick(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_drops_what_one_device_drops(kind: str, plan: str) -> None:
    report = verify(Tagger(*KINDS[kind]), _batches(), PLANS[plan])
    assert report.passed, report.worst
    assert not any("not captured" in one for one in report.notes)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["lstm", "gru, both directions, time first"])
def test_a_model_that_is_one_unit_drops_the_same(kind: str) -> None:
    report = verify(Tagger(*KINDS[kind], unseen=True), _batches(), PLANS["dp and microbatches"])
    assert report.passed, report.worst
    assert any("trains as one unit" in one for one in report.notes)


class Packed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.cell = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=dropout)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        some = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.cell(some)
        return last[-1].square().mean()


def test_packed_sequences_are_refused_where_elements_are_dropped() -> None:
    batches = [{"words": one["words"], "lengths": torch.tensor([2, 5, 1, 4, 3, 3][: len(one["words"])])}
               for one in _batches()]  # fmt: skip
    assert verify(Packed(0.0), batches, PLANS["dp and microbatches"]).passed
    sizes = r"reads values of tensors as sizes, as a recurrent network does of a packed sequence in cell, a LSTM \("
    with pytest.raises(ConfigError, match=f"^tp: the model could not be captured, .*{sizes}{__file__}:"):
        verify(Packed(0.0), batches, PLANS["tp"])
    with pytest.raises(ConfigError, match=r"torch\.lstm in cell .*packed sequence .*dropout=0\.3.*; legal: a padded"):
        verify(Packed(0.3), batches, PLANS["dp and microbatches"])
