"""Batches of every structure that users write train as on one device, under every kind of plan."""

from __future__ import annotations

import json
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from processes import run_processes
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.forming import fields_of
from shardwise.data.order import sample_order
from shardwise.data.stream_loader import part_of
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.distribute import distribute
from shardwise.train.trainer import Trainer
from shardwise.verify.verify import verify

SIZE, ROWS, STEPS = 14, 6, 4  # the last batch of an epoch has 2 rows


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    image: Any
    target: Any
    name: str = ""


class Thing:
    """It is no container of anybody's, and a copy of it is all that its class allows."""

    def __init__(self, x: Any, y: Any, name: Any) -> None:
        self.x, self.y, self.name, self.kind = x, y, name, "thing"

    def both(self) -> tuple[Any, Any]:
        return self.x, self.y


class Stored:
    """It keeps its tensors elsewhere, beside what no copy may have, and gives and takes them as a dict."""

    def __init__(self, store: dict[str, Any]) -> None:
        self._store, self._own = store, weakref.ref(self)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._store)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Stored:
        return cls(found)

    def both(self) -> tuple[Any, Any]:
        assert self._own() is self
        return self._store["x"], self._store["y"]


class Body(nn.Module):
    """Two blocks of a shape, so that stages can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def output(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.output(x) - y).square().mean()


def x_of(index: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def y_of(index: int) -> Tensor:
    return x_of(index)[:2].sin() + 0.1 * index


class ByPosition(Body):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


class OfDict(Body):
    """It takes the batch itself, whatever is in it."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        assert type(batch) is dict
        return self.loss(batch["x"], batch["y"])


class OfMapping(Body):
    def forward(self, batch: UserDict[str, Tensor]) -> Tensor:
        assert type(batch) is UserDict
        return self.loss(batch["x"], batch["y"])


class OfThing(Body):
    def forward(self, batch: Thing | Stored) -> Tensor:
        assert isinstance(batch, Stored) or type(batch) is Thing and batch.kind == "thing"
        return self.loss(*batch.both())


class OutputOfDict(Body):
    def forward(self, batch: dict[str, Tensor], double: bool = False) -> Tensor:
        return self.output(batch["x"]) * (2 if double else 1)


class OutputAlone(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.output(x)


class WholeBatch(Body):
    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, Record):
            return self.loss(batch.image, batch.target["values"])
        return self.loss(batch.x, batch.y)


class Nested(Body):
    def forward(self, inputs: dict[str, Any], target: Sequence[Tensor]) -> Tensor:
        return self.loss(inputs["image"] * inputs["more"]["scale"][:, None], target[1]) + 0 * target[0].sum()


class Named(Body):
    """It never reads the text, which is cut with the rows all the same."""

    def forward(self, x: Tensor, y: Tensor, name: Any) -> Tensor:
        return self.loss(x, y)


class Reading(Body):
    """It reads an object for each row, and so is no graph."""

    def forward(self, x: Tensor, y: Tensor, name: Sequence[str]) -> Tensor:
        weight = torch.tensor([1.0 + len(one) for one in name], dtype=torch.float64)
        return (weight[:, None] * (self.output(x) - y).square()).mean()


class Ragged(Body):
    def forward(self, parts: list[Tensor], y: Tensor) -> Tensor:
        return self.loss(torch.stack([one.mean(0) for one in parts]), y)


class Scaled(Body):
    def forward(self, x: Tensor, y: Tensor, scale: Any, shift: Any, head: Any = None) -> Tensor:
        out = self.output(x) * scale + shift
        return ((out * 2 if head == "double" else out) - y).square().mean()


def square(output: Tensor, batch: Any) -> Tensor:
    return (output - batch["y" if isinstance(batch, dict) else 1]).square().mean()


def text(index: int) -> str:
    return "ab" * (index % 3)


