"""What one capture has shown is not found again: for another shape, for masks of ones, for another way of forward.  And
where it does not hold there, it is found again: what depends on Python's state is refused wherever it first comes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captures import apart
from shardwise.capture import capture as capturing
from shardwise.capture import stored
from shardwise.capture.capture import capture
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.graph.captured import Captured
from shardwise.graph.functional import functionalise
from shardwise.graph.naming import module_path
from shardwise.graph.normalise import normalise
from shardwise.graph.ones import with_ones
from shardwise.lower.compiled import Compiled

FACTOR = 1.0
LONG = 6


class Run:
    """The exports and the trials that have run."""

    def __init__(self) -> None:
        self.exports, self.trials = 0, 0

    def since(self) -> tuple[int, int]:
        """Return how many exports and trials there were since the last call."""
        found = self.exports, self.trials
        self.exports = self.trials = 0
        return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    found = Run()
    export, runs = torch.export.export, capturing.runs

    def exported(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.exports += type(module).__name__ != "_First"  # with which a decoder makes symbols
        return export(module, *args, **kwargs)

    def tried(*args: Any) -> Any:
        found.trials += 1
        return runs(*args)

    monkeypatch.setattr(torch.export, "export", exported)
    monkeypatch.setattr(capturing, "runs", tried)
    with apart():
        yield found


class Net(nn.Module):
    """A body decides what it computes of words."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.body = body
        self.factor: Any = 1.0

    def forward(self, words: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.body is not None:
            h = self.body(self, self.words(words))
        else:
            h = self.words(words)
        if attention_mask is not None:
            h = h * attention_mask[..., None]
        return self.head(h).square().mean()


def batch(length: int, mask: bool = False) -> dict[str, Tensor]:
    found = {"words": torch.arange(4 * length).reshape(4, length) % 9}
    return {**found, "attention_mask": torch.ones(4, length, dtype=torch.long)} if mask else found


def compiled(module: nn.Module, fields: Mapping[str, Tensor]) -> Compiled:
    return Compiled(module, Plan.of(), fields)


# ---- another shape ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("released", [False, True])
def test_one_trial_serves_all_shapes(run: Run, released: bool) -> None:
    first = compiled(Net(), batch(5))
    assert run.since() == (1, 1)
    if released:
        first.release()
    first.fitting(batch(7))
    assert run.since() == (1, 0)
    first.fitting(batch(9))
    assert run.since() == (0, 0)


def of_length(net: Net, h: Tensor) -> Tensor:
    return h * next(net.factor) if h.shape[1] > LONG else h


def in_a_table(net: Net, h: Tensor) -> Tensor:
    return h * next(net.factor.get(h.shape[1], iter([1.0])))


def of_rows_and_length(net: Net, h: Tensor) -> Tensor:
    return h * next(net.factor) if h.shape[0] * h.shape[1] > 4 * LONG else h


def by_an_even_length(net: Net, h: Tensor) -> Tensor:
    return h if h.shape[1] % 2 else h * next(net.factor)


def numbers() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value += 0.5


HIDDEN: dict[str, tuple[Callable[[Net, Tensor], Tensor], Callable[[], Any]]] = {
    "a long batch": (of_length, numbers),
    "an even length": (by_an_even_length, numbers),
    "a length in a table": (in_a_table, lambda: {8: numbers()}),
    "rows and length": (of_rows_and_length, numbers),
}


class Kept:
    """It holds what cannot be copied, and copies are itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> "Kept":
        return self

    def __next__(self) -> Any:
        return next(self.value)

    def get(self, *args: Any) -> Any:
        return self.value.get(*args)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", HIDDEN)
def test_state_that_matters_for_another_shape_alone(run: Run, name: str) -> None:
    body, factor = HIDDEN[name]
    net = Net(body)
    net.factor = Kept(factor())
    first = compiled(net, batch(5))
    with pytest.raises(ConfigError, match=r"model: what forward computes depends on .*; legal: "):
        first.fitting(batch(8))
    assert run.trials == 2


def multiplied(net: Net, h: Tensor) -> Tensor:
    return h * (net.factor if isinstance(net.factor, float) else next(net.factor))


def by_a_global(net: Net, h: Tensor) -> Tensor:
    return h * FACTOR


@pytest.mark.slow
def test_state_that_comes_between_two_shapes(run: Run) -> None:
    """The first trial has not seen it."""
    net = Net(multiplied)
    first = compiled(net, batch(5))
    net.factor = Kept(numbers())
    with pytest.raises(ConfigError, match="depends on something that no look"):
        first.fitting(batch(8))


BETWEEN: dict[str, Callable[[Net, pytest.MonkeyPatch], object]] = {
    "an attribute": lambda net, patch: setattr(net, "factor", 2.0),
    "a global": lambda net, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "a mode": lambda net, patch: net.head.eval(),
    "a hook": lambda net, patch: net.head.register_forward_hook(lambda *_: None),
    "a frozen parameter": lambda net, patch: net.words.requires_grad_(False),
    "a function": lambda net, patch: setattr(net, "body", lambda net, h: h * FACTOR),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", BETWEEN)
def test_a_change_between_two_shapes_takes_another_trial(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:  # fmt: skip
    net = Net(by_a_global)
    first = compiled(net, batch(5))
    BETWEEN[name](net, monkeypatch)
    run.since()
    first.fitting(batch(8))
    assert run.since() == (1, 1)


def test_a_second_start_knows_a_capture_that_was_tried_for_another_shape(
    run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stored.SWITCH, str(tmp_path))
    for _ in range(2):
        compiled(Net(by_a_global), batch(5)).fitting(batch(7))
    assert run.since() == (2, 1)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    compiled(Net(by_a_global), batch(5)).fitting(batch(7))
    assert run.since() == (2, 1)


def row_by_row(net: Net, h: Tensor) -> Tensor:
    return torch.stack([row.cumsum(0) for row in h])


def test_fixed_rows_are_not_tried_as_any_number_again(run: Run) -> None:
    first = compiled(Net(row_by_row), batch(5))
    assert first.general.rows == 4
    assert run.since() == (2, 1)
    assert first.fitting(batch(7)).general.rows == 4
    assert run.since() == (1, 0)
    first.fitting(batch(9))
    assert run.since() == (0, 0)
    assert first.trace((), 3).rows == 3
    assert run.since() == (1, 1)  # forward may do something else for fewer rows


# ---- masks of ones ---------------------------------------------------------------------------------------------------


def test_masks_of_ones_take_no_capture_of_their_own(run: Run) -> None:
    first = compiled(Net(), batch(5, mask=True))
    assert first.masks
    assert run.since() == (1, 1)
    first.fitting(batch(7, mask=True))
    assert run.since() == (1, 0)


class Masked(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor], ones: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.ones = nn.Embedding(9, 4), body, ones

    def forward(self, words: Tensor, attention_mask: Tensor) -> Tensor:
        if self.ones:
            attention_mask = torch.ones_like(attention_mask)
        return self.body(self.words(words), attention_mask).square().mean()


def without_gradients(h: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        share = mask.float().mean(1, keepdim=True)
    return h * share[..., None]


def written(h: Tensor, mask: Tensor) -> Tensor:
    mask[:, 0] = 0
    return h * mask[..., None] + mask.sum()


def in_attention(h: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, mask[:, None].bool())


def by_sizes(h: Tensor, mask: Tensor) -> Tensor:
    return h + torch.arange(mask.shape[1])[:, None] * mask.shape[0]


def nowhere(h: Tensor, mask: Tensor) -> Tensor:
    return h


def lines(captured: Captured) -> list[tuple[Any, ...]]:
    normal = functionalise(captured)
    normalise(normal)
    return [
        (n.op, str(n.target), str(n.args), str(n.kwargs), module_path(n)) for n in normal.graph.nodes
    ]  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("body", [in_attention, without_gradients, written, by_sizes, nowhere])
def test_the_graph_for_masks_of_ones_is_that_of_a_capture(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The same as that of a model that makes the ones itself."""
    fields = batch(5, mask=True)
    found = lines(with_ones(capture(Masked(body), fields), ("attention_mask",)))
    assert found == lines(capture(Masked(body, ones=True), fields))


# ---- another way -----------------------------------------------------------------------------------------------------


class Deciding(nn.Module):
    """It reads its batch at the end, after which nothing is left of an export that fails there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.factor = nn.Embedding(9, 4), Kept(numbers())
        self.counts = False

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        if (words > 7).any():
            h = h * (next(self.factor) if self.counts else 2)
        return h.square().mean()


def without_eights(length: int) -> dict[str, Tensor]:
    return {"words": batch(length)["words"] % 8}


def test_another_way_is_captured_at_once(run: Run) -> None:
    first = compiled(Deciding(), without_eights(5))
    assert first.general.checks is not None
    run.since()  # two exports fail first
    other = first.deciding(batch(5), {})
    assert other is not first
    assert run.since() == (1, 1)
    first.fitting(without_eights(7))  # which decides as the first does
    assert run.since() == (1, 0)


@pytest.mark.slow
def test_state_that_matters_in_another_way_alone(run: Run) -> None:
    module = Deciding()
    module.counts = True
    first = compiled(module, without_eights(5))
    with pytest.raises(ConfigError, match="they depend on what it keeps in Python"):
        first.deciding(batch(5), {})
