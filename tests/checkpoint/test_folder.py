"""What stays: retention, steps saved again, a full disk, a process killed at any moment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_of_checkpoints import flat_pieces, same, save, state, whole

import shardwise.checkpoint.container as container
import shardwise.checkpoint.folder as folders
import shardwise.checkpoint.staging as staging
from shardwise.checkpoint.folder import all_complete
from shardwise.checkpoint.reader import Checkpoint, checkpoints, latest
from shardwise.checkpoint.writer import CheckpointWriter
from shardwise.core.errors import ConfigError


def steps(folder: Path) -> list[int]:
    return [Checkpoint.open(path).step for path in checkpoints(folder)]


def save_one(folder: Path, step: int, value: float = 0.0, **options: int) -> str | None:
    return save(folder, step, [[whole("x", torch.full((3,), value or step))]], **options)[0].error


def test_the_newest_and_every_so_many_stay(tmp_path: Path) -> None:
    for step in range(1, 12):
        assert save_one(tmp_path, step, keep_last=2, keep_every=5) is None
    assert steps(tmp_path) == [5, 10, 11]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000005", "step_00000010", "step_00000011"]
    assert save_one(tmp_path, 20, keep_last=1) is None
    assert steps(tmp_path) == [20]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        assert save_one(tmp_path, step, keep_last=3) is None
    assert save_one(tmp_path, 12, keep_last=1) is None
    assert steps(tmp_path) == [12, 20, 30], "10 is older than the newest up to 12; later ones are not ours to remove"


def test_a_step_saved_again_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (1.0, 2.0, 3.0):
        assert save_one(tmp_path, 7, value) is None
        assert len(all_complete(tmp_path)) == 1 and steps(tmp_path) == [7]
        assert Checkpoint.open(checkpoints(tmp_path)[0]).read("x")[0] == value
    assert checkpoints(tmp_path)[0].name == "step_00000007_3"

    def fail(paths: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders, "remove", fail)  # as if killed before the old one went
    warned: list[str] = []
    assert save(tmp_path, 7, [[whole("x", torch.full((3,), 4.0))]], warned=warned)[0].error is None
    assert len(all_complete(tmp_path)) == 2 and "Permission denied" in warned[0]
    found = latest(tmp_path)
    assert found is not None and Checkpoint.open(found).read("x")[0] == 4 and checkpoints(tmp_path) == [found]


@pytest.mark.parametrize("call", ["write", "fsync", "open", "rename"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_full_disk_keeps_the_last_one_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, ranks: int
) -> None:
    tensors = state(1)
    assert save(tmp_path, 1, [flat_pieces(tensors, rank, ranks) for rank in range(ranks)])[0].error is None
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*arguments: object, **options: object) -> int:
        if call == "open" and not int(str(arguments[1])) & os.O_WRONLY:
            return open_file(*arguments, **options)  # type: ignore[arg-type]  # reading and removing go on
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    open_file = os.open
    warned: list[str] = []
    with monkeypatch.context() as patch:
        if call == "rename":
            patch.setattr(Path, "rename", full)
        else:
            patch.setattr(container.os, call, full)
        for bound in (None, 256):
            pieces = [flat_pieces(tensors, rank, ranks) for rank in range(ranks)]
            saved = save(tmp_path, 2, pieces, warned=warned, staging_bytes=bound)
            assert len({one.error for one in saved}) == 1 and "No space left" in str(saved[0].error)
            assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert len(warned) == 2 and "step_00000001" in warned[0] and "No space left" in warned[0]
    Checkpoint.open(tmp_path / "step_00000001").verify()
    assert save(tmp_path, 3, [flat_pieces(tensors, rank, ranks) for rank in range(ranks)])[0].error is None
    assert all(same(Checkpoint.open(tmp_path / "step_00000003").read(name), one) for name, one in tensors.items())


def test_room_is_looked_at_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(container, "HashedFile", pytest.fail)
    saved = save(tmp_path, 2, [[whole("x", torch.ones(3))], []])
    assert saved[1].error == "no space left: it needs 1,048,588 bytes, 1,000 are free"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    writer = CheckpointWriter(small_disk / "checkpoints", 0, 1, warn=warned.append)
    large, small = [whole("x", torch.ones(700_000))], [whole("x", torch.ones(100))]
    writer.save(1, large, {})
    writer.save(2, large, {})  # the look at the free space refuses it
    writer.wait()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**12}))
    writer.save(3, large, {})  # without it the disk does
    writer.save(4, small, {})
    writer.wait()
    ends = writer.poll()
    assert [one.error is None for one in ends] == [True, False, False, True]
    assert "no space left: it needs" in str(ends[1].error) and "No space left on device" in str(ends[2].error)
    assert steps(small_disk / "checkpoints") == [1, 4] and len(warned) == 2
    for path in checkpoints(small_disk / "checkpoints"):
        Checkpoint.open(path).verify()
    writer.close()


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options in ({"keep_last": 0}, {"keep_every": 0}, {"staging_bytes": 100}):
        with pytest.raises(ConfigError, match=f"checkpoint.{next(iter(options))}"):
            CheckpointWriter(tmp_path, 0, 1, warn=print, **options)


@pytest.mark.slow
@pytest.mark.fresh
@pytest.mark.parametrize("kills", [12, pytest.param(30, marks=pytest.mark.full)])
def test_killed_at_any_moment_the_last_complete_one_loads(kills: int, tmp_path: Path) -> None:
    """Processes of two ranks, each killed while it saves in a loop; the values of a checkpoint are its step
    everywhere.
    """
    script = Path(__file__).with_name("killed.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoints"), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line.split(": ") for line in done.stdout.splitlines())
    assert int(found["kills"]) == kills and int(found["steps"]) > kills, found
    assert int(found["leftovers"]) >= kills // 6, f"most kills should hit a save: {found}"


@pytest.mark.parametrize("bound", [None, 256])
def test_values_that_cannot_be_copied_make_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int | None
) -> None:
    copies, copy = [0], staging._copy

    def fail(*arguments: Any) -> None:
        copies[0] += 1
        if copies[0] > 2:
            raise RuntimeError("device lost")
        copy(*arguments)

    monkeypatch.setattr(staging, "_copy", fail)
    pieces = [whole("x", torch.ones(700)), whole("y", torch.ones(5, 4).t()), whole("z", torch.ones(9))]
    warned: list[str] = []
    saved = save(tmp_path, 1, [pieces, []], warned=warned, staging_bytes=bound)
    assert len({one.error for one in saved}) == 1 and saved[0].path is None and not list(tmp_path.iterdir())
    assert len(warned) == 1 and ("device lost" in warned[0] or "not staged to the end" in warned[0])
