"""Safetensors files as bytes: where values lie, and what a header may not say of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint.container import read_header, write_file
from shardwise.core.errors import ConfigError


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    """Odd numbers of narrow elements come behind the wide ones, whatever the order in which tensors are given."""
    values = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.arange(3).bfloat16(),
        "wide": torch.arange(5, dtype=torch.float64),
        "single": torch.arange(7).float(),
    }
    path = tmp_path / "values.safetensors"
    write_file(path, [(n, tuple(v.shape), v.dtype) for n, v in values.items()], values.__getitem__, {"made": "here"})
    entries, metadata = read_header(path)
    assert metadata == {"made": "here"} and set(entries) == set(values)
    assert all(one.start % one.dtype.itemsize == 0 for one in entries.values())
    assert all(torch.equal(value, values[name]) for name, value in load_file(path).items())


def written(path: Path, places: dict[str, tuple[int, int]], nbytes: int) -> Path:
    """A file of tensors of bytes at these places."""
    described = {key: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for key, (a, b) in places.items()}
    text = json.dumps(described).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return path


def test_values_follow_each_other_without_holes(tmp_path: Path) -> None:
    path = tmp_path / "values.safetensors"
    assert set(read_header(written(path, {"x": (0, 4), "y": (4, 9)}, 9))[0]) == {"x", "y"}
    for places, nbytes, words in (
        ({"x": (0, 4), "y": (6, 9)}, 9, "the values of 'y' begin at byte 6 instead of 4"),
        ({"x": (0, 4), "y": (2, 9)}, 9, "the values of 'y' begin at byte 2 instead of 4"),
        ({"x": (2, 4)}, 4, "the values of 'x' begin at byte 2 instead of 0"),
        ({"x": (0, 4)}, 6, "its header asks for"),
        ({"x": (0, 4)}, 3, "its header asks for"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            read_header(written(path, places, nbytes))
        assert str(caught.value).startswith(str(path))