def stacked(samples: list[Any]) -> Any:
    """What a collator makes of samples, in plain torch."""
    first = samples[0]
    if isinstance(first, Tensor):
        return torch.stack(samples)
    if isinstance(first, int | float):
        return torch.tensor(samples)
    if isinstance(first, dict):
        return {name: stacked([one[name] for one in samples]) for name in first}
    if isinstance(first, UserDict):
        return UserDict(stacked([dict(one) for one in samples]))
    if isinstance(first, Thing):
        return Thing(*(stacked([getattr(one, name) for one in samples]) for name in ("x", "y", "name")))
    if isinstance(first, Stored):
        return Stored(stacked([one.to_dict() for one in samples]))
    if isinstance(first, Record):
        return Record(*(stacked([getattr(one, name) for one in samples]) for name in ("image", "target", "name")))
    if isinstance(first, Pair):
        return Pair(*map(stacked, map(list, zip(*samples, strict=True))))
    if isinstance(first, tuple | list):
        return type(first)(stacked(list(one)) for one in zip(*samples, strict=True))
    return samples


def ragged(samples: list[Any]) -> Any:
    return {"parts": [one[0] for one in samples], "y": torch.stack([one[1] for one in samples])}


class Padded(Body):
    """Its batches are as long as their longest sample."""

    def forward(self, parts: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return self.loss((parts * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), y)


def padded(samples: list[Any]) -> Any:
    parts = [one[0] for one in samples]
    mask = [torch.ones(len(one), dtype=torch.float64) for one in parts]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"parts": pad(parts), "mask": pad(mask), "y": torch.stack([one[1] for one in samples])}


def scaled(samples: list[Any]) -> Any:
    """Numbers and a word that follow from the rows: they change from batch to batch."""
    batch = {name: torch.stack([one[name] for one in samples]) for name in ("x", "y")}
    mean = float(batch["x"].mean())
    return {**batch, "scale": 1 + mean, "shift": int(mean > 0), "head": "double" if mean > 0 else "single"}


