"""Mixtures: proportions at every prefix, and every sample once in each of its dataset's epochs."""

import hashlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.data.loader import Loader
from shardwise.data.mixture import Joined, Mixture, allocate
from shardwise.data.order import sample_order
from shardwise.data.windows import PackedWindows
from shardwise.data.worker import side

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


def part(samples: int, first: int) -> PackedWindows:
    """Sample i's first token is first + 2 i."""
    return PackedWindows(np.arange(first, first + 2 * samples + 1, dtype=np.uint32), 2, digest=str(first))


@settings(deadline=None, max_examples=60)
@given(WEIGHTS)
def test_every_prefix_has_its_proportions(weights: list[float]) -> None:
    sources, draws = allocate(np.arange(3000, dtype=np.int64), weights)
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, 3001)[:, None] * shares
    assert np.abs(counts - wanted).max() < 2
    for source in range(len(weights)):
        assert draws[sources == source].tolist() == list(range(int(counts[-1, source])))


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 10**15), st.integers(1, 50))
def test_any_place_is_found_by_itself(weights: list[float], start: int, count: int) -> None:
    places = np.arange(start, start + count, dtype=np.int64)
    together = allocate(places, weights)
    alone = [allocate(places[i : i + 1], weights) for i in range(count)]
    assert together[0].tolist() == [int(sources[0]) for sources, _ in alone]
    assert together[1].tolist() == [int(draws[0]) for _, draws in alone]
    assert (together[1] >= 0).all() and (together[1] <= places).all()


@pytest.mark.parametrize(
    ("sizes", "weights"), [((7, 20, 3), (0.5, 0.3, 0.2)), ((5, 5), (1, 9)), ((1, 50), (3, 1)), ((11,), (2,))]
)
def test_every_sample_once_in_its_own_epochs(sizes: tuple[int, ...], weights: tuple[float, ...]) -> None:
    mixture = Mixture([part(size, 1000 * n) for n, size in enumerate(sizes)], weights)
    epochs = 30
    order = np.concatenate([mixture.order_rows(4, epoch, 0, len(mixture)) for epoch in range(epochs)])
    owner = np.searchsorted(mixture.offsets, order, side="right") - 1
    for source, size in enumerate(sizes):
        mine = order[owner == source] - mixture.offsets[source]
        assert len(mine) == pytest.approx(len(order) * weights[source] / sum(weights), abs=2)
        passes = [mine[start : start + size].tolist() for start in range(0, len(mine) - size + 1, size)]
        assert len(passes) > 2
        assert all(sorted(one) == list(range(size)) for one in passes)
        if size > 4:
            assert passes[0] != passes[1]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**40), st.data())
def test_pieces_give_the_whole(epoch: int, data: st.DataObject) -> None:
    mixture = Mixture([part(9, 0), part(4, 100), part(17, 200)], [0.2, 0.5, 0.3])
    whole = mixture.order_rows(7, epoch, 0, 30)
    start = data.draw(st.integers(0, 30))
    stop = data.draw(st.integers(start, 30))
    assert np.array_equal(mixture.order_rows(7, epoch, start, stop), whole[start:stop])


def test_datasets_of_one_size_are_shuffled_apart() -> None:
    mixture = Mixture([part(50, 0), part(50, 1000)], [1, 1])
    order = mixture.order_rows(0, 0, 0, 100)
    assert (order[order < 50] != order[order >= 50] - 50).any()
    assert not np.array_equal(order, mixture.order_rows(1, 0, 0, 100))


