"""Models whose statements read values in ways that a part could get wrong: they compute what one device does, or an
error says so."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_reads_in_line import WIDTH, Model, batches
from torch import Tensor, nn

from shardwise.capture.parts import parts
from shardwise.core.errors import ShardwiseError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

PLANS = {"dp": data_parallel(Plan.of(), 3), "tp": tensor_parallel(Plan.of(), 2, "1d")}
Body = Callable[["Hard", Tensor, Tensor, Tensor], Tensor]


class Hard(Model):
    """A model with a ``body`` in place of what is between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Any = None
        self.side = nn.Linear(WIDTH, WIDTH)
        self.config = {"n": 1.0}

    def end(self, h: Tensor) -> Tensor:
        return self.head(self.blocks[1](h)).square().mean()


# ---- rows that are not independent, though random numbers do not show it -------------------------------------------


class PadMean(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            marked = ids == 2
            h = h - h[marked.any(1)].mean(0)
        return self.end(h)


class AnyNumber(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = h + 1.0 * (ids == 9).any()
        return self.end(h)


class AnyTarget(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = h + 1.0 * torch.eq(y, 0.5).any()
        return self.end(h)


class Sized(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = h * 2 if len(h) > 4 else h
        return self.end(h)


class Called(Hard):
    """What it calls picks rows."""

    def picked(self, h: Tensor) -> Tensor:
        return torch.tanh(h) * (2.0 if torch.masked_select(h, torch.gt(h, 3.5)).numel() else 1.0)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            h = self.picked(h)
        return self.end(h)


# ---- objects and memory that a later step changes --------------------------------------------------------------------


class LocalDict(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h, state = self.blocks[0](x), {"n": 1.0}
        if h.mean().item() < 0:
            state["n"] = 5.0
            h = h * 2
        return self.end(h) * state["n"]


class Appended(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        kept = [h * 1]
        if h.mean().item() < 0:
            h = h * 2
            kept.append(h)
        return self.end(h) + sum(one.mean() for one in kept)


class Renewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 1

    def forward(self, h: Tensor) -> Tensor:
        if h.mean().item() < 0:
            self.n += 1
            h = h * self.n
        return h


class Counts(Hard):
    def __init__(self) -> None:
        super().__init__()
        self.renewed = Renewed()

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        return self.end(self.renewed(self.blocks[0](x)))


class Alias(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        y = h
        if h.sum() > 0:
            y = h * 2
        y += 1
        return self.end(h + y)


class Twice(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        s = float(h.abs().max())
        a = b = h / s
        a += 1
        return self.end(a * b)


class ItemAlias(Hard):
    """The other answer cannot be tried."""

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        top = h * 1.0 if h.mean().item() > 0 else h
        top *= 3
        return self.end(top) + h.mean()


# ---- lines, errors, ends -------------------------------------------------------------------------------------------


class OneLine(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        a = h
        a, b = (h * 2, h + 1) if h.sum() > 0 else (h * 3, h); c = a.mean()  # noqa: E702  # fmt: skip
        return self.end(b) + c


class Tries(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            if h.sum() > 0:
                h = h * 2
        except Exception:
            h = h * 3
        return self.end(h)


class TriesNumber(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            n = h.sum().item()
            h = h * (2 if n > 0 else 1)
        except Exception:
            h = h * 3
        return self.end(h)


class TriesLength(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            n = int(h.square().sum().clamp(1, 3).item())
            parts = [h * (i + 1) for i in range(n)]
            h = torch.stack(parts).mean(0)
        except Exception:
            h = h * 3
        return self.end(h)


class TriesDraw(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            if h.abs().sum() > 0:
                h = torch.dropout(h, 0.5, True)
        except Exception:
            h = h * 3
        return self.end(h)


class TriesGenerator(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            noise = torch.rand(h.shape[1:], generator=torch.Generator().manual_seed(1), dtype=h.dtype)
            h = h + noise if float(h.detach().abs().sum()) > 0 and locals() else h
        except Exception:
            h = h * 3
        return self.end(h)


class TriesBatch(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        try:
            h = h * (2 if ids.max().item() > 3 else 1)
        except Exception:
            h = h * 3
        return self.end(h)


class Ends(Hard):
    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > 0:
            if h.abs().max() > 1e6:
                sys.exit("diverged")
            h = h * 2
        return self.end(h)


class Shrinks(Hard):
    """With other parameters its loop does not end."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.side.weight).data.mul_(0.5)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        while h.norm() > 1e-3:
            h = self.side(h)
        return self.end(h * 1e3)


class Gated(Hard):
    """A class of blocks of which some have a gate: its attribute is looked at in one branch alone."""

    class Own(nn.Module):
        def __init__(self, gate: bool) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 1) if gate else None

        def forward(self, h: Tensor) -> Tensor:
            if h.sum() > 0:
                h = h * self.gate.weight.mean() if self.gate is not None else h * 2
            return h

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([Gated.Own(True), Gated.Own(False)])

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        for one in self.own:
            h = one(h)
        return self.end(h)


ROWS = (PadMean, AnyNumber, AnyTarget, Sized, Called)
EVERY: list[type[Hard]] = [
    *ROWS, LocalDict, Appended, Counts, Alias, Twice, ItemAlias, OneLine, Tries, TriesNumber, TriesLength, TriesBatch,
    TriesDraw, TriesGenerator, Ends, Shrinks, Gated,
]  # fmt: skip


TRAINS = (*ROWS, OneLine, Tries, TriesNumber, TriesBatch, Ends)


def given() -> list[dict[str, Tensor]]:
    ids = torch.tensor([[0, 1, 1]] * 3 + [[2, 3, 4]] * 2 + [[9, 5, 6]] * 2)
    y = torch.tensor([0.5, 1, 2, 3, 4, 5, 6], dtype=torch.float64)
    return [{**one, "ids": ids, "y": y} for one in batches()]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [
    pytest.param(one, marks=[pytest.mark.slow] if one is Shrinks else [], id=one.__name__) for one in EVERY
])  # fmt: skip
def test_the_numbers_are_those_of_one_device_or_an_error_says_so(model: type[Hard], plan: str) -> None:
    torch.manual_seed(0)
    try:
        report = verify(model().double(), given(), PLANS[plan])
    except ShardwiseError:
        if model in TRAINS and plan == "dp":
            raise
        return
    assert report.passed, (report.worst[:3], report.notes)


def test_code_is_as_it_was_afterwards() -> None:
    before = Gated.Own.forward.__code__, PadMean.forward.__code__
    torch.manual_seed(0)
    for one in (Gated, PadMean, Gated):
        example = {name: value.float() if value.is_floating_point() else value for name, value in given()[0].items()}
        Compiled(one(), PLANS["dp"], example)
    assert (Gated.Own.forward.__code__, PadMean.forward.__code__) == before
    assert Gated.Own.forward.__code__ is before[0]


def test_parameters_that_a_method_uses_in_a_later_step_are_named() -> None:
    class Sub(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> Tensor:
            return self.layer(h) if h.mean().item() < 0 else h

    class Later(Hard):
        def __init__(self) -> None:
            super().__init__()
            self.sub = Sub()

        def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
            return self.end(self.sub(self.blocks[0](x)))

    torch.manual_seed(0)
    with pytest.raises(ShardwiseError, match="Sub.forward reads values, and for this batch computes with parameters"):
        verify(Later().double(), given(), PLANS["tp"])


def test_code_of_which_the_file_has_changed_has_no_parts(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    text = "def made(a):\n    b = a + 1\n    return b\n"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("edited", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    frame: Any = SimpleNamespace(f_locals={"a": 1})
    assert [*parts(module.made, frame, 2)]
    file.write_text(text.replace("+ 1", "+ 7"))
    assert not [*parts(module.made, frame, 2)]


class Classes(Model):
    """Its loss looks up classes, of which there are as many as a microbatch has rows; it is captured for its rows."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.blocks[0](x)[:, :4]
        loss = sum(one.square().sum() for one in h.unbind())
        return loss + h[torch.arange(len(ids)), ids].sum()


def test_a_size_that_is_that_of_the_rows_by_chance_is_no_number_of_rows() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 1, 3, 2, 3, 0, 1, 2])
    batch = [{"x": torch.randn(8, WIDTH, dtype=torch.float64), "ids": ids} for _ in range(2)]
    report = verify(Classes().double(), batch, Plan.of(microbatches=2))
    assert report.passed and report.largest < 1e-12, report.worst[:3]


class Draws(Hard):
    """It draws from Python's generator where no trial goes: two branches inside each other have to be taken."""

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.abs().sum() > 1e3 and h.abs().max() > 1e2:
            h = h * random.random()
        return self.end(h)


def test_a_draw_of_pythons_that_no_trial_has_seen_stops_the_step() -> None:
    torch.manual_seed(0)
    first, second = given()[:2]
    with pytest.raises(ShardwiseError, match="for this batch draws from a generator of Python or numpy"):
        verify(Draws().double(), [first, {**second, "x": 1e6 * second["x"]}], PLANS["dp"])


class Lengths(Hard):
    """It decides by the batch, and in long rows by parameters too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if x.sum() > 0:
            h = h * 2
        if x.shape[1] > 5 and (h[:, 0] > 0.5).any():
            h = h / 2
        return self.end(h)


class Few(Hard):
    """It decides by the batch, and in one of few rows by parameters too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if x.sum() > 0:
            h = h * 2
        if len(x) < 5 and (h > 0).any():
            h = h / 2
        return self.end(h)


LATER = {**PLANS, "microbatches": Plan.of(microbatches=2)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", LATER)
def test_a_later_shape_may_need_parts_where_the_first_did_not(plan: str) -> None:
    torch.manual_seed(0)
    every = [{"x": torch.randn(6, n, WIDTH, dtype=torch.float64)} for n in (5, 6, 6)]
    report = verify(Lengths().double(), every, LATER[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]


@pytest.mark.parametrize("plan", LATER)
def test_a_later_number_of_rows_may_need_parts_where_the_first_did_not(plan: str) -> None:
    torch.manual_seed(0)
    every = [{"x": torch.randn(n, WIDTH, dtype=torch.float64)} for n in (6, 6, 4, 4)]
    if plan == "microbatches":  # each would decide for its own rows
        with pytest.raises(ShardwiseError, match=r"rows meet .* \(Few.forward \(lines .* which runs as written"):
            verify(Few().double(), every, LATER[plan])
        return
    report = verify(Few().double(), every, LATER[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]


@pytest.mark.parametrize("model", [LocalDict, Appended])
def test_statements_that_may_change_objects_are_no_part(model: type[Hard]) -> None:
    """So the model is one unit, which one rank can train."""
    torch.manual_seed(0)
    report = verify(model().double(), given(), Plan.of())
    assert report.passed and any("not captured" in note for note in report.notes), report.notes