@dataclass
class Kind:
    """A kind of input: a sample, the model of it, how batches are made, and how plain torch calls the model."""

    sample: Callable[[int], Any]
    model: type[Body]
    call: Callable[[Any, Any], Tensor]
    collate: Callable[[list[Any]], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None


def by_name(model: Any, batch: Any) -> Tensor:
    return model(**batch)


def by_position(model: Any, batch: Any) -> Tensor:
    return model(*batch)


def as_it_is(model: Any, batch: Any) -> Tensor:
    return model(batch)


def through_loss(model: Any, batch: Any) -> Tensor:
    return square(model(batch if isinstance(batch, dict) else batch[0]), batch)


def nested(index: int) -> Any:
    inputs = {"image": x_of(index), "more": {"scale": 1 + index / 7}}
    return {"inputs": inputs, "target": [torch.ones(3, dtype=torch.float64), y_of(index)]}


KINDS = {
    "dict": Kind(lambda i: {"x": x_of(i), "y": y_of(i)}, OfDict, as_it_is),
    "dict and loss": Kind(lambda i: {"x": x_of(i), "y": y_of(i)}, OutputOfDict, through_loss, loss=square),
    "tuple": Kind(lambda i: (x_of(i), y_of(i)), ByPosition, by_position),
    "tuple and loss": Kind(lambda i: (x_of(i), y_of(i)), OutputAlone, through_loss, loss=square),
    "named tuple": Kind(lambda i: Pair(x_of(i), y_of(i)), WholeBatch, as_it_is),
    "named tuple by name": Kind(lambda i: Pair(x_of(i), y_of(i)), ByPosition, by_position),
    "dataclass": Kind(lambda i: Record(x_of(i), {"values": y_of(i)}, text(i)), WholeBatch, as_it_is),
    "mapping": Kind(lambda i: UserDict(x=x_of(i), y=y_of(i)), OfMapping, as_it_is),
    "object": Kind(lambda i: Thing(x_of(i), y_of(i), text(i)), OfThing, as_it_is, stacked),
    "stored": Kind(lambda i: Stored({"x": x_of(i), "y": y_of(i)}), OfThing, as_it_is),
    "nested": Kind(nested, Nested, by_name),
    "text": Kind(lambda i: {"x": x_of(i), "y": y_of(i), "name": text(i)}, Named, by_name),
    "text that is read": Kind(lambda i: {"x": x_of(i), "y": y_of(i), "name": text(i)}, Reading, by_name),
    "ragged": Kind(lambda i: (x_of(i).repeat(1 + i % 3, 1) + 0.01 * i, y_of(i)), Ragged, by_name, ragged),
    "padded": Kind(lambda i: (x_of(i).repeat(1 + i % 5, 1) + 0.01 * i, y_of(i)), Padded, by_name, padded),
    "numbers": Kind(lambda i: {"x": x_of(i), "y": y_of(i)}, Scaled, by_name, scaled),
}
"""Every kind of input."""

PLANS: dict[str, Callable[[Plan], Plan]] = {
    "dp": lambda plan: data_parallel(plan, 2),
    "microbatches": lambda plan: plan.replace(microbatches=2),
    "dp and microbatches": lambda plan: data_parallel(plan.replace(microbatches=2), 2),
    "zero 3": lambda plan: data_parallel(plan, 2, zero=3),
    "pp": lambda plan: pipeline(plan.replace(microbatches=2), 2),
    "tp": lambda plan: tensor_parallel(plan, 2),
}
WHOLE = ("text that is read", "ragged")
"""Models that are no graph, which plans with parts of parameters refuse."""


class Dataset:
    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < SIZE:
            raise IndexError(index)
        return self.sample(index)


class Stream(IterableDataset[Any]):
    """All samples in turn, or every second one from that with the number of the rank."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return (KINDS["tuple"].sample(i) for i in range(self.rank or 0, SIZE, 1 if self.rank is None else 2))


SOURCES: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(Dataset(KINDS["tuple"].sample), ROWS, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(
        Dataset(KINDS["tuple"].sample), ROWS,
        sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], 9, generator=seeded()),
    ),
    "stream": lambda: DataLoader(Stream(), ROWS),
    "samples": Stream,
}  # fmt: skip
"""What gives batches of pairs; alone it gives the same."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def epochs(source: str) -> Iterator[Any]:
    """Batches of ordinary torch, epoch after epoch."""
    loader = SOURCES[source]()
    loader = loader if isinstance(loader, DataLoader) else DataLoader(loader, ROWS)
    while True:
        yield from loader


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", ["dp and microbatches", "zero 3", "pp", "tp"])
@pytest.mark.parametrize("source", SOURCES)
def test_sources_train_as_on_one_device_and_resume(tmp_path: Path, source: str, plan: str) -> None:
    """The run ends after three steps, within an epoch, and goes on in another process's place."""
    model = model_of(KINDS["tuple"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for x, y in islice(epochs(source), 6):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    plans = PLANS[plan](Plan.of(precision="fp64"))
    example = fields_of(next(epochs(source)))
    compiled = Compiled(model_of(KINDS["tuple"]), plans, example)

    def rank(comm: ThreadCommunicator) -> list[float]:
        choice = OptimizerChoice("sgd", lr=0.1, momentum=0.9)
        trainer = Trainer(compiled, choice, plans, example, comm=comm)
        with trainer.loader(SOURCES[source](), ROWS) as loader, Checkpoints(trainer, tmp_path) as checkpoints:
            checkpoints.restore(loader)
            losses = [float(trainer.step(batch).loss) for batch in islice(loader, 3)]
            checkpoints.save(loader)
        return losses

    for steps in (slice(0, 3), slice(3, 6)):
        for found in run_ranks(plans.mesh, rank, timeout=120):
            assert found == pytest.approx(expected[steps], rel=1e-10, abs=1e-10)


def test_a_dataset_that_divides_itself_by_rank_is_seen() -> None:
    plan = data_parallel(Plan.of(precision="fp64"), 2)
    example = fields_of(next(epochs("samples")))
    compiled = Compiled(model_of(KINDS["tuple"]), plan, example)

    def rank(comm: ThreadCommunicator) -> str:
        trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, example, comm=comm)
        with pytest.raises(ConfigError) as caught:
            next(trainer.loader(Stream(comm.rank), ROWS))
        return str(caught.value)

    for told in run_ranks(plan.mesh, rank, timeout=60):
        assert "a dataset that divides itself by rank gives such" in told
        assert "rows that a rank reads by itself go to trainer.step(batch)" in told


def test_own_rows_in_any_form() -> None:
    """What is for all rows has to be the same on all ranks."""
    kind, plan = KINDS["numbers"], data_parallel(Plan.of(precision="fp64"), 2)
    whole = scaled([kind.sample(i) for i in range(4)])
    compiled = Compiled(model_of(kind), plan, fields_of(whole))

    def rank(comm: ThreadCommunicator) -> tuple[float, str]:
        trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, whole, comm=comm)
        mine = {**whole, **{name: whole[name][2 * comm.rank :][:2] for name in ("x", "y")}}
        loss = float(trainer.step(mine).loss)
        with pytest.raises(ConfigError, match="the ranks have read different batches") as caught:
            trainer.step({**mine, "scale": 1.0 + comm.rank})
        return loss, str(caught.value)

    expected = by_name(model_of(kind), whole).item()
    assert [loss for loss, _ in run_ranks(plan.mesh, rank, timeout=60)] == pytest.approx([expected] * 2, rel=1e-10)


LOOPS: dict[str, Callable[[int], Any]] = {
    "dataclass": lambda step: (WholeBatch, (Record(*pair(step)[:1], {"values": pair(step)[1]}, "a"),), {}),
    "named tuple": lambda step: (WholeBatch, (Pair(*pair(step)),), {}),
    "mapping": lambda step: (OfMapping, (UserDict(zip("xy", pair(step), strict=True)),), {}),
    "object": lambda step: (OfThing, (), {"batch": Thing(*pair(step), ["a"] * ROWS)}),
    "stored": lambda step: (OfThing, (Stored(dict(zip("xy", pair(step), strict=True))),), {}),
    "nested": lambda step: (
        Nested, ({"image": pair(step)[0], "more": {"scale": pair(step)[0][:, 0]}}, [pair(step)[1]] * 2), {}
    ),
    "text": lambda step: (Reading, (*pair(step), [text(i + step) for i in range(ROWS)]), {}),
    "numbers": lambda step: (
        Scaled, pair(step), {"scale": 1 + step / 8, "shift": step % 2, "head": ["a", "double"][step % 2]}
    ),
}  # fmt: skip
"""What a user's own loop gives a model in a step: its class, and the arguments."""


def pair(step: int) -> tuple[Tensor, Tensor]:
    rows = range(ROWS * step, ROWS * (step + 1))
    return torch.stack([x_of(i) for i in rows]), torch.stack([y_of(i) for i in rows])


def own_loop(name: str, wrap: Callable[[Any, Any], Any]) -> list[float]:
    torch.manual_seed(0)
    module = LOOPS[name](0)[0]().double()
    model, optimizer = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(STEPS):
        _, args, kwargs = LOOPS[name](step)
        optimizer.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LOOPS)
