"""Functions that read values, inside a model that is captured around them: they run as written, for all rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from shardwise.capture.eager_calls import EagerCall
from shardwise.capture.seen_calls import Seen
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

QUERIES, TARGETS, WIDTH = 4, 3, 6


@torch.no_grad()
def matched(cost: Tensor, counts: Tensor) -> Tensor:
    """Return the query of each target of each row, of the cheapest assignment; 0 where there is no target."""
    found = torch.zeros(len(cost), TARGETS, dtype=torch.int64)
    for row, (own, count) in enumerate(zip(cost.tolist(), counts.tolist(), strict=True)):
        best = min(permutations(range(QUERIES), count), key=lambda p: sum(own[q][t] for t, q in enumerate(p)))
        found[row, :count] = torch.tensor(best, dtype=torch.int64)
    return found


def set_loss(boxes: Tensor, wanted: Tensor, counts: Tensor, weights: dict[str, float]) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of the matched boxes over their number in the whole batch, and its parts."""
    total, number = boxes.new_zeros(()), 0
    for own, goals, count in zip(boxes, wanted, counts.tolist(), strict=True):
        cost = torch.cdist(own[None], goals[None, :count])[0].detach()
        best = min(permutations(range(QUERIES), count), key=lambda p: float(sum(cost[q, t] for t, q in enumerate(p))))
        total = total + weights["box"] * (own[list(best)] - goals[:count]).abs().sum()
        number += count
    return total / max(number, 1), {"box": total.detach(), "names": ["box"]}


def weighed(boxes: Tensor) -> Tensor:
    """Return a weight for each row, by its largest number."""
    return boxes * torch.tensor([2.0 if max(row) > 0 else 0.5 for row in boxes[:, 0].tolist()])[:, None, None]


