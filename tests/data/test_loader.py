"""Batches: the same rows for any mesh, every row once an epoch, and what a dataset may not yield."""

import gc
import json
import random
import threading
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows, shard_range
from shardwise.core.mesh import Mesh
from shardwise.data.loader import Batch, Loader, one_pass
from shardwise.data.mixture import Mixture
from shardwise.data.order import sample_order
from shardwise.data.windows import PackedWindows

ONE = Mesh.of(dp=1)


class Renamed(dict[str, Any]):
    """A container of another type."""


class Numbers:
    """Sample i is {"x": [i, 10 i], "y": i}."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"x": torch.tensor([index, 10 * index]), "y": index}


def batches(
    count: int, size: int, mesh: Mesh, rank: int, batch_size: int, microbatches: int, seed: int = 5
) -> list[Batch]:
    with Loader(Numbers(size), mesh, rank, batch_size, microbatches, seed) as loader:
        return list(islice(loader, count))


def rows_of(batch: Batch) -> list[int]:
    rows = batch.fields["x"][:, 0].tolist()
    assert batch.fields["x"][:, 1].tolist() == [10 * row for row in rows]
    assert batch.fields["y"].tolist() == rows
    return rows


def test_one_rank_follows_the_order() -> None:
    got = batches(5, 10, ONE, 0, 4, 1)
    first, second = (sample_order(5, epoch, 0, 10, 10).tolist() for epoch in (0, 1))
    assert [rows_of(batch) for batch in got] == [first[:4], first[4:8], first[8:], second[:4], second[4:8]]
    assert [batch.rows for batch in got] == [4, 4, 2, 4, 4]
    assert first != second


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_any_mesh_gives_the_same_batches(size: int, batch_size: int, microbatches: int, dp: int, tp: int) -> None:
    mesh = Mesh.of(pp=1, dp=dp, tp=tp)
    steps = 4
    alone = batches(steps, size, ONE, 0, batch_size, 1)
    ranks = [batches(steps, size, mesh, rank, batch_size, microbatches) for rank in range(mesh.size)]
    for step in range(steps):
        whole = rows_of(alone[step])
        for rank, mine in enumerate(ranks):
            batch, part = mine[step], mesh.coordinates(rank)["dp"]
            expected = []
            for m in range(microbatches):
                a, b = shard_range(len(whole), microbatches, m)
                c, d = shard_range(b - a, dp, part)
                expected += whole[a:b][c:d]
                assert (batch.starts[m], batch.counts[m]) == (a + c, d - c)
            assert rows_of(batch) == expected
            assert batch.rows == len(whole)
        places = sorted(
            row for rank, mine in enumerate(ranks) if mesh.coordinates(rank)["tp"] == 0 for row in rows_of(mine[step])
        )
        assert places == sorted(whole)


def test_a_mesh_without_dp_has_all_rows_on_every_rank() -> None:
    got = [rows_of(batches(1, 10, Mesh.of(tp=2), rank, 4, 2)[0]) for rank in range(2)]
    assert got[0] == got[1] == sample_order(5, 0, 0, 4, 10).tolist()


def test_rank_rows() -> None:
    assert rank_rows(7, 2, 2, 0) == ((0, 1), (3, 5))
    assert rank_rows(7, 2, 2, 1) == ((1, 3), (5, 7))


def test_no_rows_still_have_their_shape() -> None:
    batch = batches(1, 1, Mesh.of(dp=3), 0, 6, 2)[0]
    assert (batch.rows, batch.counts) == (1, (0, 0))
    assert batch.fields["x"].shape == (0, 2)
    assert batch.fields["x"].dtype == torch.int64
    assert batch.fields["y"].shape == (0,)
    assert sum(batches(1, 1, Mesh.of(dp=3), rank, 6, 2)[0].counts[1] for rank in range(3)) == 1


def test_state_is_that_of_the_batches_handed_out() -> None:
    with Loader(Numbers(10), ONE, 0, 4, seed=5) as loader:
        assert loader.state == (0, 0)
        states, seen = [], []
        for batch in islice(loader, 7):
            time.sleep(0.01)  # let the thread run ahead
            states.append(loader.state)
            seen.append(rows_of(batch))
        assert states == [(0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0), (2, 4)]
        loader.state = states[1]
        assert loader.state == (0, 8)
        assert [rows_of(batch) for batch in islice(loader, 4)] == seen[2:6]
    other = Loader(Numbers(10), Mesh.of(dp=2), 1, 2, seed=5)  # from here on with another mesh and batch size
    other.state = (1, 4)
    assert rows_of(next(other)) == sample_order(5, 1, 5, 6, 10).tolist()
    other.state = (3, 10)
    assert other.state == (4, 0)
    with pytest.raises(ConfigError, match="epoch"):
        other.state = (-1, 0)
    other.close()


def test_seed_changes_the_batches() -> None:
    assert rows_of(batches(1, 100, ONE, 0, 10, 1, seed=1)[0]) != rows_of(batches(1, 100, ONE, 0, 10, 1, seed=2)[0])


def loader_threads() -> int:
    return sum(thread.name == "shardwise-loader" for thread in threading.enumerate())


def test_the_thread_reads_ahead_a_little_and_ends() -> None:
    class Counted(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            Counted.reads += 1
            return super().__getitem__(index)

    assert loader_threads() == 0
    loader = Loader(Counted(1000), ONE, 0, 4)
    assert loader_threads() == 0
    next(loader)
    time.sleep(0.3)
    assert loader_threads() == 1
    assert 1 + 8 <= Counted.reads <= 1 + 16  # the example, the batch, two in the queue and one in the thread's hands
    loader.close()
    assert loader_threads() == 0
    next(loader)
    del loader
    gc.collect()
    assert loader_threads() == 0


def test_exceptions_of_the_dataset_are_passed_on_and_the_thread_ends() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == sample_order(5, 0, 9, 10, 20)[0]:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    loader = Loader(Broken(20), ONE, 0, 4, seed=5)
    assert [next(loader).rows, next(loader).rows] == [4, 4]
    with pytest.raises(OSError, match="disk on fire") as caught:
        next(loader)
    assert f"sample {sample_order(5, 0, 9, 10, 20)[0]}" in caught.value.__notes__[0]
    assert loader.state == (0, 8)
    assert loader_threads() == 0


class Odd(Numbers):
    """All samples but one are as they should be."""

    def __init__(self, odd: Any, at: int = 7) -> None:
        super().__init__(12)
        self.odd, self.at = odd, at

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == self.at else {"x": torch.zeros(3), "y": 1}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"x": torch.zeros(4), "y": 1}, ["sample 7", '"x"', "shape (4,)", "expected (3,)"]),
        ({"x": torch.zeros(3, 1), "y": 1}, ["sample 7", '"x"', "shape (3, 1)", "expected (3,)"]),
        ({"x": torch.zeros(3).double(), "y": 1}, ["sample 7", '"x"', "float64", "expected torch.float32"]),
        ({"x": torch.zeros(3), "y": 1.5}, ["sample 7", '"y"', "float32", "expected torch.int64"]),
        ({"x": torch.zeros(3)}, ["sample 7", 'no field "y"']),
        ({"x": torch.zeros(3), "y": 1, "mask": 1}, ["sample 7", '"mask"', "x, y"]),
        ({"x": torch.zeros(3), "y": 1, "yy": 1}, ["sample 7", '"yy"', 'Did you mean "y"?']),
        ({"x": [0.0, 0.0, 0.0], "y": 1}, ["sample 7", '"x"', "a container", "a single value, as in sample 0"]),
        ({"x": "text", "y": 1}, ["sample 7", '"x"', "an object, expected a tensor"]),
        ({"x": None, "y": 1}, ["sample 7", '"x"', "an object, expected a tensor"]),
        ({"x": np.array([object()] * 3), "y": 1}, ["sample 7", '"x"', "no tensor"]),
        ({"x": torch.zeros(3), "y": 2**70}, ["sample 7", '"y"', "no tensor"]),
        ({"x": torch.zeros(3), 3: 1}, ["sample 7", '"3"', "x, y"]),
        ((torch.zeros(3), 1), ["sample 7", '"0"', "x, y"]),
        (torch.zeros(3), ["sample 7", '"batch"', "x, y"]),
        (None, ["sample 7", "a NoneType", "legal: a dict, a tuple or a dataclass with tensors"]),
        (Renamed(x=torch.zeros(3), y=1), ["sample 7", "containers of other types"]),
        ({}, ["sample 7", "an empty dict"]),
    ],
)
def test_samples_that_differ_are_named(odd: Any, words: list[str]) -> None:
    with Loader(Odd(odd), ONE, 0, 4) as loader, pytest.raises(ConfigError) as caught:
        list(islice(loader, 3))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with Loader(Odd({"x": torch.ones(3), "y": 0}), ONE, 0, 4) as loader:
        assert sum(batch.rows for batch in islice(loader, 3)) == 12


def test_a_rank_without_the_bad_sample_does_not_see_it() -> None:
    order = sample_order(0, 0, 0, 12, 12).tolist()
    bad = Odd({"x": torch.zeros(4), "y": 1}, at=order[3])
    with Loader(bad, Mesh.of(dp=2), 0, 4) as loader:
        assert next(loader).counts == (2,)
    with Loader(bad, Mesh.of(dp=2), 1, 4) as loader, pytest.raises(ConfigError, match=f"sample {order[3]},"):
        next(loader)


def test_numbers_and_arrays_become_tensors() -> None:
    class Mixed(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {
                "f": 0.5,
                "i": index,
                "b": True,
                "a": np.arange(3, dtype=np.int16),
                "s": np.float64(2.5),
                "t": torch.ones(2, requires_grad=True),
            }

    with Loader(Mixed(4), ONE, 0, 2) as loader:
        fields = next(loader).fields
        assert {name: (tuple(value.shape), value.dtype) for name, value in fields.items()} == {
            "f": ((2,), torch.float32),
            "i": ((2,), torch.int64),
            "b": ((2,), torch.bool),
            "a": ((2, 3), torch.int16),
            "s": ((2,), torch.float64),
            "t": ((2, 2), torch.float32),
        }
        assert not fields["t"].requires_grad
        assert loader.example["a"].tolist() == [0, 1, 2]
        assert loader.samples == 4


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Numbers(0), ["empty", "Numbers"]),
        (iter([1, 2]), ["len(dataset)", "list_iterator"]),
        ({1, 2}, ["dataset[index]", "set"]),
        (["a", "b"], ["sample 0 is a str", "a dict, a tuple or a dataclass with tensors"]),
        ([{}], ["sample 0 is an empty dict"]),
        ([{"x": "a"}], ["sample 0", "without any tensor"]),
    ],
)
def test_bad_datasets_are_refused_at_once(dataset: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(dataset, ONE, 0, 4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (-1, 1)])
def test_bad_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Loader(Numbers(3), ONE, 0, *sizes)


# --- position ---


def stream(loader: Loader, batches: int) -> list[list[int]]:
    return [rows_of(batch) for batch in islice(loader, batches)]


@pytest.mark.slow
def test_a_run_cut_anywhere_goes_on_with_the_next_sample_on_any_number_of_ranks() -> None:
    """Twenty runs, each cut a few times, every time with other ranks, batch sizes and microbatches."""
    dice, size, length = random.Random(1), 101, 400
    numbers = Numbers(size)
    whole = [row for epoch in range(5) for row in sample_order(9, epoch, 0, size, size).tolist()]
    for _ in range(20):
        seen: list[int] = []
        state: dict[str, Any] | None = None
        while len(seen) < length:
            dp, batch_size, microbatches = dice.randint(1, 4), dice.randint(1, 30), dice.randint(1, 3)
            steps = dice.randint(1, 6)
            loaders = [Loader(numbers, Mesh.of(dp=dp), rank, batch_size, microbatches, 9) for rank in range(dp)]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
            for _ in range(steps):
                batches = [next(loader) for loader in loaders]
                found: dict[int, int] = {}
                for batch in batches:
                    rows = iter(rows_of(batch))
                    for start, count in zip(batch.starts, batch.counts, strict=True):
                        found |= {start + place: next(rows) for place in range(count)}
                assert sorted(found) == list(range(batches[0].rows))
                seen += [found[place] for place in sorted(found)]
            states = [loader.state_dict() for loader in loaders]
            assert all(one == states[0] for one in states)
            state = states[0]
            for loader in loaders:
                loader.close()
        assert seen == whole[: len(seen)]  # no gap, no repeat


def test_a_state_of_other_data_is_refused() -> None:
    def windows(digest: str, size: int = 50) -> PackedWindows:
        return PackedWindows(np.arange(2 * size + 1, dtype=np.uint8), 2, digest=digest)

    state = Loader(windows("a"), ONE, 0, 4, seed=5).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert (state["epoch"], state["rows"], state["seed"], state["size"]) == (0, 0, 5, 50)
    Loader(windows("a"), Mesh.of(dp=2), 1, 7, seed=5).load_state_dict(state)
    others = [
        (windows("b"), 5, "digest"),
        (windows("a", 49), 5, "it had samples 50, here 49"),
        (windows("a"), 6, "train.seed 5, here 6"),
        (Mixture([windows("a")], [1]), 5, "digest"),
        (Numbers(50), 5, "digest"),
    ]
    for dataset, seed, words in others:
        with pytest.raises(ConfigError, match="the data is not the data of the checkpoint") as caught:
            Loader(dataset, ONE, 0, 4, seed=seed).load_state_dict(state)
        assert words in str(caught.value)
    for broken in ({}, {**state, "more": 1}, {**state, "epoch": -1}, {**state, "rows": "x"}, None):
        with pytest.raises(ConfigError, match="loader state"):
            Loader(windows("a"), ONE, 0, 4, seed=5).load_state_dict(broken)  # type: ignore[arg-type]


def test_the_digest_of_a_plain_dataset() -> None:
    digests = [
        Loader(data, ONE, 0, 4).state_dict()["digest"]
        for data in (Numbers(5), Numbers(5), Numbers(6), Odd(1), [{"x": 1}])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


# --- one pass ---


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 4), st.none() | st.integers(1, 6))
def test_one_pass_in_order(size: int, batch_size: int, microbatches: int, dp: int, limit: int | None) -> None:
    passes = [
        list(one_pass(Numbers(size), Mesh.of(dp=dp), rank, batch_size, microbatches, batches=limit))
        for rank in range(dp)
    ]
    total = size if limit is None else min(size, limit * batch_size)
    assert {len(one) for one in passes} == {-(-total // batch_size)}
    seen = []
    for step in range(len(passes[0])):
        batches = [one[step] for one in passes]
        rows = {batch.rows for batch in batches}
        assert rows == {min(batch_size, total - step * batch_size)}
        seen += sorted(row for batch in batches for row in rows_of(batch))
        assert sum(sum(batch.counts) for batch in batches) == batches[0].rows
    assert seen == [place * size // total for place in range(total)]
    assert len(set(seen)) == total
    if total == size:
        assert seen == list(range(size))


# --- page-locked memory ---


@pytest.mark.parametrize("pin", [False, True])
def test_pinned_in_the_thread(monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    pinned: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with Loader(Numbers(10), ONE, 0, 4, pin=pin) as loader:
        next(loader)
    assert set(pinned) == ({"shardwise-loader"} if pin else set())
    pinned.clear()
    with Loader(Numbers(10), ONE, 0, 4) as loader:
        next(loader)
    assert not pinned
