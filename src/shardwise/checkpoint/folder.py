"""Checkpoints appear in the folder of a run, and disappear from it, atomically.

A checkpoint is complete exactly if it has its own name: it is written under a name that begins with a dot and ends with
``.part``, and renamed when every byte of it is on the disk.  It is removed the same way: renamed first, then deleted.
A step that is saved again gets the name ``step_00000100_2`` before the older checkpoint is removed, so at least one of
them is always there; where both are, the higher number counts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,18})(?:_([1-9]\d{0,8}))?", re.ASCII)
_PART = re.compile(r"\.step_.*\.part")


def rank_file(rank: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"rank_{rank:05d}.safetensors"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name, or None where the name is not that of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def _order(path: Path) -> tuple[int, int]:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


def all_complete(folder: Path) -> list[Path]:
    """Return all complete checkpoints, including replaced ones, oldest step first."""
    try:
        names = [Path(entry.path) for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    return sorted((path for path in names if os.path.lexists(path / MANIFEST)), key=_order)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of ``RUN_DIR/checkpoints``, oldest step first; none where it does not exist."""
    newest = {_order(path)[0]: path for path in all_complete(folder)}  # a later save of a step replaces the earlier one
    return list(newest.values())


def latest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def part_folder(folder: Path, step: int) -> Path:
    """Return the folder that holds a checkpoint of ``step`` while it is written."""
    return folder / f".step_{step:08d}.part"


def free_name(folder: Path, step: int) -> Path:
    """Return the path for a new checkpoint of ``step``, numbered after all existing ones of this step."""
    taken = [
        int(found[2] or 1)
        for entry in os.scandir(folder)
        if (found := _NAME.fullmatch(entry.name)) and int(found[1]) == step
    ]
    return folder / (f"step_{step:08d}" + (f"_{max(taken) + 1}" if taken else ""))


def publish(part: Path, path: Path) -> None:
    """Rename the folder ``part`` to its final name ``path``; the content of its files has to be on the disk already."""
    sync_folder(part)
    part.rename(path)
    sync_folder(path.parent)


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each renamed first so that it stops being complete at once; raise OSError on failure."""
    for path in paths:
        aside = path.with_name(f".{path.name}.old.part")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        sync_folder(aside.parent)
        remove_tree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left half written or half removed; raise OSError on failure."""
    for entry in list(os.scandir(folder)):
        if _PART.fullmatch(entry.name):
            remove_tree(Path(entry.path))


def remove_tree(path: Path) -> None:
    """Remove a folder and its content, or a file or link; do nothing where ``path`` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def superseded(
    folder: Path, saved: Path, keep_last: int, keep_every: int | None, chosen: Container[int] = ()
) -> list[Path]:
    """Return the checkpoints that may be removed once ``saved`` is complete.

    The ``keep_last`` newest up to its step, every step that is a multiple of ``keep_every``, the ``chosen`` steps and
    all later steps are kept: later steps are there if a run went back to an older checkpoint, and only the user may
    remove them.  Of a step that was saved more than once only the last is kept.
    """
    found = all_complete(folder)
    step = _order(saved)[0]
    newest = {_order(path)[0]: path for path in found}
    recent = [one for one in newest if one <= step][-keep_last:]
    kept = {
        newest[one]
        for one in newest
        if one in recent or one > step or one in chosen or (keep_every and one % keep_every == 0)
    }
    return [path for path in found if path not in kept]


def sync_folder(path: Path) -> None:
    """Wait until the list of a folder's files is on the disk, where the file system supports that."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF):
            raise
    finally:
        os.close(fd)
