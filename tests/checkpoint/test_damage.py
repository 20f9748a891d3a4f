"""Damaged, foreign and newer files: every one is refused by name, by one kind of error."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saving_of_checkpoints import flat_pieces, save, state, whole

from shardwise.checkpoint.manifest import _digest
from shardwise.checkpoint.reader import Checkpoint, checkpoints, latest
from shardwise.core.errors import ConfigError

MUTATIONS = 500
Json = Any


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("good")
    for step in (1, 2):
        meta = {"seed": 7, "data": {"position": step}, "plan": "dp = 2", "rate": 0.5}
        assert save(folder, step, [flat_pieces(state(step), rank, 2) for rank in range(2)], meta)[0].error is None
    return folder


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """All that can be read, as a start does it."""
    opened = Checkpoint.open(path)
    opened.verify()
    return {name: opened.read(name) for name in opened.tensors}


def refused(path: Path) -> str:
    """The error of a checkpoint that has to be refused; any other exception fails the test."""
    with pytest.raises(ConfigError) as caught:
        read_all(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


# ---- mutations: (generator, checkpoint, the other checkpoint) → what was done


def flip_bit(generator: random.Random, path: Path, other: Path) -> str:
    data = bytearray(path.read_bytes())
    header = generator.random() < 0.3
    place = generator.randrange(min(len(data), 600) if header else len(data))
    data[place] ^= 1 << generator.randrange(8)
    path.write_bytes(data)
    return f"bit of byte {place}"


def overwrite(generator: random.Random, path: Path, other: Path) -> str:
    data = bytearray(path.read_bytes())
    place, length = generator.randrange(len(data)), generator.randint(1, 40)
    data[place : place + length] = generator.randbytes(length)
    path.write_bytes(data)
    return f"{length} bytes at {place}"


def truncate(generator: random.Random, path: Path, other: Path) -> str:
    length = generator.choice([0, 1, 7, 8, 9, generator.randrange(path.stat().st_size)])
    os.truncate(path, length)
    return f"cut to {length}"


def append(generator: random.Random, path: Path, other: Path) -> str:
    with path.open("ab") as file:
        file.write(generator.choice([b"\0", b"x", b"{}", generator.randbytes(64)]))
    return "longer"


def double(generator: random.Random, path: Path, other: Path) -> str:
    path.write_bytes(path.read_bytes() * 2)
    return "twice its content"


def delete(generator: random.Random, path: Path, other: Path) -> str:
    path.unlink()
    return "gone"


def exchange(generator: random.Random, path: Path, other: Path) -> str:
    shutil.copyfile(other / path.name, path)
    return "that of the other checkpoint"


def other_kind(generator: random.Random, path: Path, other: Path) -> str:
    path.unlink()
    kind = generator.choice(["folder", "dangling", "loop", "pipe", "device"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"dangling": "nowhere", "loop": path.name, "device": "/dev/zero"}[kind])
    return kind


def zeros(generator: random.Random, path: Path, other: Path) -> str:
    path.write_bytes(bytes(path.stat().st_size))
    return "only zeros"


def swap(generator: random.Random, path: Path, other: Path) -> str:
    first, second = (path.parent / f"rank_{rank:05d}.safetensors" for rank in range(2))
    kept = first.read_bytes()
    shutil.move(second, first)
    second.write_bytes(kept)
    return "the files of two ranks"


BYTES = [flip_bit, flip_bit, flip_bit, overwrite, truncate, append, double, delete, exchange, other_kind, zeros]


def places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield value, key
        yield from places(one)


def other_value(generator: random.Random, value: Json) -> Json:
    """Something else in the place of ``value``."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else 3
    text = value if isinstance(value, str) else "x"
    choices: list[Json] = [
        None, True, -1, number + 1, number - 1, 10**30, 1.5, "", text + "x", "../" + text, "/etc/passwd", "\ud800", [],
        {}, [value],
        {"a": value}, str(value), text[::-1],
    ]  # fmt: skip
    return generator.choice([one for one in choices if one != value or type(one) is not type(value)])


