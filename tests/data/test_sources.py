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
    assert kinds == {
        "a.md": "text",
        "b.txt": "text",
        "notes": "text",
        "c.py": "text",
        "d.jsonl": "jsonl",
        "zeros.txt": "text",
    }
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


@pytest.mark.timeout(20)
def test_links_between_two_folders(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        for number in range(30):  # 2 ** 30 ways down and more, if each is taken
            (tmp_path / name / f"to{number}").symlink_to(f"../{other}")
        (tmp_path / name / "self").symlink_to("self")
    assert names(tmp_path) == ["a.txt", "b.txt"]
    assert sorted(names(tmp_path / "a")) == ["a.txt", "b.txt"]
    assert sorted(names(f"{tmp_path}/**")) == ["a.txt", "b.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{tmp_path}/a/**/b.*") == ["b.txt"]
    assert not sources.exists(f"{tmp_path}/**/*.rst")


@pytest.mark.timeout(20)
def test_a_glob_passes_pipes_by(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.txt")
    assert names(f"{folder}/*") == ["a.md", "b.txt", "notes", "c.py", "d.jsonl", "zeros.txt"]
    assert "pipe" in refusal(f"{folder}/pipe*")


def test_overlapping_sources_count_once(folder: Path) -> None:
    assert sorted(names(folder, f"{folder}/*.txt", folder / "a.md", folder / "sub")) == sorted(names(folder))
    (folder / "again.txt").symlink_to(folder / "b.txt")
    assert names(folder / "b.txt", folder / "again.txt", folder / "b.txt") == ["b.txt"]
    assert names(folder / "sub", folder)[:2] == ["c.py", "d.jsonl"]  # the first counts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("image.bin", b"\x89PNG\0\0", "zero byte"),
        ("t.txt", b"text\0", "zero byte"),
        ("t.txt", "text".encode("utf-16"), "UTF-16"),
        ("t.txt", b"\xfe\xff" + "東京".encode("utf-16-be"), "UTF-16"),
        ("rows.jsonl", b"\x1f\x8b\x08text", "gzip"),
    ],
)
def test_a_file_that_is_no_text(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert words in message and name in message and "legal" in message
    (tmp_path / "t.txt").write_bytes(b"\xff\xfbnot UTF-8 altogether")
    assert names(tmp_path / "t.txt") == ["t.txt"]


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


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder of a text and datasets: one of splits, one without "train", one of rows alone."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "p" / "splits"))
    rows.save_to_disk(str(tmp_path / "p" / "plain"))
    (tmp_path / "p" / "a.json").write_text("{}")
    return tmp_path / "p"


def test_splits_below_a_folder(mixed: Path) -> None:
    expected = [str(mixed / name) for name in ("a.json", "plain", "splits/train")]
    assert [file.path for file in find_files(str(mixed))] == expected
    assert [file.path for file in find_files(str(mixed.parent))] == expected
    for pattern in (f"{mixed}/**", f"{mixed}/*", f"{mixed}/**/*", f"{mixed}*"):
        assert sorted(file.path for file in find_files(pattern)) == expected
    assert names(f"{mixed}/**/*.json") == ["a.json"]
    assert names(mixed / "splits" / "test", mixed / "splits") == ["test", "train"]


@pytest.mark.parametrize("pattern", ["splits/*", "splits/te*", "plain/*", "splits/**/*.arrow", "splits/train/*"])
def test_a_glob_inside_of_a_dataset(mixed: Path, pattern: str) -> None:
    message = refusal(mixed / pattern)
    assert f"inside of the dataset {mixed / pattern.split('/')[0]}; legal" in message


def test_splits_without_train_below_a_folder(mixed: Path) -> None:
    (mixed / "splits" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert 'no split "train"' in refusal(mixed)


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "d"))
    assert f"{tmp_path / 'd'} holds no text" in refusal(tmp_path / "d")
    (tmp_path / "a.txt").write_text("text")
    assert names(tmp_path) == ["a.txt"]
