"""Rows of different lengths are filled up to the longest of their batch."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.config import Hardware, load_config
from shardwise.config.build import Data, build_data
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.data.padding import Padded, Padding
from shardwise.data.stream_loader import open_loader
from shardwise.launch.subject import example_of


def test_rows_are_filled_at_their_end() -> None:
    samples = [
        {"ids": torch.tensor([3, 4]), "labels": torch.tensor([4, 5]), "weight": 0.5, "name": "a"},
        {"ids": torch.tensor([7, 8, 9]), "labels": torch.tensor([8, 9, 1]), "weight": 1.0, "name": "b"},
    ]
    found = Padding({"ids": 0, "labels": -100}, mask="attention_mask")(samples)
    assert found["ids"].tolist() == [[3, 4, 0], [7, 8, 9]]
    assert found["labels"].tolist() == [[4, 5, -100], [8, 9, 1]]
    assert found["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found["weight"].tolist() == [0.5, 1.0]
    assert found["name"] == ["a", "b"]
    assert found["ids"].dtype == found["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize(("multiple", "length"), [(1, 5), (4, 8), (5, 5), (8, 8)])
def test_sizes_are_rounded_up(multiple: int, length: int) -> None:
    found = Padding({"ids": 1}, multiple)([{"ids": [2] * 3}, {"ids": [2] * 5}])["ids"]
    assert found.tolist() == [[2] * 3 + [1] * (length - 3), [2] * 5 + [1] * (length - 5)]


def test_every_dim_of_a_picture_is_filled() -> None:
    small, large = np.ones((1, 2, 4), dtype=np.float32), np.ones((1, 3, 2), dtype=np.float32)
    found = Padding({"picture": 0.5})([{"picture": small}, {"picture": large}])["picture"]
    assert found.shape == (2, 1, 3, 4)
    assert found[0].tolist() == [[[1.0] * 4, [1.0] * 4, [0.5] * 4]]
    assert found[1].tolist() == [[[1.0, 1.0, 0.5, 0.5]] * 3]


@pytest.mark.parametrize(
    ("fill", "samples", "message"),
    [
        ({}, [{"a": [1]}], 'padding: no field to fill; legal: the fields with their numbers, as {"input_ids": 0}'),
        ({"a": 0}, [[1]], "padding: a sample is of type list; legal: dicts"),
        ({"b": 0}, [{"a": [1], "c": 2}], 'padding: sample 0 of a batch has no field "b"; legal: a, c'),
        ({"b": 0}, [{"b": [1]}, {"c": 2}], 'padding: sample 1 of a batch has no field "b"; legal: b'),
        ({"a": 0}, [{"a": [1]}, {"a": [[1]]}], 'padding: rows of "a" have shapes (1, 1) and (1,); legal: as many dims'),
        (
            {"a": 0},
            [{"a": 1}, {"a": 2}],
            'padding: rows of "a" have shapes (); legal: as many dims in each, at least one',
        ),
        (
            {"a": 0},
            [{"a": [1]}, {"a": [1.5]}],
            'padding: rows of "a" are torch.float32 and torch.int64; legal: one dtype',
        ),
        ({"a": 0.5}, [{"a": [1]}], 'padding: "a" is torch.int64, filled with 0.5; legal: a whole number'),
        ({"a": 0}, [()], "padding: a sample is of type tuple; legal: dicts"),
        (
            {"a": 0},
            [{"a": [1], "b": [1]}, {"a": [1], "b": [1, 2]}],
            'padding: rows of "b" have shapes (1,) and (2,); legal: one shape, or a number with which "b" is filled',
        ),
    ],
)
def test_what_cannot_be_filled_is_refused(fill: dict[str, float], samples: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Padding(fill)(samples)


def test_the_first_samples_are_checked() -> None:
    """Those of which an example is made before the first step."""
    for samples in ([{"b": [1]}], [([1], [2])]):
        with pytest.raises(ConfigError, match="padding: "):
            Padded(samples, Padding({"a": 0})).longest(2)


def test_a_mask_needs_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match='the samples have a field "mask" already'):
        Padding({"a": 0}, mask="mask")([{"a": [1], "mask": [1]}])
    with pytest.raises(ConfigError, match="pad_to_multiple_of: 0 is not legal"):
        Padding({"a": 0}, 0)


CODE = """
import torch
from torch.utils.data import DataLoader, IterableDataset

def rows(count=9):
    return [{"ids": list(range(1 + 3 * i % 7))} for i in range(count)]

def loader():
    return DataLoader(rows(), batch_size=4)

class Endless(IterableDataset):
    def __iter__(self):
        return iter(rows(100))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "ragged.py"
    path.write_text(CODE)
    return path


def loaded(code: Path, name: str, *more: str) -> Data:
    words = [f"data.factory={code}:{name}", "data.batch_size=4", *more]
    return build_data(load_config(None, words, hardware=Hardware(cores=1)))


def test_a_config_fills_rows(code: Path) -> None:
    data = loaded(code, "rows", "data.pad={ids = 7}", "data.pad_to_multiple_of=4", "validation.share=0.34")
    assert isinstance(data.train, Padded)
    assert isinstance(data.validation, Padded)
    with open_loader(data.train, Mesh.of(dp=1), 0, 3, 1, 0) as batches:
        shapes = {tuple(next(batches).fields["ids"].shape) for _ in range(4)}
    assert shapes <= {(3, 4), (3, 8)}


def test_the_example_is_the_longest_rows(code: Path) -> None:
    """Memory is predicted for it."""
    assert example_of(loaded(code, "rows", "data.pad={ids = 7}", "validation.share=0").train)["ids"].shape == (2, 7)


def test_an_iterable_dataset_is_filled_too(code: Path) -> None:
    data = loaded(code, "Endless", "data.pad={ids = 7}", "validation.share=0")
    with open_loader(data.train, Mesh.of(dp=1), 0, 3, 1, 0) as batches:
        assert next(batches).fields["ids"].tolist() == [[0, *[7] * 6], [0, 1, 2, 3, 7, 7, 7], [*range(7)]]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("loader", (), "data.pad of a DataLoader: it makes batches itself; legal: a dataset"),
        ("Endless", ("validation.share=0.5",), "validation.share = 0.5: of .*legal: validation.factory"),
    ],
)
def test_data_that_cannot_be_filled_is_refused(code: Path, name: str, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(code, name, "data.pad={ids = 7}", *more)