def mutate_json(generator: random.Random, value: Json) -> str:
    container, key = generator.choice(list(places(value)))
    kind = generator.choice(["remove", "change", "change", "change", "copy", "add"])
    if kind == "remove":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[f"{key}_"] = copy.deepcopy(container[key])
    elif kind == "add":
        container.append(copy.deepcopy(container[key]))
    elif kind == "copy":
        container[key] = copy.deepcopy(generator.choice([where[index] for where, index in places(value)]))
    else:
        container[key] = other_value(generator, container[key])
    return f"{kind} {key}"


def mutate_manifest(generator: random.Random, path: Path, other: Path) -> str:
    value = json.loads(path.read_text())
    done = mutate_json(generator, value)
    path.write_text(json.dumps(value, indent=generator.choice([None, 1])))
    return done


@pytest.mark.parametrize("chunk", range(5))
def test_500_mutations_are_refused_by_name(good: Path, tmp_path: Path, chunk: int) -> None:
    generator = random.Random(chunk)
    truth = read_all(good / "step_00000001")
    meant = Checkpoint.open(good / "step_00000001").manifest
    refusals, number = 0, 0
    while refusals < MUTATIONS // 5:
        number += 1
        path = tmp_path / str(number) / "step_00000001"
        shutil.copytree(good / "step_00000001", path)
        name = generator.choice(["manifest.json", "manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"])
        ways = [*BYTES, *([mutate_manifest] * 12 if name == "manifest.json" else [swap])]
        way: Callable[[random.Random, Path, Path], str] = generator.choice(ways)
        done = f"{way.__name__} {name}: {way(generator, path / name, good / 'step_00000002')}"
        named = True
        try:
            found = read_all(path)
        except ConfigError as error:
            named, refusals = str(error).startswith(str(path)), refusals + 1
        else:  # only spaces of the manifest may have changed
            assert name == "manifest.json" and Checkpoint.open(path).manifest == meant, done
            assert all(torch.equal(found[key], truth[key]) for key in truth), done
        assert named, done
        shutil.rmtree(path.parent)
    assert number < MUTATIONS // 5 * 1.1, "nearly every mutation changes something"


@pytest.mark.slow
def test_a_forged_manifest_is_checked_field_by_field(good: Path, tmp_path: Path) -> None:
    """With the right digest, so that nothing but the checks of types, boxes and headers stands between it and a wrong
    start.
    """
    generator = random.Random(0)
    truth = read_all(good / "step_00000001")
    passed = 0
    for number in range(400):
        path = tmp_path / str(number) / "step_00000001"
        shutil.copytree(good / "step_00000001", path)
        value = json.loads((path / "manifest.json").read_text())
        del value["sha256"]
        done = mutate_json(generator, value)
        (path / "manifest.json").write_text(json.dumps({**value, "sha256": _digest(value)}))
        named = True
        try:
            found = read_all(path)
        except ConfigError as error:
            named = str(error).startswith(str(path))
        else:  # meta are the caller's, ranks may be more than files, and names of tensors are free
            passed += 1
            there = truth.keys() & found.keys() - {"model.empty"}  # without elements nothing stands in a file
            assert all(torch.equal(found[key], truth[key]) for key in there), done
            assert len(truth.keys() - found.keys()) <= 1, done
        assert named, done
        shutil.rmtree(path.parent)
    assert passed < 120


def rewrite(path: Path, **changes: Any) -> None:
    """Change a manifest and give it the digest that belongs to it."""
    value = {**json.loads((path / "manifest.json").read_text()), **changes}
    del value["sha256"]
    (path / "manifest.json").write_text(json.dumps({**value, "sha256": _digest(value)}))


@pytest.fixture
def one(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good / "step_00000001", tmp_path / "step_00000001"))