class Matcher(nn.Module):
    """A matcher as a module without parameters, made in each forward."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @torch.no_grad()
    def forward(self, boxes: Tensor, wanted: list[Tensor], counts: Tensor) -> list[Tensor]:
        cost = torch.cdist(boxes, torch.stack(wanted)) * self.scale
        return list(matched(cost, counts).unbind())


class Detector(nn.Module):
    """A small DETR: queries look at a row's features, and its loss matches what they say with the row's targets."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 2))

    def forward(self, x: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
        boxes = self.head(torch.tanh(self.body(x)[:, None] + self.queries))
        if self.form == "matched":
            best = matched(torch.cdist(boxes, wanted), counts)
            near = boxes.gather(1, best[..., None].expand(-1, -1, 2))
            there = torch.arange(TARGETS) < counts[:, None]
            return ((near - wanted).abs().sum(-1) * there).sum() / there.sum().clamp_min(1)
        if self.form == "weighed":
            with torch.no_grad():  # so that no gradient goes through the weights
                weights = weighed(boxes)
            return (weights * boxes).square().mean()
        if self.form == "by row":
            every = Matcher(2.0)(boxes, list(wanted.unbind()), counts)
            loss = sum(F.l1_loss(b[i], w) for b, i, w in zip(boxes, every, wanted, strict=True))
            return loss / len(boxes)
        loss, parts = set_loss(boxes, wanted, counts, {"box": 0.5})
        return loss + 0.1 * boxes.square().mean()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    counts = torch.randint(TARGETS + 1, (rows,), generator=own)
    counts[0] = TARGETS
    return {
        "x": torch.randn(rows, 5, generator=own, dtype=torch.float64),
        "wanted": torch.randn(rows, TARGETS, 2, generator=own, dtype=torch.float64),
        "counts": counts,
    }


PLANS = {
    "dp": data_parallel(Plan.of(), 3),
    "ZeRO-3": data_parallel(Plan.of(), 2, 3),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "pp": pipeline(Plan.of(), 2),
    "dp-tp": tensor_parallel(data_parallel(Plan.of(), 2, 3), 2, "1d"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("form", ["matched", "by row", "weighed", "loss"])
def test_the_step_of_one_device(form: str, plan: str) -> None:
    torch.manual_seed(0)
    report = verify(Detector(form).double(), [batch(7, 1), batch(7, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]


CALLED = [("matched", "matched"), ("by row", "matched"), ("weighed", "weighed"), ("loss", "set_loss")]


@pytest.mark.parametrize(("form", "name"), CALLED)
def test_all_around_the_call_is_captured(form: str, name: str) -> None:
    torch.manual_seed(0)
    given = {name: one.float() if one.is_floating_point() else one for name, one in batch(7, 1).items()}
    found = Compiled(Detector(form), PLANS["tp"], given).general
    assert found.opaque is None
    assert any(note.startswith(name) and "runs as it is written" in note for note in found.notes)
    assert any(where.endswith(f"({name}, which runs as written)") for where in found.meets)
    assert sum(len(p.axes) > 0 for b in found.buckets for p in b.parameters) >= 4


# ---- functions that cannot be called so --------------------------------------------------------------------------


def best_of(boxes: Tensor) -> Tensor:
    return boxes[int(boxes.detach().sum(-1).argmax())]


class Picky(nn.Module):
    """Its loss picks a row by its values with ``pick``."""

    def __init__(self, pick: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(5, 2)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return h.square().mean() + self.pick(h).sum()


class Drawing:
    def __call__(self, h: Tensor) -> Tensor:
        return best_of(h) * torch.rand(2).clamp_min(float(h.detach().max() > 1e9))


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, h: Tensor) -> Tensor:
        self.calls += int(h.detach().max() < 1e9)
        return h * self.calls


class Keeping:
    def __init__(self) -> None:
        self.scale = torch.full((2,), 3.0)

    def __call__(self, h: Tensor) -> Tensor:
        return h * self.scale if h.detach().max() < 1e9 else h


class Writing:
    def __call__(self, h: Tensor) -> Tensor:
        found = h.detach()
        if found.max() < 1e9:
            found.mul_(0.5)
        return h


class Clamping:
    """It writes in a way that leaves no version, and what it writes is the same each time."""

    def __call__(self, h: Tensor) -> Tensor:
        if h.data.max() < 1e9:
            h.data.clamp_(-0.1, 0.1)
        return h


class Changing:
    """It returns as many rows as are positive, which a forward with other parameters shows."""

    def __call__(self, h: Tensor) -> Tensor:
        return h[[i for i, v in enumerate(h.detach().sum(-1).tolist()) if v > 0]]


NOT_EAGER = [Drawing(), Counting(), Writing(), Clamping()]


@pytest.mark.parametrize("pick", NOT_EAGER, ids=lambda one: type(one).__name__)
def test_a_function_that_does_not_keep_to_its_arguments_is_no_op(pick: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="tp: the model could not be captured"):
        Compiled(Picky(pick), PLANS["tp"], {"x": torch.randn(16, 5)})


@pytest.mark.parametrize("pick", [Keeping(), Changing()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_the_statement_that_calls_it_may_be_one(pick: Any, plan: str) -> None:
    torch.manual_seed(0)
    given = [{"x": torch.randn(16, 5, dtype=torch.float64)} for _ in range(3)]
    report = verify(Picky(pick).double(), given, PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any("(line" in note and "runs as it is written" in note for note in report.notes), report.notes


def part_of(h: Tensor) -> Tensor:
    return h[:, :1] if float(h.detach().max()) < 1e3 else h[:, 1:]


@pytest.mark.parametrize("writes", [False, True])
def test_a_write_to_what_shares_memory_with_an_argument(writes: bool) -> None:
    """It would not reach the argument, for the results of an op are copies."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x) * 2.0
            part = part_of(h)
            part = part.mul_(3.0) if writes else part * 3.0
            return (h.square() + part).mean()

    torch.manual_seed(0)
    given = [{"x": torch.randn(6, 5, dtype=torch.float64)} for _ in range(2)]
    assert verify(Writes().double(), given, PLANS["dp"]).passed
    if writes:
        with pytest.raises(ConfigError, match="tp: the model could not be captured.* writes to what part_of"):
            verify(Writes().double(), given, PLANS["tp"])
    else:
        assert verify(Writes().double(), given, PLANS["tp"]).passed


def few_or_all(h: Tensor) -> Tensor:
    """Returns all rows, but where one is very large: then there are fewer."""
    return h[:2] if float(h.detach().max()) > 1e3 else h


def test_results_of_another_size_stop_the_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64)
    with pytest.raises(ShardwiseError, match="few_or_all reads values, and does not return for this batch"):
        verify(Picky(few_or_all).double(), [{"x": x}, {"x": 1e6 * x}], PLANS["tp"])


class Kept:
    """What a forward keeps for a later one: a list of keys."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Chooser(nn.Module):
    """Says, for each place of a row, which places it may look at: with parameters that have no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, h: Tensor, kept: Kept | None) -> Tensor:
        keys = self.norm(self.layer(h)) + self.shift
        if kept is not None:
            kept.keys.append(keys)
        chosen = torch.zeros(*h.shape[:2], h.shape[1], dtype=torch.bool)
        for row, own in enumerate(keys):
            near = (own @ own.T > 0).nonzero().tolist()
            for place, other in near[: 2 * len(own)]:
                chosen[row, place, other] = True
        return chosen | torch.eye(h.shape[1], dtype=torch.bool)


class Sparse(nn.Module):
    """Attention to chosen places; its config says, as those of transformers, whether it keeps keys."""

    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=cached)
        self.up = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.chooser, self.head = Chooser(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        kept = Kept() if self.config.use_cache else None
        h = self.up(x)
        for layer in self.layers:
            q = layer(h)[:, None]
            h = h + F.scaled_dot_product_attention(q, q, q, attn_mask=self.chooser(h, kept)[:, None])[:, 0]
        return F.mse_loss(self.head(h), wanted)


def places(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, TARGETS, 5, generator=own, dtype=torch.float64),
        "wanted": torch.randn(rows, TARGETS, 2, generator=own, dtype=torch.float64),
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_module_that_chooses_by_parameters(cached: bool, plan: str) -> None:
    """Its parameters are arguments of the call, and a cache that no step reads is not made."""
    torch.manual_seed(0)
    module = Sparse(cached).double()
    report = verify(module, [places(7, 1), places(7, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any("Chooser.forward" in note and "runs as it is written" in note for note in report.notes)
    assert any("caches of keys" in note for note in report.notes) == cached and module.config.use_cache == cached


class Learned(Chooser):
    """Gives scores with gradients of parameters."""

    def forward(self, h: Tensor, kept: Kept | None) -> Tensor:
        scores = h @ self.layer.weight @ h.mT
        return scores + len((scores > 0).nonzero().tolist()) % 2


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_of_a_function_with_gradients_of_parameters_a_part_runs_as_written(plan: str) -> None:
    torch.manual_seed(0)
    module = Sparse(False).double()
    module.chooser = Learned().double()
    report = verify(module, [places(7, 1), places(7, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any(note.startswith("Learned.forward (line") for note in report.notes)


def test_a_call_on_another_device_is_told_that_device() -> None:
    """A capture is made on the CPU."""
    told = list[torch.device]()

    def placed(h: Tensor, device: torch.device) -> Tensor:
        told.append(device)
        return h

    given, spec = tree_flatten(((torch.ones(2), torch.device("cuda", 3)), {}))
    found, found_spec = tree_flatten(torch.ones(2))
    seen = Seen(placed, tuple(given), spec, tuple(found), found_spec, True, False)  # type: ignore[arg-type]
    EagerCall([seen, seen], 0, ())(torch.ones(2))
    assert told == [torch.device("cpu")]


def detached(h: Tensor) -> Tensor:
    """Returns nothing that depends on ``h`` by autograd."""
    return h.detach() * (2 if float(h.detach().sum()) > 0 else 1)


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_a_parameter_behind_a_result_without_a_gradient_takes_no_step(plan: str) -> None:
    """Weight decay would move it."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate = nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) * detached(self.gate(x))).square().mean()

    torch.manual_seed(0)
    batches = [{"x": torch.randn(6, 5, dtype=torch.float64)} for _ in range(2)]
    module = Behind().double()
    assert verify(module, batches, PLANS[plan]).passed
    found = Compiled(Behind(), PLANS[plan], {"x": torch.randn(6, 5)}).general
    assert {p.name: b.learns for b in found.buckets for p in b.parameters}["gate.weight"] is False


def test_a_loss_without_a_gradient_is_refused() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return detached(self.body(x)).mean()

    with pytest.raises(ConfigError, match="no trainable parameter has a gradient"):
        Compiled(Nothing(), PLANS["dp"], {"x": torch.randn(6, 5)})