def test_an_own_loop_takes_them_too(name: str) -> None:
    plan = Plan.of(precision="fp64", microbatches=2)
    expected = own_loop(name, lambda *given: given)
    assert own_loop(name, lambda *given: distribute(*given, plan)) == pytest.approx(expected, rel=1e-10, abs=1e-10)


RUN = """
import json, sys, warnings

warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[1:]
from shardwise import distribute
from test_inputs import LOOPS, own_loop

print(json.dumps([[own_loop(n, lambda *g: g), own_loop(n, distribute)] for n in LOOPS]))
"""


@pytest.mark.slow
def test_an_own_loop_on_two_ranks(tmp_path: Path) -> None:
    """A model that reads text is one unit, and each rank has the text of its own rows."""
    (tmp_path / "run.py").write_text(RUN)
    tests = Path(__file__).parents[1]
    for output in run_processes(2, [str(tmp_path / "run.py"), str(tests), str(tests / "train")], 200):
        for expected, found in json.loads(output.splitlines()[-1]):
            assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)


def alone(kind: Kind, example: Any, **more: Any) -> Trainer:
    plan = Plan.of(precision="fp64")
    comm = AloneCommunicator(plan.mesh, 0, torch.device("cpu"))
    choice = OptimizerChoice("sgd", lr=0.1, momentum=0.9)
    return Trainer(model_of(kind), choice, plan, example, loss=kind.loss, comm=comm, **more)


