"""What forward draws from the generators of Python and numpy is the same on one device and under every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captures import apart
from shardwise import distribute
from shardwise.capture import stored
from shardwise.capture.coins import Drawing
from shardwise.capture.host_draws import seeded
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

WIDTH = 8


def spans(shape: tuple[int, int], lengths: Tensor) -> numpy.ndarray:
    """Return a mask with a span in each row, within the row's length, which starts by chance, as in SpecAugment."""
    mask = numpy.zeros(shape, dtype=bool)
    extra = int(numpy.random.rand(1).item() < 0.5)
    for row, length in zip(mask, lengths.tolist(), strict=True):
        start = numpy.random.randint(0, max(length - 1, 1))
        row[start : start + 2 + extra] = True
    return mask


class Speech(nn.Module):
    """It hides spans of its input behind a vector that learns."""

    def __init__(self, also: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head, self.hidden, self.also = nn.Linear(WIDTH, 3), nn.Parameter(torch.rand(WIDTH)), also

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.first(x).tanh(), 0.1, self.training)
        h = self.masked(h, mask)
        for layer in self.layers:
            h = h + layer(h).tanh()
        if self.also and self.training:
            scale = torch.tensor([random.uniform(0.5, 2) for _ in range(len(x))], dtype=h.dtype)
            h = h * scale[:, None, None]
        return F.cross_entropy(self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)), y)

    def masked(self, h: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = h.shape
        if self.training:
            chosen = spans((rows, length), mask.sum(1))
            chosen = torch.tensor(chosen, device=h.device, dtype=torch.bool)
            h = torch.where(chosen[..., None], self.hidden, h)
        return h


def batch(seed: int, rows: int = 7, length: int = 6) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows, 1), generator=own)
    return {
        "x": torch.randn(rows, length, 4, generator=own), "mask": (torch.arange(length) < lengths).long(),
        "y": torch.randint(0, 3, (rows,), generator=own),
    }  # fmt: skip


PLANS: Mapping[str, Callable[[], Plan]] = {
    "one device": Plan.of,
    "dp and microbatches": lambda: data_parallel(Plan.of(microbatches=2), 2),
    "zero3": lambda: data_parallel(Plan.of(), 3, zero=3),
    "tp": lambda: tensor_parallel(Plan.of(), 2),
    "tp, dp and microbatches": lambda: tensor_parallel(data_parallel(Plan.of(microbatches=3), 2), 2),
    "pp": lambda: pipeline(Plan.of(microbatches=2), 2, "1f1b"),
}


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_what_one_device_draws(plan: str, also: bool) -> None:
    torch.manual_seed(0)
    before = random.getstate(), str(numpy.random.get_state())
    report = verify(Speech(also), [batch(0), batch(1), batch(2, rows=5)], PLANS[plan]())
    assert report.passed, report
    assert (random.getstate(), str(numpy.random.get_state())) == before


@pytest.mark.slow
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "one device"])
def test_speech_models_hide_spans(plan: str) -> None:
    """LayerDrop reads a number of torch's, and the loss numbers of labels."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=30, mask_time_prob=0.3, mask_time_length=2, mask_feature_prob=0.3,
        mask_feature_length=2,
    )  # fmt: skip

    def sounds(seed: int) -> dict[str, Tensor]:
        own = torch.Generator().manual_seed(seed)
        lengths = torch.randint(300, 600, (7, 1), generator=own)
        return {
            "input_values": torch.randn(7, 600, generator=own, dtype=torch.float64),
            "attention_mask": (torch.arange(600) < lengths).long(),
            "labels": torch.randint(4, 20, (7, 3), generator=own),
        }

    report = verify(Wav2Vec2ForCTC(config).train(), [sounds(0), sounds(1)], PLANS[plan]())
    assert report.passed, report
    assert any("draws random numbers of Python or numpy" in one for one in report.notes)


def test_steps_of_a_loop_draw_by_the_seed_and_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", lambda h, *_: h)  # torch's own generator draws others

    def losses(distributed: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = Speech().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if distributed:
            model, optimizer = distribute(model, optimizer)
        found = []
        for number in range(3):
            fields = batch(number)
            optimizer.zero_grad()
            with nullcontext() if distributed else seeded(0, number):
                loss = model(**{**fields, "x": fields["x"].double()})
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-12)
    assert losses(True) == losses(True)


def test_an_evaluation_draws_nothing() -> None:
    made = Compiled(Speech(), Plan.of(precision="fp64"), batch(0))
    assert made.general.draws is not None
    assert made.evaluation().general.draws is None


class Meeting(Speech):
    """Rows meet in it."""

    def masked(self, h: Tensor, mask: Tensor) -> Tensor:
        h = super().masked(h, mask)
        return h - h.mean(0, keepdim=True).relu()


class ByParameters(Speech):
    """What it draws depends on values that follow from parameters."""

    def masked(self, h: Tensor, mask: Tensor) -> Tensor:
        return super().masked(h, (h.sum(-1) > 0) & (mask > 0))


@pytest.mark.parametrize(("kind", "plan", "what"), [
    (ByParameters, "zero3", "what forward computes depends on the generator of numpy.random"),
])  # fmt: skip
def test_draws_that_are_not_of_the_batch_alone_are_refused(kind: type[Speech], plan: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        verify(kind(), [batch(0)], PLANS[plan]())


@pytest.mark.parametrize("plan", ["zero3", "dp and microbatches", "pp"])
def test_microbatches_that_are_batches_of_their_own_draw_for_themselves(plan: str) -> None:
    report = verify(Meeting(), [batch(0), batch(1)], PLANS[plan]())
    assert report.passed, report


def test_a_second_start_draws_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stored.SWITCH, str(tmp_path))
    exports = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: exports.append(type(a[0]).__name__) or export(*a, **k))
    with apart():
        first = Compiled(Speech(), Plan.of(precision="fp64"), batch(0))
        number = exports.count("Watched")
        second = Compiled(Speech(), Plan.of(precision="fp64"), batch(0))
    assert exports.count("Watched") == number > 0
    found = [one.drawn(batch(1), {}, Drawing(0, 5)) for one in (first, second)]
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
