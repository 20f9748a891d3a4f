"""Whole batches that every rank reads: those of one device, in its order, also after a resume."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.core.mesh import Mesh
from shardwise.data.encoded import decoded, encoded
from shardwise.data.loader import Batch
from shardwise.data.stream_loader import AnyLoader, open_loader, open_pass
from shardwise.data.streams import samples_of

SIZE, ROWS = 11, 4
X = torch.zeros(4, 2)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), index * 10.0]), index


class Noisy(Pairs):
    """It draws from all three generators, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) + random.random() + float(np.random.rand())  # noqa: NPY002
        return torch.tensor([float(index), index * 10.0]) + noise, index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Pairs()[index] for index in range(SIZE))


class Stateful(Stream):
    """It keeps its own position, as torchdata's and Hugging Face's do, and counts what has been read."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SIZE:
            self.at, self.read = self.at + 1, self.read + 1
            yield Pairs()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at), 1: (b"x", [None, 0.5])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[1] == (b"x", [None, 0.5])
        self.at = int(state["at"])


def seeded(number: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def as_it_is(batch: Any) -> Any:
    return batch


def drawn_twice(samples: list[Any]) -> Any:
    """A collator that draws, as those that mask tokens do."""
    return torch.stack([one[0] for one in samples]) + torch.rand(2), torch.tensor([one[1] for one in samples])


SOURCES: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Pairs(), ROWS),
    "shuffled": lambda: DataLoader(Pairs(), ROWS, shuffle=True),
    "its own generator": lambda: DataLoader(Pairs(), ROWS, shuffle=True, generator=seeded()),
    "weighted": lambda: DataLoader(
        Pairs(), ROWS, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], 9, generator=seeded(5))
    ),
    "batch sampler": lambda: DataLoader(
        Pairs(), batch_sampler=BatchSampler(RandomSampler(Pairs(), generator=seeded()), 3, drop_last=True)
    ),
    "workers": lambda: DataLoader(Noisy(), ROWS, shuffle=True, num_workers=2),
    "random samples": lambda: DataLoader(Noisy(), ROWS, shuffle=True, drop_last=True),
    "collated": lambda: DataLoader(Pairs(), ROWS, shuffle=True, collate_fn=drawn_twice),
    "not collated": lambda: DataLoader([(X + i, torch.arange(4) + i) for i in range(6)], batch_size=None),
    "iterable in a loader": lambda: DataLoader(Stream(), ROWS),
    "iterable": Stream,
    "with a state": Stateful,
}  # fmt: skip


def opened(data: Any, mesh: Mesh | None = None, rank: int = 0, microbatches: int = 1, **more: Any) -> AnyLoader:
    return open_loader(data, mesh or Mesh.of(dp=1), rank, ROWS, microbatches, 7, **more)


def taken(loader: AnyLoader, number: int) -> list[Batch]:
    return list(islice(loader, number))


def rows_of(batches: list[Batch]) -> list[list[list[float]]]:
    return [[*batch.fields["0"].tolist(), batch.fields["1"].tolist()] for batch in batches]


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", SOURCES)
def test_ranks_have_the_parts_of_the_batches_of_one_device(name: str) -> None:
    before = random.getstate()[1][0], np.random.rand(), torch.rand(())  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected_draws = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    del before
    one = taken(opened(SOURCES[name]()), 7)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected_draws  # noqa: NPY002
    mesh = Mesh.of(dp=2, tp=2)
    for rank in range(4):
        mine = taken(opened(SOURCES[name](), mesh, rank, 2), 7)
        for whole, part in zip(one, mine, strict=True):
            assert part.rows == whole.rows
            places = [place for a, n in zip(part.starts, part.counts, strict=True) for place in range(a, a + n)]
            for field, value in whole.fields.items():
                assert has_rows(field)
                assert torch.equal(part.fields[field], value[places])


def test_a_loader_with_a_generator_of_its_own_gives_what_it_gives_alone() -> None:
    for name in ("in order", "its own generator", "weighted", "batch sampler", "iterable in a loader"):
        plain = SOURCES[name]()
        expected = [batch for _ in range(3) for batch in plain][:7]
        for ours, (x, y) in zip(taken(opened(SOURCES[name]()), 7), expected, strict=True):
            assert torch.equal(ours.fields["0"], x) and torch.equal(ours.fields["1"], y)


def test_epochs_differ_and_seeds_decide() -> None:
    found = rows_of(taken(opened(SOURCES["shuffled"]()), 6))
    assert found[:3] != found[3:]
    other = open_loader(SOURCES["shuffled"](), Mesh.of(dp=1), 0, ROWS, 1, 8)
    assert rows_of(taken(other, 3)) != found[:3]


@pytest.mark.quick(6)
@pytest.mark.parametrize("at", [0, 2, 3, 5])
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_read_after_a_resume(name: str, at: int) -> None:
    whole = rows_of(taken(opened(SOURCES[name]()), 9))
    first = opened(SOURCES[name]())
    taken(first, at)
    state = json.loads(json.dumps(first.state_dict()))
    again = opened(SOURCES[name]())
    again.load_state_dict(state)
    assert rows_of(taken(again, 9 - at)) == whole[at:]
    assert again.state_dict()["epoch"] == taken_state(name, 9)


def taken_state(name: str, number: int) -> int:
    loader = opened(SOURCES[name]())
    taken(loader, number)
    return int(loader.state_dict()["epoch"])


def test_only_without_a_state_of_its_own_is_read_again_what_came_before() -> None:
    data = Stateful()
    first = opened(data)
    taken(first, 2)
    again = Stateful()
    loader = opened(again)
    loader.load_state_dict(json.loads(json.dumps(first.state_dict())))
    taken(loader, 1)
    assert again.read == SIZE - 2 * ROWS
    assert "resumes by its own state_dict, and whether" in loader.notes[0]
    assert "resumes by reading again what came before" in opened(Stream()).notes[0]
    assert opened(Pairs(), collate=drawn_twice).notes == []


def test_a_collator_of_a_map_style_dataset_resumes_without_reading() -> None:
    read: list[int] = []

    class Counting(Pairs):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    whole = rows_of(taken(opened(Pairs(), collate=drawn_twice), 9))
    first = opened(Pairs(), collate=drawn_twice)
    taken(first, 5)
    again = opened(Counting(), collate=drawn_twice)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(read) == ROWS  # the last batch before, which is compared
    assert rows_of(taken(again, 4)) == whole[5:]


class Drifting(IterableDataset[Any]):
    """Its order follows from nothing that is kept: another one each time."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def __iter__(self) -> Iterator[Any]:
        return (Pairs()[(index * 3 + self.salt) % SIZE] for index in range(SIZE))


