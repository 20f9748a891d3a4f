"""Parts that run as written in batches whose shapes vary: one capture serves all sizes where that can be."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captures import apart
from shardwise.capture.eager_calls import EagerCall
from shardwise.capture.forms import Form, form_of, other_forms
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

VOCAB, WIDTH = 11, 8


def weights(scores: Tensor) -> Tensor:
    """Return a weight for each place of each row."""
    return torch.tensor([[1.5 if one == max(row) else 1.0 for one in row] for row in scores.tolist()]).to(scores)


def flat(scores: Tensor, mask: Tensor) -> Tensor:
    """Return a weight for each place, of all rows in one dim."""
    return weights(scores).flatten() * mask.flatten()


def highest(scores: Tensor) -> Tensor:
    """Return a weight for each place of all rows, which are one dim, and of their number."""
    found = scores.tolist()
    return torch.tensor([0.5 + (one == max(found)) for one in found]).to(scores)


def halves(scores: Tensor) -> Tensor:
    """Return a weight for every second place."""
    return weights(scores)[:, ::2]


def paired(scores: Tensor) -> Tensor:
    """Return a weight for each pair of places: two lengths alone show no difference from a line."""
    found = weights(scores)
    return (found[:, :, None] * found[:, None]).flatten(1)


class Reading(nn.Module):
    """A net of tokens; ``by`` says what reads values in it."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.tokens, self.first, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.tokens(tokens)))
        scores = h.mean(-1).detach()
        if self.by == "a function":
            h = h * weights(scores)[..., None]
        elif self.by == "one of all rows":
            h = h * flat(scores, mask).view(*tokens.shape, 1)
        elif self.by == "one of rows in one dim":
            h = h * highest(scores.flatten()).view(*tokens.shape, 1)
        elif self.by == "one of halves":
            h = torch.cat([h[:, ::2] * halves(scores)[..., None], h[:, 1::2]], 1)
        elif self.by == "one of pairs":
            h = h * (1 + paired(scores).mean(1)[:, None, None])
        elif self.by == "one that takes a length":
            h = h * repeated(scores, tokens.shape[1])[..., None]
        else:
            h = self.turned(h) if self.by == "a statement" else h
        loss = F.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten(), reduction="none")
        return (loss * mask.flatten()).sum() / mask.sum()

    def turned(self, h: Tensor) -> Tensor:
        """Return it the other way round where its mean says so."""
        h = h + 1
        if h.mean() > 1:
            h = h.flip(1) * 2
        return h


def repeated(scores: Tensor, length: int) -> Tensor:
    """Return the largest weight of each row, for so many places."""
    return weights(scores).amax(1, keepdim=True).repeat(1, length)


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=own)
    return {"tokens": tokens, "mask": (torch.rand(rows, length, generator=own) > 0.3).double()}


SIZES = [(6, 7), (6, 10), (6, 5), (4, 8), (6, 7)]
OPEN = ["a function", "one of rows in one dim", "a statement"]
CLOSED = ["one of all rows", "one of halves", "one of pairs", "one that takes a length"]
PLANS: Mapping[str, Callable[[Plan], Plan]] = {
    "dp": lambda plan: data_parallel(plan, 2),
    "zero3": lambda plan: data_parallel(plan, 2, zero=3),
    "tp": lambda plan: tensor_parallel(plan, 2),
}


def called(made: Compiled) -> list[EagerCall]:
    """Return the calls that run as written."""
    nodes = [node for unit in made.general.units for node in unit.graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, EagerCall)]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules whose export ended."""
    found: list[str] = []
    export = torch.export.export

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = export(module, *args, **kwargs)
        found.append(type(module).__name__)
        return made

    monkeypatch.setattr(torch.export, "export", noted)
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("by", OPEN)
def test_two_captures_serve_all_lengths(by: str, exports: list[str]) -> None:
    with apart():
        made = Compiled(Reading(by), Plan.of(precision="fp64"), batch(*SIZES[0]))
        assert len(exports) == 1
        for one in SIZES[1:]:
            assert len(called(made.fitting(batch(*one)))) == 1
        assert len(exports) == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", CLOSED)
def test_a_part_that_takes_no_open_size_has_a_capture_for_each(by: str, exports: list[str]) -> None:
    with apart():
        made = Compiled(Reading(by), Plan.of(precision="fp64"), batch(*SIZES[0]))
        for one in SIZES[1:]:
            assert len(called(made.fitting(batch(*one)))) == 1
        assert len(exports) <= 5


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by", [*OPEN, *CLOSED])
def test_the_steps_of_one_device(by: str, plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Reading(by), [batch(*one, i) for i, one in enumerate(SIZES)], PLANS[plan](Plan.of()))
    assert report.passed, report


def test_lengths_that_are_named_need_no_second_capture(exports: list[str]) -> None:
    with apart():
        plan, varies = Plan.of(precision="fp64"), {"tokens.1": 14, "mask.1": 14}
        made = Compiled(Reading("a function"), plan, batch(*SIZES[0]), varies=varies)
        for one in SIZES[1:]:
            assert len(called(made.fitting(batch(*one)))) == 1
        assert len(exports) == 1


class Patches(nn.Module):
    """A net of rows of patches of four numbers; a function of it reads a value of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        if x.shape[1] % 4:
            raise ValueError("no whole patches")
        h = self.first(x.view(x.shape[0], -1, 4)).mean(1)
        return F.cross_entropy(self.head(h * weights(h.detach())), label)


@pytest.mark.slow
def test_a_size_that_forward_does_not_take_shows_nothing(exports: list[str]) -> None:
    """In place of 12 numbers 10 are tried; the function is given no size that follows from it."""

    def rows(length: int) -> dict[str, Tensor]:
        return {"x": torch.rand(6, length), "label": torch.arange(6) % 3}

    with apart():
        made = Compiled(Patches(), Plan.of(), rows(12), varies={"x.1": 16})
        assert [len(called(made.fitting(rows(length)))) for length in (8, 16)] == [1, 1]
        assert len(exports) == 1


def test_forms_that_show_what_varies() -> None:
    def form(*shapes: tuple[int, ...]) -> Form:
        return form_of({f"f{i}": torch.zeros(2, *shape) for i, shape in enumerate(shapes)})

    here, varies = form((5, 3), (5,), (4,)), {"f0": frozenset({1}), "f1": frozenset({1}), "f2": frozenset({1})}
    assert other_forms(here, {}, []) == []
    assert other_forms(here, varies, []) == [
        form((3, 3), (3,), (4,)), form((5, 3), (5,), (2,)), form((7, 3), (7,), (4,)), form((5, 3), (5,), (6,)),
    ]  # fmt: skip
    assert other_forms(form((3, 1)), {"f0": frozenset({1, 2})}, []) == [
        form((5, 1)), form((3, 3)), form((7, 1)), form((3, 5)),
    ]  # fmt: skip
    known = [here, form((9, 4), (9,), (4,)), form((9, 3), (9,), (4,)), form((8, 3), (8,), (4,))]
    assert other_forms(here, varies, known) == [
        known[2], form((5, 3), (5,), (2,)), form((13, 3), (13,), (4,)), form((5, 3), (5,), (6,)),
    ]  # fmt: skip