def test_rows_come_from_their_dataset() -> None:
    joined = Joined([part(5, 0), part(3, 1000), part(4, 2000)])
    firsts = [0, 2, 4, 6, 8, 1000, 1002, 1004, 2000, 2002, 2004, 2006]
    assert len(joined) == 12
    assert joined.read_rows(np.arange(12))["input_ids"][:, 0].tolist() == firsts
    shuffled = np.random.default_rng(0).permutation(12)
    rows = joined.read_rows(shuffled)
    assert rows["input_ids"][:, 0].tolist() == [firsts[i] for i in shuffled]
    assert rows["labels"][:, 0].tolist() == [firsts[i] + 1 for i in shuffled]
    assert joined[6]["input_ids"].tolist() == [1002, 1003]
    assert joined.read_rows([])["input_ids"].shape == (0, 2)
    with pytest.raises(IndexError):
        joined[12]


def test_the_digest_tells_mixtures_apart() -> None:
    parts = [part(5, 0), part(3, 1000)]
    found = {
        Mixture(p, w).digest for p, w in [(parts, [1, 1]), (parts, [1, 2]), (parts[::-1], [1, 1]), (parts[:1], [1])]
    }
    assert len(found | {Joined(parts).digest}) == 5


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="data.mix"):
        Mixture([part(5, 0), part(3, 1000)], weights)


def test_the_loader_follows_the_mixture_on_any_mesh() -> None:
    mixture = Mixture([part(7, 0), part(20, 1000)], [0.7, 0.3])
    expected = [mixture.order_rows(3, epoch, 0, 27) for epoch in range(2)]
    wanted = mixture.read_rows(np.concatenate(expected))["input_ids"][:, 0].tolist()
    ranks = []
    for rank in range(2):
        with Loader(mixture, Mesh.of(dp=2), rank, 5, seed=3) as loader:
            ranks.append(list(islice(loader, 12)))
    found = [
        value
        for pair in zip(*ranks, strict=True)
        for batch in pair
        for value in batch.fields["input_ids"][:, 0].tolist()
    ]
    assert found == wanted
    assert torch.equal(ranks[0][0].fields["labels"], ranks[0][0].fields["input_ids"] + 1)
    assert sample_order(3, 0, 0, 27, 27).tolist() != expected[0].tolist()


def test_one_line_for_sources_without_validation(tmp_path: Path) -> None:
    from shardwise.config import Hardware, build_data, load_config

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(16):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 10)

    def notices(*overrides: str) -> tuple[str, ...]:
        shared = [f"data.cache_dir={tmp_path / 'cache'}", "data.sequence_length=16", *overrides]
        return build_data(load_config(None, shared, hardware=Hardware(cores=1))).notices

    end = "0 of 16 documents apart (validation.share = 1e-06)"
    assert notices(f"data.source={tmp_path}/a", "validation.share=0.000001") == (
        f"no validation on {tmp_path}/a: {end}",
    )
    mix = f'data.mix=[{{source = "{tmp_path}/a", weight = 1}}, {{source = "{tmp_path}/b", weight = 1}}]'
    (line,) = notices(mix, "validation.share=0.000001")
    assert line == f"no validation on {tmp_path}/a and 1 more: {end.replace('16', '32')}"


def test_a_document_of_two_sources_of_a_mixture_is_on_one_side(tmp_path: Path) -> None:
    from shardwise.config import Hardware, build_data, load_config

    numbers = [n for n in range(40) if side(hashlib.sha256(f"document {n}".encode()).digest(), 0.5)]
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    one = f"{tmp_path}/{numbers[0]}.txt"
    shared = [f"data.cache_dir={tmp_path / 'cache'}", "data.sequence_length=4", "validation.share=0.5"]

    def train(*overrides: str) -> int:
        return len(build_data(load_config(None, [*shared, *overrides], hardware=Hardware(cores=1))).train)

    with pytest.raises(ConfigError, match="validation.share = 0.5: it leaves 0 tokens"):
        train(f'data.mix=[{{source = "{tmp_path}/*.txt", weight = 1}}, {{source = "{one}", weight = 1}}]')
    assert train(f"data.source={one}") == 2
    assert train(f'data.mix=[{{source = "{one}", weight = 1}}]') > 0
