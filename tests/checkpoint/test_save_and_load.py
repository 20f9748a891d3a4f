"""Saved on n ranks, loaded on m: bit-equal, whatever the boxes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from saving_of_checkpoints import blank, cut_pieces, flat_pieces, load, on_ranks, same, save, state, whole

import shardwise.checkpoint.container as container
import shardwise.checkpoint.staging as staging
from shardwise.checkpoint.atoms import DTYPES, Gather, Piece
from shardwise.checkpoint.reader import Checkpoint, checkpoints, latest
from shardwise.checkpoint.writer import CheckpointWriter, Saved
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.layout import Box

META = {
    "data": {"epoch": 1, "position": 2**60},
    "config": "[model]\nname = 'gpt'\n",
    "rate": 0.1,
    "list": [1, None, True],
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("staging", [None, 256])
def test_saved_on_n_ranks_loaded_on_m(tmp_path: Path, n: int, m: int, staging: int | None) -> None:
    for seed, (split, other) in enumerate([(flat_pieces, cut_pieces), (cut_pieces, flat_pieces)]):
        tensors, found = state(seed), blank(state(seed))
        extra = {cut_pieces: (seed,), flat_pieces: ()}
        folder = tmp_path / str(seed)
        saved = save(
            folder, 5, [split(tensors, rank, n, *extra[split]) for rank in range(n)], META, staging_bytes=staging
        )
        assert {one.error for one in saved} == {None}
        assert {one.path for one in saved} == {folder / "step_00000005"} == {latest(folder)}
        load(folder / "step_00000005", [other(found, rank, m, *extra[other]) for rank in range(m)])
        assert all(same(found[name], tensors[name]) for name in tensors)
        opened = Checkpoint.open(folder / "step_00000005")
        assert (opened.step, dict(opened.meta)) == (5, META)
        assert all(same(opened.read(name), tensors[name]) for name in tensors)
        assert sum(one.nbytes for one in opened.manifest.files.values()) == saved[0].nbytes


def test_every_dtype_and_the_files_are_safetensors(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors = {
            "x": bits.view(dtype).reshape(2, 3),
            "scalar": bits[: dtype.itemsize].view(dtype)[0],
            "none": torch.empty(0, dtype=dtype),
        }
        folder = tmp_path / name
        assert save(folder, 0, [[whole(key, value) for key, value in tensors.items()]])[0].error is None
        opened = Checkpoint.open(folder / "step_00000000")
        assert all(same(opened.read(key), tensors[key]) for key in tensors)
        path = folder / "step_00000000" / "rank_00000.safetensors"
        with safe_open(path, framework="pt") as file:
            stored = {piece.key: key for key, one in opened.tensors.items() for piece in one.pieces}
            assert set(file.keys()) == set(stored) and len(stored) == 2
            assert all(same(file.get_tensor(key), tensors[stored[key]]) for key in file.keys())  # noqa: SIM118
        assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0


def test_neighbours_in_memory_and_strided_views_alike(tmp_path: Path) -> None:
    buffer = torch.randn(4096)
    pieces = [
        Piece("a", (64, 32), Box((row, 0), (row + 1, 32)), buffer[row * 32 : row * 32 + 32].view(1, 32))
        for row in range(64)
    ]
    pieces += [whole("t", buffer[2048:].view(32, 64).t()), whole("c", torch.randn(3, dtype=torch.complex64).conj())]
    for bound in (None, 256, 1000):
        folder = tmp_path / str(bound)
        assert save(folder, 1, [pieces], staging_bytes=bound)[0].error is None
        opened = Checkpoint.open(folder / "step_00000001")
        assert same(opened.read("a"), buffer[:2048].view(64, 32))
        assert same(opened.read("t"), pieces[64].tensor) and torch.equal(opened.read("c"), pieces[65].tensor)


@pytest.mark.parametrize("bound", [None, 256, 5000, 64 << 10])
def test_what_is_written_is_what_was_there_at_save_and_memory_is_bounded(tmp_path: Path, bound: int | None) -> None:
    tensors = {f"w{n}": torch.zeros(100, 37) for n in range(6)}
    nbytes = sum(one.nbytes for one in tensors.values())
    writer = CheckpointWriter(tmp_path, 0, 1, staging_bytes=bound, keep_last=9, warn=pytest.fail)
    pieces = [whole(name, one) for name, one in tensors.items()]
    ceiling = writer.ceiling(pieces)
    assert ceiling <= (bound or nbytes + 63) and ceiling >= min(bound or nbytes, nbytes) - 63
    for step in range(1, 6):
        for one in tensors.values():
            one.fill_(step)
        writer.save(step, pieces, {})
        for one in tensors.values():
            one.fill_(-1)  # training goes on
        assert writer.staged_bytes <= ceiling
    assert writer.staged_bytes == ceiling
    writer.close()
    assert [one.error for one in writer.poll()] == [None] * 5
    for step, path in enumerate(checkpoints(tmp_path), 1):
        assert all(bool((Checkpoint.open(path).read(name) == step).all()) for name in tensors)


def test_save_returns_before_the_disk_is_done_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, fsync = threading.Event(), container.os.fsync
    monkeypatch.setattr(container.os, "fsync", lambda fd: (gate.wait(30), fsync(fd)))
    writer = CheckpointWriter(tmp_path, 0, 1, warn=pytest.fail)
    piece = whole("x", torch.ones(1000))
    writer.save(1, [piece], {})
    assert writer.poll() == [] and latest(tmp_path) is None
    threading.Timer(0.3, gate.set).start()
    writer.save(2, [piece], {})
    writer.wait()
    saved = writer.poll()
    assert [(one.step, one.error) for one in saved] == [(1, None), (2, None)]
    assert saved[0].stall_seconds < 5 and saved[1].stall_seconds > 0.2, "the second has waited for the first one"
    assert writer.poll() == []
    writer.close()
    with pytest.raises(ShardwiseError, match="after close"):
        writer.save(3, [piece], {})


def test_prepare_takes_the_memory_once(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 0, 1, warn=pytest.fail)
    pieces = [whole("x", torch.ones(1000))]
    assert writer.prepare(pieces) == writer.ceiling(pieces) == writer.staged_bytes == 4032
    small = [whole("x", torch.ones(10))]
    writer.save(1, small, {})
    writer.wait()
    assert writer.staged_bytes == writer.ceiling(small) == 4032
    assert same(Checkpoint.open(tmp_path / "step_00000001").read("x"), torch.ones(10))


def test_ranks_without_pieces_write_no_file(tmp_path: Path) -> None:
    saved = save(tmp_path, 3, [[], [whole("x", torch.ones(3))], []])
    assert [one.error for one in saved] == [None] * 3
    names = sorted(path.name for path in (tmp_path / "step_00000003").iterdir())
    assert names == ["manifest.json", "rank_00001.safetensors"]
    nothing = save(tmp_path, 4, [[], []])
    assert nothing[0].error is None and not Checkpoint.open(tmp_path / "step_00000004").tensors


WRONG = {
    "overlap": ([[whole("x", torch.ones(4))], [Piece("x", (4,), Box((3,), (4,)), torch.ones(1))]], "overlap"),
    "gap": (
        [[Piece("x", (4,), Box((0,), (1,)), torch.ones(1))], [Piece("x", (4,), Box((2,), (4,)), torch.ones(2))]],
        "hold 3 of 4",
    ),
    "twice": ([[whole("x", torch.tensor(1.0))], [whole("x", torch.tensor(1.0))]], "overlap"),
    "dtype": (
        [
            [Piece("x", (2,), Box((0,), (1,)), torch.ones(1))],
            [Piece("x", (2,), Box((1,), (2,)), torch.ones(1).double())],
        ],
        "F64",
    ),
    "shape": (
        [[Piece("x", (2,), Box((0,), (2,)), torch.ones(2))], [Piece("x", (3,), Box((2,), (3,)), torch.ones(1))]],
        r"\[3\]",
    ),
    "outside": ([[], [Piece("x", (2,), Box((0,), (3,)), torch.ones(3))]], "rank 1: piece of 'x'.*outside"),
    "values": ([[], [Piece("x", (2,), Box((0,), (2,)), torch.ones(3))]], "rank 1: piece of 'x'.*values of shape"),
    "unknown dtype": (
        [[whole("x", torch.ones(2, dtype=torch.complex128))], []],
        "rank 0: a checkpoint cannot hold torch.complex128",
    ),
    "name": ([[whole("__metadata__", torch.ones(2))], []], "name is not legal"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_pieces_that_are_no_checkpoint_are_refused_on_all_ranks(tmp_path: Path, kind: str) -> None:
    pieces, words = WRONG[kind]
    assert save(tmp_path, 1, [[whole("x", torch.ones(2))], []])[0].error is None
    warned: list[str] = []
    saved = save(tmp_path, 2, pieces, warned=warned)
    assert saved[0].error == saved[1].error and saved[0].path is saved[1].path is None
    with pytest.raises(ShardwiseError, match=words):
        raise ShardwiseError(saved[0].error)
    assert len(warned) == 1 and "step_00000001" in warned[0], "rank 0 alone warns, and says what is left"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_what_all_ranks_get_does_not_grow_with_what_is_saved(tmp_path: Path) -> None:
    """Of the pieces of all ranks, which may be very many, rank 0 alone is told."""
    sizes: list[int] = []

    def work(rank: int, gather: Gather) -> Saved:
        def counted(data: bytes, everywhere: bool = True) -> list[bytes]:
            if everywhere:
                sizes.append(len(data))
            return gather(data, everywhere)

        writer = CheckpointWriter(tmp_path, rank, 2, counted, warn=pytest.fail)
        writer.save(1, [whole(f"model.{rank}.{number}", torch.ones(3)) for number in range(200)], {})
        writer.close()
        (saved,) = writer.poll()
        return saved

    first, second = on_ranks(2, work)
    assert first.error is None and (first.path, first.nbytes) == (second.path, second.nbytes)
    assert first.path is not None and first.nbytes == sum(one.stat().st_size for one in first.path.glob("rank_*"))
    assert len(sizes) == 4 and max(sizes) < 400


def test_staging_memory_is_made_of_blocks_of_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch pins it rounds up to one."""
    monkeypatch.setattr(staging, "BLOCK", 1024)
    made, empty = [], torch.empty

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args[0])
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", noted)
    one = staging.Staging(None)
    one.prepare(2 * 1024 + 70, pinned=False)
    assert made == [1024, 1024, 128] and one.nbytes == one.needed(0) == 2 * 1024 + 128
    one.prepare(1500, pinned=False)
    assert len(made) == 3  # it suffices
    assert [block.numel() for block in one.blocks(one.nbytes)] == [1024, 1024, 128]
    assert [block.numel() for block in one.blocks(one.nbytes + 1)] == [512] * 4 + [128]  # streamed: four or more
    one.prepare(4096, pinned=False)
    assert made[3:] == [1024] * 4 and one.nbytes == 4096


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": {1: 2}}, {"x": object()}, {"x": [{2: 1}]}])
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict[str, object]) -> None:
    assert "meta" in str(save(tmp_path, 1, [[]], meta)[0].error)
    assert latest(tmp_path) is None


