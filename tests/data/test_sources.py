"""Which files a source is, and what is refused."""

import os
import sysconfig
from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError
from shardwise.data import sources
from shardwise.data.sources import find_files


def names(*source: str | Path) -> list[str]:
    return [os.path.basename(file.path) for file in find_files([str(one) for one in source])]


def refusal(source: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_files(str(source))
    assert str(caught.value).startswith("data.source")
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub" / ".git").mkdir(parents=True)
    for name in ("b.txt", "a.md", "sub/c.py", "sub/d.jsonl", "sub/.hidden.txt", "sub/.git/e.txt", "notes", "zeros.txt"):
        (root / name).write_text("text of " + name)
    (root / "zeros.txt").write_bytes(b"\0text")
    (root / "image.bin").write_bytes(b"\x89PNG\0\0")
    (root / "empty.txt").write_bytes(b"")
    return root


def test_a_folder_without_hidden_and_binary_and_empty_files(folder: Path) -> None:
    assert names(folder) == ["a.md", "b.txt", "notes", "c.py", "d.jsonl", "zeros.txt"]
    kinds = {os.path.basename(file.path): file.kind for file in find_files(str(folder))}
    assert kinds == {"a.md": "text", "b.txt": "text", "notes": "text", "c.py": "text", "d.jsonl": "jsonl", "zeros.txt": "text"}
    assert all(file.size == os.path.getsize(file.path) and os.path.isabs(file.path) for file in find_files(str(folder)))


def test_globs_and_lists(folder: Path) -> None:
    assert names(f"{folder}/*.txt") == ["b.txt", "zeros.txt"]
    assert names(f"{folder}/**/*.py") == ["c.py"]
    assert sorted(names(f"{folder}/**")) == sorted(names(folder))  # once each
    assert names(f"{folder}/su?") == ["c.py", "d.jsonl"]
    assert names(folder / "sub", folder / "b.txt") == ["c.py", "d.jsonl", "b.txt"]
    (folder / "x[1].txt").write_text("a name that looks like a pattern")
    assert names(folder / "x[1].txt") == ["x[1].txt"]
    assert "nothing matches" in refusal(f"{folder}/*.rst")


def test_symbolic_links_that_go_round(folder: Path) -> None:
    (folder / "sub" / "round").symlink_to(folder)
    (folder / "sub" / "broken").symlink_to(folder / "nowhere")
    assert len(names(folder)) == 6


def test_one_file_of_any_kind(folder: Path) -> None:
    assert names(folder / "image.bin") == ["image.bin"]  # whoever names it means it


def test_bad_sources(tmp_path: Path) -> None:
    missing, empty, folder = (tmp_path / name for name in ("missing", "empty", "folder"))
    empty.write_bytes(b"")
    folder.mkdir()
    assert f"{missing} is neither a file nor a folder" in refusal(missing)
    assert f"{empty} is empty" in refusal(empty)
    assert f"{folder} holds no text" in refusal(folder)
    (folder / "only.bin").write_bytes(b"\0" * 100)
    assert f"{folder} holds no text" in refusal(folder)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")


def test_stdlib_is_python_source_without_packages_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_files("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    paths = [Path(file.path).relative_to(root) for file in found]
    assert [str(path) for path in paths] == sorted(map(str, paths))
    assert Path("argparse.py") in paths
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in paths)
    total = sum(file.size for file in found)
    assert 1 << 20 < total <= sources.STDLIB_LIMIT
    monkeypatch.setattr(sources, "STDLIB_LIMIT", total // 2)
    fewer = find_files("stdlib")
    assert fewer == found[: len(fewer)]
    assert total // 2 - 2**20 < sum(file.size for file in fewer) <= total // 2


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(tmp_path) in refusal("stdlib")


def test_a_dataset_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "other"))
    for source, path in (("plain", "plain"), ("splits", "splits/train"), ("splits/test", "splits/test")):
        (found,) = find_files(str(tmp_path / source))
        assert (found.path, found.kind) == (str(tmp_path / path), "dataset")
        assert found.size > 0
        assert {"state.json", "dataset_info.json"} < {os.path.basename(member) for member in found.members}
    assert str(tmp_path / "other" / "test") in refusal(tmp_path / "other")
    assert 'no split "train"' in refusal(tmp_path / "other")