def test_a_word_with_many_values_is_refused() -> None:
    """A graph is captured for each, and there is an end to that; of numbers there may be any."""
    kind = KINDS["numbers"]
    batch = scaled([kind.sample(i) for i in range(4)])
    trainer = alone(kind, batch)
    for step in range(20):
        trainer.evaluate_batch({**batch, "scale": 1.0 + step, "shift": step})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(15):
            trainer.evaluate_batch({**batch, "head": str(step)})
    (one,) = [str(one.message) for one in told if "has had" in str(one.message)]
    assert one.startswith('batch: "head" has had 4 values; the model is captured for each')
    with pytest.raises(ConfigError, match='"head" has had 16 values, and the model is captured for each; legal: a num'):
        trainer.evaluate_batch({**batch, "head": "one more"})


class Looking(Body):
    """It looks at text in ways that no graph sees."""

    def __init__(self, way: Callable[[Any], bool]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor, y: Tensor, name: Any) -> Tensor:
        return self.loss(x, y) * (2 if self.way(name) else 1)


WAYS: list[Callable[[Any], bool]] = [
    lambda name: isinstance(name, list), lambda name: "ab" in name, lambda name: len(name) == 4, bool, callable,
    lambda name: name == ["", "ab", "abab", ""], lambda name: hasattr(name, "append"), lambda name: f"{name}" != "",
    lambda name: "".join(name) != "", lambda name: sum(map(len, name)) == 6,
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_text_that_is_looked_at_is_never_frozen(way: int) -> None:
    """What stands for it in a capture answers no question, so that the model is one unit, and the note says why."""
    batch = stacked([KINDS["text"].sample(i) for i in range(4)])
    torch.manual_seed(0)
    model = Looking(WAYS[way]).double()
    expected = model(**batch)
    comm = AloneCommunicator(Plan.of().mesh, 0, torch.device("cpu"))
    trainer = Trainer(model, OptimizerChoice("sgd", lr=0.1), Plan.of(precision="fp64"), batch, comm=comm)
    assert float(trainer.step(batch).loss) == pytest.approx(expected.item(), rel=1e-10)
    other = {**batch, "name": ["ab", "c", "", "d"]}
    state = trainer.state_dict()
    model.load_state_dict(state)
    assert float(trainer.step(other).loss) == pytest.approx(model(**other).item(), rel=1e-10)
    if WAYS[way] is not callable:
        assert any('reads "name" of the batch, which is a list' in note for note in trainer.notes)


class Anchored(Body):
    def forward(self, x: Tensor, y: Tensor, anchors: Tensor) -> Tensor:
        return self.loss(x, y) + (anchors.square().sum() * self.output(x)).mean()


def test_a_tensor_without_rows_is_named() -> None:
    kind = Kind(lambda i: {"x": x_of(i), "y": y_of(i)}, Anchored, by_name)
    batch = {**stacked([kind.sample(i) for i in range(4)]), "anchors": torch.randn(7).double()}
    with pytest.raises(ConfigError, match='"anchors" has 7 rows.*or whole=."anchors",. for a tensor that is the same'):
        alone(kind, batch)
    trainer = alone(kind, batch, whole=("anchors",))
    expected = model_of(kind)(**batch).item()
    assert float(trainer.step(batch).loss) == pytest.approx(expected, rel=1e-10)


def test_a_window_of_one_program_has_one_word() -> None:
    kind = KINDS["numbers"]
    batches = [scaled([kind.sample(i) for i in range(first, first + 6)]) for first in range(0, 12)]
    word = batches[0]["head"]
    other = next(one for one in batches if one["head"] != word)
    plan = pipeline(Plan.of(precision="fp64"), 2, "pipedream")
    compiled = Compiled(model_of(kind), plan, fields_of(batches[0]))

    def rank(comm: ThreadCommunicator) -> str:
        trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, batches[0], comm=comm)
        given = [batches[0], other, batches[0], batches[0]]
        parts = (part_of(fields_of(one), plan.mesh, comm.rank, 1) for one in given)
        with pytest.raises(ConfigError) as caught:
            list(trainer.steps(parts, 4))
        return str(caught.value)

    for told in run_ranks(plan.mesh, rank, timeout=60):
        assert '"head" is' in told and "where batches are computed by one program" in told


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", ["tuple and loss", "dict", "dict and loss", "mapping", "stored", "nested", "text that is read", "ragged"]
)
def test_verify_takes_them(name: str) -> None:
    kind, plan = KINDS[name], PLANS["dp and microbatches"](Plan.of())
    batches = [
        fields_of((kind.collate or stacked)([kind.sample(i) for i in range(first, first + 6)])) for first in (0, 6)
    ]
    report = verify(model_of(kind), batches, plan, loss=kind.loss)
    assert report.passed and report.largest < 1e-10