def test_another_order_after_a_resume_is_seen() -> None:
    first = opened(Drifting(0))
    taken(first, 2)
    with pytest.raises(ConfigError, match="a Drifting gave other batches when the checkpoint was written"):
        opened(Drifting(1)).load_state_dict(first.state_dict())
    short = opened(DataLoader([Pairs()[i] for i in range(4)], ROWS))
    with pytest.raises(ConfigError, match="had more batches in this epoch"):
        short.load_state_dict(first.state_dict())


def test_states_of_other_data_are_refused() -> None:
    state = opened(Stream()).state_dict()
    with pytest.raises(ConfigError, match="it had no state"):
        opened(Stateful()).load_state_dict(state)
    with pytest.raises(ConfigError, match="it had a state"):
        opened(Stream()).load_state_dict({**state, "source": {"dict": []}})
    with pytest.raises(ConfigError, match="train.seed of its own"):
        opened(Stream()).load_state_dict({**state, "seed": 1})
    with pytest.raises(ConfigError, match="it had 2 generators"):
        opened(Stream()).load_state_dict({**state, "generators": [0, 0]})
    with pytest.raises(ConfigError, match="legal: a table of epoch, batches"):
        opened(Stream()).load_state_dict(opened(Pairs()).state_dict())
    with pytest.raises(ConfigError, match="legal: a table of epoch, rows"):
        opened(Pairs()).load_state_dict(state)


