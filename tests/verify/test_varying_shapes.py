"""Batches whose shapes vary from step to step: the steps are those of one device, under every plan."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captures import apart
from shardwise.capture.forms import form_of, resized
from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks
from shardwise.train.trainer import Trainer
from shardwise.units.trace import Trace
from shardwise.verify.verify import verify

VOCAB, WIDTH = 13, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (y.view(rows, length, 2, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        seen = mask[:, None, None].bool() & torch.ones(length, length, dtype=torch.bool).tril()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Text(nn.Module):
    """A causal model of tokens, with ignored targets where a row is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Any:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def text_batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=own)
    sizes = torch.randint(max(length // 2, 2), length + 1, (rows,), generator=own)
    mask = (torch.arange(length) < sizes[:, None]).long()
    return {"tokens": tokens, "mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Layer(nn.Module):
    def __init__(self, entries: int, exits: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(entries, exits, 3, padding=1), nn.BatchNorm2d(exits)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)


class Pictures(nn.Module):
    """A convolution net that takes pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(3, 8), Layer(8, 6)])
        self.head = nn.Linear(6, 5)

    def forward(self, picture: Tensor, label: Tensor) -> Tensor:
        for layer in self.layers:
            picture = layer(picture)
        return F.cross_entropy(self.head(picture.mean((2, 3))), label)


def picture_batch(rows: int, height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 5, (rows,), generator=own)
    return {"picture": torch.randn(rows, 3, height, width, generator=own, dtype=torch.float64), "label": label}


def texts() -> list[dict[str, Tensor]]:
    return [text_batch(*one, seed) for seed, one in enumerate([(6, 7), (6, 12), (5, 7), (6, 9), (6, 12)])]


def pictures() -> list[dict[str, Tensor]]:
    return [picture_batch(*one, seed) for seed, one in enumerate([(6, 8, 8), (6, 8, 11), (5, 13, 9), (6, 8, 8)])]


Subject = tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Tensor]]]]
MODELS: Mapping[str, Subject] = {"text": (Text, texts), "pictures": (Pictures, pictures)}

PLANS: Mapping[str, dict[str, Any]] = {
    "alone": {},
    "dp": {"mesh": {"dp": 2}, "microbatches": 2},
    "zero3": {"mesh": {"dp": 3}, "data": 3},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "microbatches": 3, "schedule": "1f1b"},
    "all": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "microbatches": 2, "schedule": "1f1b"},
}


def plan_of(name: str) -> Plan:
    options = dict(PLANS[name])
    sizes, stage = options.pop("mesh", {}), options.pop("data", 0)
    return data_parallel(Plan.of(Mesh.of(**sizes), **options), sizes.get("dp", 1), zero=stage)


CASES = [(model, plan) for model in MODELS for plan in PLANS]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_steps_are_those_of_one_device(model: str, plan: str) -> None:
    made, batches = MODELS[model]
    torch.manual_seed(0)
    report = verify(made(), batches(), plan_of(plan), optimizer=OptimizerChoice("adamw", lr=0.01))
    assert report.passed, report


# ---- one capture for many shapes ----------------------------------------------------------------------


def written(trace: Trace) -> list[tuple[str, ...]]:
    return [tuple(map(str, (n.op, n.target, n.args, n.kwargs))) for u in trace.units if u.graph for n in u.graph.nodes]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_one_capture_gives_the_graphs_of_captures_of_every_shape(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, batches = MODELS[model]
    module, several = made(), batches()
    exported: list[int] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: exported.append(1) or export(*a, **k))
    with apart():
        compiled = Compiled(module, Plan.of(precision="fp64"), several[0])
        for batch in several:
            compiled.fitting(batch)
    # The first shape, and that in which some sizes are symbolic; of pictures, first the width and then the height is.
    assert len(exported) == {"text": 2, "pictures": 3}[model]
    for batch in several[1:]:
        own = Compiled(module, Plan.of(precision="fp64"), batch)
        assert written(compiled.fitting(batch).general) == written(own.general)
        assert compiled.fitting(batch).general.rows is None


def test_a_batch_of_the_known_shapes_is_no_new_one() -> None:
    compiled = Compiled(Pictures(), Plan.of(precision="fp64"), picture_batch(4, 8, 8))
    assert compiled.fitting(picture_batch(9, 8, 8)) is compiled
    other = compiled.fitting(picture_batch(4, 9, 8))
    assert other is not compiled
    assert other is compiled.fitting(picture_batch(2, 9, 8))


class Short(nn.Module):
    """A model that computes something else for rows of one number, and takes no more than twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight[: x.shape[1]]
        if x.shape[1] == 11 and weight.sum() > 0 and locals():
            x = 2 * x
        if x.shape[1] == 1:
            return (3 * x * weight).mean()
        if x.shape[1] > 8:
            return (x * weight).square().mean()
        return (x * weight).mean()


def rows_of(length: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(4, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def test_another_branch_is_captured_anew() -> None:
    batches = [rows_of(length, seed) for seed, length in enumerate([3, 5, 1, 9, 8, 12, 3])]
    assert verify(Short(), batches, Plan.of(Mesh.of(dp=2))).passed


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (11, r"batch: rows of shapes x \(11,\) cannot be captured: .*legal: shapes that can, such as x \(3,\)"),
        (13, r"model: its forward fails in a trial with 4 rows of the example batch \(x \(4, 13\) float64\)"),
    ],
)
def test_a_shape_that_no_trace_takes_is_refused(length: int, message: str) -> None:
    compiled = Compiled(Short(), Plan.of(precision="fp64"), rows_of(3))
    with pytest.raises(ConfigError, match=message):
        compiled.fitting(rows_of(length))


def test_traces_of_shapes_that_no_longer_come_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.lower.compiled.FORMS", 2)
    compiled = Compiled(Short(), Plan.of(precision="fp64"), rows_of(3))
    first, second = (compiled.fitting(rows_of(length)) for length in (4, 5))
    assert compiled.fitting(rows_of(4)) is first
    compiled.fitting(rows_of(6))  # of two, that of five is the one that was used longest ago
    assert compiled.fitting(rows_of(4)) is first
    assert compiled.fitting(rows_of(5)) is not second


def test_examples_of_other_sizes_repeat_their_values() -> None:
    small = {"x": torch.arange(6).view(2, 3), "whole y": torch.tensor([1, 2])}
    large = {"x": torch.zeros(2, 5, dtype=torch.int64), "whole y": torch.zeros(1, dtype=torch.int64)}
    found = resized(small, form_of(large))
    assert found["x"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4]]
    assert found["whole y"].tolist() == [1]


# ---- sizes that are named -----------------------------------------------------------------------------

NAMED = {"tokens.1": 14, "mask.1": 14, "labels.1": 14}


def trained(
    module: nn.Module, plan: Plan, parts: list[list[dict[str, Tensor]]], varies: Mapping[str, int], example: Any = None
) -> list[list[float]]:
    """Return each rank's losses; of each step every rank has its own rows."""
    example = parts[0][0] if example is None else example
    compiled = Compiled(module, plan, example, varies=varies)

    def rank(comm: Communicator) -> list[float]:
        index = comm.mesh.index(comm.rank, AXES)
        with Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, example, comm=comm) as trainer:
            return [float(trainer.step(step[index]).loss) for step in parts]

    return run_ranks(plan.mesh, rank, timeout=60)


def cut(batch: dict[str, Tensor], plan: Plan) -> list[dict[str, Tensor]]:
    parts = plan.mesh.axis_size(AXES)
    rows = next(iter(batch.values())).shape[0]
    ranges = [rank_rows(rows, plan.microbatches, parts, part) for part in range(parts)]
    return [{name: torch.cat([v[a:b] for a, b in one]) for name, v in batch.items()} for one in ranges]


@pytest.mark.slow
def test_ranks_bring_rows_of_their_own_in_sizes_that_are_named() -> None:
    plan = data_parallel(Plan.of(precision="fp64"), 2)
    batches = [text_batch(4, length, seed) for seed, length in enumerate([7, 12, 7, 9])]
    module = Text()
    alone = trained(module, Plan.of(precision="fp64"), [[one] for one in batches], {})
    assert trained(module, plan, [cut(one, plan) for one in batches], NAMED) == pytest.approx(
        [pytest.approx(alone[0], abs=1e-10)] * 2
    )


LENGTHS = [(7, 12), (9, 6), (8, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_ranks_have_rows_of_different_lengths_in_a_step(sizes: dict[str, int]) -> None:
    """Padding that the mask and the targets leave out changes nothing: one device has the longest rows of the step."""
    plan = Plan.of(Mesh.of(**sizes), precision="fp64")
    steps = [
        [text_batch(2, a, seed), text_batch(2, b, seed + 9)] for seed, (a, b) in enumerate([(7, 12), (9, 6), (8, 8)])
    ]
    module = Text()
    whole = [[padded(one)] for one in steps]
    alone = trained(module, Plan.of(precision="fp64"), whole, {})
    found = trained(module, plan, steps, NAMED)
    assert found == [pytest.approx(alone[0], abs=1e-10)] * plan.mesh.size


def padded(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    most, fill = max(one["tokens"].shape[1] for one in parts), {"tokens": 0, "mask": 0, "labels": -100}
    return {
        name: torch.cat([F.pad(one[name], (0, most - one[name].shape[1]), value=value) for one in parts])
        for name, value in fill.items()
    }


@pytest.mark.parametrize("length", [5, 3])
def test_a_loss_that_counts_no_targets_takes_one_shape_a_step(length: int) -> None:
    plan = data_parallel(Plan.of(precision="fp64"), 2)
    steps = [[rows_of(3), rows_of(3)], [rows_of(3), rows_of(length)]]
    if length == 3:
        assert len(trained(Short(), plan, steps, {"x.1": 6})) == 2
        return
    with pytest.raises(
        ConfigError, match="rows of different shapes in a step; legal: one shape on all, unless the loss"
    ):
        trained(Short(), plan, steps, {"x.1": 6})


def test_sizes_that_are_not_named_are_refused_on_ranks_with_rows_of_their_own() -> None:
    plan = data_parallel(Plan.of(precision="fp64"), 2)
    with pytest.raises(ConfigError, match=r'legal in several shapes: dims that are named .*varies = {"x.1": LARGEST}'):
        trained(Short(), plan, [[rows_of(3)] * 2, [rows_of(4)] * 2], {})


@pytest.mark.parametrize(
    ("varies", "message"),
    [
        ({"y.1": 4}, r'varies: "y.1": the batch has no field "y"; legal: x.1'),
        ({"x.2": 4}, r'varies: "x.2": "2" is no dim of its rows; legal: 1'),
        ({"x.0": 4}, r'varies: "x.0": "0" is no dim of its rows; legal: 1'),
        ({"x.1": 0}, r"varies.x.1: 0 is not legal"),
    ],
)
def test_names_of_no_dim_are_refused(varies: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Compiled(Short(), Plan.of(precision="fp64"), rows_of(3), varies=varies)


def test_more_than_the_largest_is_refused() -> None:
    compiled = Compiled(Short(), Plan.of(precision="fp64"), rows_of(3), varies={"x.1": 6})
    assert compiled.example["x"].shape == (4, 6)  # of which memory is predicted
    with pytest.raises(ConfigError, match=r'field "x" has size 7 in dim 1; legal: at most 6, as varies says of "x.1"'):
        compiled.fitting(rows_of(7))


def test_less_than_the_example_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'field "x" has size 3 in dim 1; legal: at most 2, as varies says of "x.1"'):
        Compiled(Short(), Plan.of(precision="fp64"), rows_of(3), varies={"x.1": 2})


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.embed(ids).flatten(0, 1), labels.flatten())


def test_a_field_that_varies_with_another_is_named() -> None:
    given = {"ids": torch.zeros(2, 17, dtype=torch.long), "labels": torch.zeros(2, 17, dtype=torch.long)}
    with pytest.raises(ConfigError, match=r"labels.1 is as large as what varies names: if both vary, name both"):
        Compiled(Tagged(), Plan.of(), given, varies={"ids.1": 24})
    Compiled(Tagged(), Plan.of(), given, varies={"ids.1": 24, "labels.1": 24})


def test_batches_of_a_window_have_one_shape() -> None:
    plan = Plan.of(Mesh.of(pp=2), precision="fp64", schedule="pipedream", window=2)
    batches = [picture_batch(4, 8, 8), picture_batch(4, 9, 8)]
    with pytest.raises(ConfigError, match="after picture .*legal: the same shapes in every batch of a window"):
        verify(Pictures(), batches, plan, clip_norm=None)
