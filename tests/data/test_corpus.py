"""Text as windows of bytes, and what is refused."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.core.errors import ConfigError
from shardwise.data import TextWindows, corpus, decode, open_corpus


def test_windows_tile_the_text() -> None:
    text = np.frombuffer(bytes(range(100)), dtype=np.uint8)
    windows = TextWindows(text, 7)
    assert len(windows) == 14
    for index in range(len(windows)):
        sample = windows[index]
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert sample["input_ids"].tolist() == list(range(7 * index, 7 * index + 7))
        assert sample["labels"].tolist() == list(range(7 * index + 1, 7 * index + 8))
    with pytest.raises(IndexError):
        windows[14]
    assert len(TextWindows(text[:8], 7)) == 1
    assert len(TextWindows(text[:15], 7)) == 2


def test_labels_left_for_the_model_to_shift() -> None:
    sample = TextWindows(np.arange(20, dtype=np.uint8), 4, shifted=False)[1]
    assert sample["labels"].tolist() == sample["input_ids"].tolist() == [4, 5, 6, 7]
    assert sample["labels"].data_ptr() != sample["input_ids"].data_ptr()


def test_stdlib_is_python_source_without_packages_and_tests() -> None:
    windows = open_corpus("stdlib", 64)
    text = windows.text.tobytes()
    assert 1 << 20 < len(text) <= corpus.STDLIB_LIMIT
    assert (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes() in text
    files = list(corpus._stdlib_files())
    assert files == sorted(files)
    assert not any({"site-packages", "test", "tests"} & set(file.parts) for file in files)
    assert text == open_corpus("stdlib", 64).text.tobytes()


def test_limit_cuts_at_the_byte(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode() * 10)
    files = sorted(tmp_path.iterdir())
    assert corpus._join(files).tobytes() == b"a" * 10 + b"\n\n" + b"b" * 10 + b"\n\n" + b"c" * 10
    assert corpus._join(files, 15).tobytes() == b"a" * 10 + b"\n\n" + b"b" * 3


def test_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second file äö")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.txt").write_text("third")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\0\0")
    assert open_corpus(str(tmp_path), 4).text.tobytes().decode() == "first\n\nsecond file äö\n\nthird"
    one = open_corpus(str(tmp_path / "b.txt"), 4)
    assert len(one) == 3  # of 16 bytes, ä and ö being two each
    assert "".join(decode(one[i]["input_ids"]) for i in range(2)) == "second f"


def test_decode() -> None:
    text = "naïve 東京\n"
    assert decode(torch.tensor(list(text.encode()))) == text
    assert decode([104, 105, 300, -1, 0xC3]) == "hi\ufffd\ufffd\ufffd"


def refusal(source: Path | str, length: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        open_corpus(str(source), length)
    assert "data.source" in str(caught.value)
    return str(caught.value)


def test_bad_sources(tmp_path: Path) -> None:
    missing, empty, short, folder = (tmp_path / name for name in ("missing", "empty", "short", "folder"))
    empty.write_bytes(b"")
    short.write_bytes(b"12345678")
    folder.mkdir()
    assert str(missing) in refusal(missing)
    assert "neither a file nor a folder" in refusal(missing)
    assert f"{empty} is empty" in refusal(empty)
    assert f"{folder} holds no text" in refusal(folder)
    message = refusal(short)
    assert str(short) in message
    assert "8 bytes" in message
    assert "9" in message
    (folder / "only.bin").write_bytes(b"\0" * 100)
    assert f"{folder} holds no text" in refusal(folder)
    assert len(open_corpus(str(short), 7)) == 1


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.txt"
    path.write_text("some text that cannot be read")

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, so a mode of 000 would not do
    for source in (path, tmp_path):
        message = refusal(source)
        assert str(path) in message
        assert "Permission denied" in message


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert str(tmp_path) in refusal("stdlib")