def test_what_can_be_read_once_says_so() -> None:
    loader = opened(Pairs()[index] for index in range(SIZE))
    assert len(taken(loader, 3)) == 3
    with pytest.raises(ConfigError, match="a generator has ended after 3 batches, and can be iterated once"):
        next(loader)
    with pytest.raises(ConfigError, match="a DataLoader gave no batch in epoch 0"):
        next(opened(DataLoader([], ROWS)))
    with pytest.raises(ConfigError, match="gave no batch in epoch 0"):
        next(opened(DataLoader(Pairs(), 100, drop_last=True)))


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        (DataLoader(Pairs(), ROWS), {"collate": drawn_twice}, "the collate_fn of the loader"),
        (DataLoader(Pairs(), sampler=DistributedSampler(Pairs(), 2, 0)), {}, "DistributedSampler of 2 ranks"),
        ({"x": 1}, {}, "a map-style dataset"),
        (3, {}, r"must support len\(dataset\)"),
        (torch.zeros(3).numpy().tolist()[:0], {}, "is empty"),
    ],
)
def test_refused_before_anything_is_read(data: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(data, **more)


class Changing(IterableDataset[Any]):
    """Batch after batch of one sample each, of which some are unlike the first."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"x": X, "s": 1}, {"x": X, "s": 1.0}, 'batch 1 of epoch 0: "s" is of type float; legal: of type int'),
        ({"x": X}, {"x": X.double()}, '"x" is a tensor of float64 with 2 dims, with rows; legal: a tensor of float32'),
        ({"x": X}, {"x": X[:, None]}, "with 3 dims, with rows; legal: a tensor of float32 with 2 dims"),
        ({"x": X, "s": "a"}, {"x": X, "s": None}, '"s" is of type NoneType; legal: of type str'),
        ({"x": X, "s": "a"}, {"x": X}, '"s" is not there; legal: of type str'),
        ({"x": X}, {"x": X, "s": "a"}, '"s" is of type str; legal: not there'),
        ({"x": X, "s": X.sum()}, {"x": X, "s": X}, '"s" is a tensor of float32 with 2 dims, with rows'),
        ({"x": X, "s": list("abcd")}, {"x": X, "s": "abcd"}, '"s" is of type str; legal: a list of an object for'),
        ({"x": X, "y": X}, OrderedDict(x=X, y=X), "its containers are of other types; legal: those of the first batch"),
    ],
)
def test_a_part_that_changes_between_batches_is_named(first: Any, second: Any, words: str) -> None:
    loader = opened(DataLoader(Changing(first, second), batch_size=None, collate_fn=as_it_is))
    next(loader)
    with pytest.raises(ConfigError) as caught:
        next(loader)
    assert words in str(caught.value)
    assert "as in the first batch" in str(caught.value) or "those of the first batch" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": X, "y": X[:3]}, '"y" has 3 rows, and "x" has 4; legal: 4 in each, or whole=("y",)'),
        ({"x": X[:0]}, "it has no rows; legal: a batch of one row or more"),
        ({"names": "abc", "n": 3}, "it has no tensor with rows (names: a str, n: an int)"),
        ({}, "it has no tensor with rows (nothing)"),
        ("text", "it is a str"),
        ({"x": X, "p": [X, X, X, X]}, '"p" is a list of 4, as many as there are rows'),
        ({"a.b": X, "a": {"b": X}}, 'two parts have the name "a.b"; legal: keys without dots'),
    ],
)
def test_batches_that_cannot_be_divided(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        next(opened(DataLoader(Changing(batch), batch_size=None)))
    assert words in str(caught.value)
    assert "batch 0 of epoch 0" in str(caught.value) or "keys without dots" in words


def test_what_has_no_rows_is_whole() -> None:
    batch = {"x": X, "anchors": torch.ones(9), "scale": 0.5, "names": list("abcd"), "tag": "t", "n": torch.tensor(2)}
    loader = opened(DataLoader(Changing(batch), batch_size=None), Mesh.of(dp=2), 1, whole=("anchors",))
    found: Any = next(loader).fields
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert shapes == {"x": (2, 2), "names": (2,), "whole anchors": (9,), "whole scale": (), "whole n": ()}
    assert [found.objects[number] for number in found["names"].tolist()] == ["c", "d"]
    assert dict(found.form.constants) == {"tag": "t"}
    with pytest.raises(ConfigError, match='no part "anchor" for whole.* Did you mean "anchors"'):
        next(opened(DataLoader(Changing(batch), batch_size=None), whole=("anchor",)))


def test_one_pass_is_the_same_each_time() -> None:
    loader = SOURCES["its own generator"]()
    first, again = (rows_of(list(open_pass(loader, Mesh.of(dp=1), 0, ROWS))) for _ in range(2))
    assert first == again and len(first) == 3
    assert len(list(open_pass(Stream(), Mesh.of(dp=1), 0, ROWS, batches=2))) == 2


def test_samples_of_an_epoch() -> None:
    assert samples_of(Pairs(), ROWS) == SIZE
    assert samples_of(DataLoader(Pairs(), ROWS, drop_last=True), ROWS) == 8
    with pytest.raises(ConfigError, match="train.epochs: a Stream has no length; legal: train.steps"):
        samples_of(Stream(), ROWS)


def test_states_as_json() -> None:
    state = {"a": [1, (2.5, None, True)], 3: b"\x00\xff", "t": torch.arange(4).reshape(2, 2), "e": torch.zeros(0)}
    state["n"] = np.array([[1.5, 2.0]], dtype=np.float32)
    found = decoded(json.loads(json.dumps(encoded(state))))
    assert found["a"] == state["a"] and found[3] == b"\x00\xff"
    assert torch.equal(found["t"], state["t"]) and found["e"].shape == (0,) and np.array_equal(found["n"], state["n"])
    with pytest.raises(ConfigError, match="state.x: object cannot be kept in a checkpoint"):
        encoded({"x": object()})


def test_all_of_a_batch_counts_in_its_checksum() -> None:
    from shardwise.data.checksum import checksum_of
    from shardwise.data.forming import fields_of

    batch: dict[str, Any] = {"x": X, "names": list("abcd"), "tag": "t", "scale": 0.5}
    ragged = [torch.zeros(i) for i in range(4)]
    others: list[dict[str, Any]] = [
        {"x": X + 1}, {"names": list("abce")}, {"tag": "u"}, {"scale": 0.6}, {"names": ragged},
        {"names": [one + 1 for one in ragged]},
    ]  # fmt: skip
    words = [checksum_of(fields_of({**batch, **one})) for one in [{}, *others]]
    assert len(set(words)) == len(words)
    assert checksum_of(fields_of(batch)) == words[0]