def test_newer_foreign_and_of_another_step(one: Path) -> None:
    rewrite(one, version=2)
    assert refused(one) == f"{one}/manifest.json: written by a newer shardwise (format 2); this one reads up to 1"
    rewrite(one, version=1, format="megatron")
    assert "not a checkpoint of shardwise: \"format\" is 'megatron'" in refused(one)
    rewrite(one, format="shardwise-checkpoint", step=9)
    assert "of step 9, but its folder is that of step 1" in refused(one)
    named = one.rename(one.with_name("best"))
    assert Checkpoint.open(named).step == 9, "a folder may have a name of the user's"


def test_what_json_allows_and_a_manifest_does_not(one: Path) -> None:
    path = one / "manifest.json"
    text = path.read_text()
    for wrong, words in [
        (text.replace('"step": 1', '"step": 2, "step": 1', 1).encode(), "'step' comes twice"),
        (text.replace("0.5", "NaN", 1).encode(), "NaN is not JSON"),
        (text.encode().replace(b"dp = 2", b"dp = \xff"), "utf-8"),
        (b"[" * 100_000, "damaged, or not JSON"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "damaged, or not JSON"),
        (b"\x80\x04K\x01.", "damaged, or not JSON"),
        (b"[]", "not a checkpoint of shardwise"),
        (b"", "damaged, or not JSON"),
    ]:
        path.write_bytes(wrong)
        assert words in refused(one)
    path.write_text(json.dumps(json.loads(text), indent=4))
    assert read_all(one), "spaces mean nothing"


def test_data_files_by_name_and_shared_between_ranks(one: Path) -> None:
    data = bytearray((one / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (one / "rank_00001.safetensors").write_bytes(data)
    opened = Checkpoint.open(one)
    opened.verify(0, 2)
    with pytest.raises(ConfigError, match=r"rank_00001\.safetensors: damaged: its SHA-256 is"):
        opened.verify(1, 2)


def test_load_alone_refuses_what_headers_tell(one: Path) -> None:
    opened, target = Checkpoint.open(one), torch.zeros(11)
    path = one / "rank_00000.safetensors"
    data = path.read_bytes()
    for wrong, words in [
        (data[:-1], "damaged: has"),
        (data + bytes(1), "damaged: has"),
        (data.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1), "the manifest says"),
        (data.replace(b"000001/", b"0000X1/", 1), "the manifest says"),
        (data.replace(b'"dtype":"F32"', b'"dtype":"F33"', 1), "unknown dtype 'F33'"),
        (b"\xff" * 8 + data[8:], "not a safetensors file"),
    ]:
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match=words) as caught:
            opened.load([whole(name, torch.zeros(one.shape, dtype=one.dtype)) for name, one in opened.tensors.items()])
        assert str(caught.value).startswith(str(path)) and not target.any()


def test_odd_things_in_the_folder_do_no_harm(good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "checkpoints"))
    wanted = [folder / "step_00000001", folder / "step_00000002"]
    (folder / "step_00000003").mkdir()
    (folder / "step_00000004").write_text("a file")
    (folder / "step_00000005").symlink_to("nowhere")
    (folder / "step_6").mkdir()
    (folder / ".step_00000007.part").mkdir()
    (folder / ".step_00000007.part" / "manifest.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    assert checkpoints(folder) == wanted and latest(folder) == wanted[1]
    assert checkpoints(tmp_path / "none") == [] and latest(tmp_path / "none") is None
    with pytest.raises(ConfigError, match="step_00000003/manifest.json: does not exist"):
        Checkpoint.open(folder / "step_00000003")
    assert save(folder, 8, [[whole("x", torch.ones(2))]], keep_last=9)[0].error is None
    assert checkpoints(folder) == [*wanted, folder / "step_00000008"]
    assert not (folder / ".step_00000007.part").exists() and (folder / "notes.txt").exists()