class Classes(Dataset):
    """Pairs of numbers and a class."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], index % 2


def hits(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output.argmax(1) == batch[1]).sum(), len(output)


@pytest.mark.parametrize("data", ["dataset", "loader", "samples"])
def test_metrics_of_tuples(data: str) -> None:
    """A ready-made metric takes the last part for the labels, and one of the user gets the tuple."""

    class Samples(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (dataset[index] for index in range(SIZE))

    dataset = Classes(KINDS["tuple"].sample)
    kind = Kind(dataset.__getitem__, OutputAlone, through_loss, loss=lambda o, b: nn.functional.cross_entropy(o, b[1]))
    trainer = alone(kind, stacked([dataset[i] for i in range(4)]))
    given: dict[str, Any] = {"dataset": dataset, "loader": DataLoader(dataset, ROWS), "samples": Samples()}
    found = trainer.evaluate(given[data], ["accuracy", hits], batch_size=ROWS)
    x, y = stacked([dataset[i] for i in range(SIZE)])
    output = model_of(kind)(x)
    right = (output.argmax(1) == y).double().mean().item()
    assert found.rows == SIZE and found.metrics == pytest.approx({"accuracy": right, "hits": right})
    assert found.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-10)


def test_what_forward_takes_of_a_tuple() -> None:
    """With a loss function forward gets the parts that it requires, and a note says what it does not get."""

    class Optional(OutputAlone):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x if mask is None else x * mask)

    batch = (x_of(0)[None], y_of(0)[None])
    trainer = alone(Kind(lambda i: None, Optional, through_loss, loss=square), batch)
    assert any(
        "forward gets the first 1 of 2 parts" in note and "mask has its default" in note for note in trainer.notes
    )
    kind = Kind(lambda i: None, Scaled, by_position)
    with pytest.raises(ConfigError, match="it has 2 parts, and forward requires x, y, scale, shift; legal: the parts"):
        alone(kind, batch)


def model_of(kind: Kind) -> Body:
    torch.manual_seed(0)
    return kind.model().double()


def plain(kind: Kind) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of ordinary torch on one device, on the rows in the keyed order."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = [place for epoch in range(2) for place in sample_order(0, epoch, 0, SIZE, SIZE).tolist()]
    cuts = [(0, 6), (6, 12), (12, 14), (14, 20), (20, 26), (26, 28)]
    losses = []
    for a, b in cuts[:STEPS]:
        optimizer.zero_grad()
        loss = kind.call(model, (kind.collate or stacked)([kind.sample(i) for i in order[a:b]]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(kind: Kind, plan: Plan) -> list[tuple[list[float], dict[str, Tensor], list[str]]]:
    """What each rank finds."""
    samples = [kind.sample(i) for i in range(3)]
    example = fields_of((kind.collate or stacked)(samples))
    compiled = Compiled(model_of(kind), plan, example, kind.loss)

    def rank(comm: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor], list[str]]:
        choice = OptimizerChoice("sgd", lr=0.1, momentum=0.9)
        trainer = Trainer(compiled, choice, plan, example, comm=comm)
        with trainer.loader(Dataset(kind.sample), ROWS, collate_fn=kind.collate) as loader:
            losses = [float(trainer.step(batch).loss) for batch in islice(loader, STEPS)]
        return losses, trainer.state_dict(), trainer.notes

    return run_ranks(plan.mesh, rank, timeout=120)


@pytest.mark.quick(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_one_device(kind: str, plan: str) -> None:
    if kind in WHOLE and plan in ("zero 3", "pp", "tp"):
        pytest.skip("a model that is one unit")
    losses, weights = plain(KINDS[kind])
    for found, state, _ in trained(KINDS[kind], PLANS[plan](Plan.of(precision="fp64"))):
        assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