def test_ranks_that_save_different_steps_are_refused(tmp_path: Path) -> None:
    def work(rank: int, gather: Gather) -> str | None:
        writer = CheckpointWriter(tmp_path, rank, 2, gather, warn=lambda _: None)
        writer.save(rank, [], {})
        writer.wait()
        return writer.poll()[0].error

    assert on_ranks(2, work) == ["rank 1 saves step 1, rank 0 step 0"] * 2


def test_a_rank_that_is_gone_ends_the_save_and_not_the_run(tmp_path: Path) -> None:
    def broken(data: bytes, everywhere: bool = True) -> list[bytes]:
        raise ConnectionError("peer closed")

    warned: list[str] = []
    writer = CheckpointWriter(tmp_path, 0, 2, broken, warn=warned.append)
    writer.save(1, [whole("x", torch.ones(3))], {})
    writer.wait()
    (saved,) = writer.poll()
    assert "peer closed" in str(saved.error) and len(warned) == 1
    assert not list(tmp_path.iterdir())
    # a failure while the values still stream: save must return
    writer = CheckpointWriter(tmp_path, 0, 2, broken, staging_bytes=256, warn=warned.append)
    begin = time.perf_counter()
    writer.save(1, [whole("x", torch.ones(3000))], {})
    writer.wait()
    assert time.perf_counter() - begin < 10 and writer.poll()[0].error


def test_loading_says_what_does_not_fit_before_it_copies(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4, 2), "b": torch.ones(3)}
    save(tmp_path, 1, [[whole(name, one) for name, one in tensors.items()]])
    opened = Checkpoint.open(tmp_path / "step_00000001")
    target = torch.zeros(4, 2)
    for wrong, words in [
        (whole("c", torch.zeros(3)), "holds no tensor 'c'"),
        (whole("b", torch.zeros(4)), r"'b' has the shape \[3\], not \[4\]"),
        (whole("b", torch.zeros(3).double()), "'b' is torch.float32, not torch.float64"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            opened.load([whole("a", target), wrong])
        assert str(opened.path) in str(caught.value) and not target.any()
    with pytest.raises(ShardwiseError, match="outside"):
        opened.load([whole("a", target), Piece("b", (3,), Box((2,), (4,)), torch.zeros(2))])
    assert not target.any()
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    opened.load([whole("a", parameter)])
    assert bool((parameter == 1).all())


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    save(tmp_path, 12, [[whole("x", torch.ones(2, 2))]], {"seed": 3})
    manifest = json.loads((tmp_path / "step_00000012" / "manifest.json").read_text())
    assert manifest["format"] == "shardwise-checkpoint" and manifest["version"] == 1 and manifest["meta"] == {"seed": 3}
    (piece,) = manifest["tensors"]["x"].pop("pieces")
    assert manifest["tensors"]["x"] == {"shape": [2, 2], "dtype": "F32"}
    assert piece == {"file": "rank_00000.safetensors", "key": "000000/x", "start": [0, 0], "stop": [2, 2]}
