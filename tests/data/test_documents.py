"""Documents of files of every kind: the same whatever the pieces, and errors that say where."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.errors import ConfigError
from shardwise.data import documents
from shardwise.data.documents import byte_counter, pieces, read
from shardwise.data.sources import find_files


def texts(source: str | Path, field: str = "text") -> list[bytes]:
    """The documents of a source, their parts put together again."""
    found: list[bytes] = []
    files = find_files(str(source))
    open_ = False
    for spans in pieces(files, ["ab"] * len(files)):
        for fragment in read(spans, field):
            found = [*found[:-1], found[-1] + fragment.text] if open_ else [*found, fragment.text]
            open_ = not fragment.last
    assert not open_
    return found


def refusal(source: str | Path, field: str = "text") -> str:
    with pytest.raises(ConfigError) as caught:
        texts(source, field)
    return str(caught.value)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 10**6])
def test_any_pieces_give_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(documents, "PIECE", piece)
    monkeypatch.setattr(documents, "SEARCH", 16)
    folder = tmp_path / "folder"
    folder.mkdir()
    whole = ["short", "line\n" * 30, "ä東🙂" * 40, "no end of line " * 20, "\n\n\n", "x"]
    for number, text in enumerate(whole):
        (folder / f"{number}.txt").write_text(text)
    assert [text.decode() for text in texts(folder)] == whole
    rows = [{"text": text, "n": n} for n, text in enumerate(whole)]
    assert [text.decode() for text in texts(write_jsonl(tmp_path / "rows.jsonl", rows))] == whole
    files = find_files(str(folder))
    size_of = byte_counter(files)
    assert sum(size_of(spans) for spans in pieces(files, ["ab"] * len(files))) == sum(file.size for file in files)


@pytest.mark.parametrize("place", range(1, 40))
def test_a_cut_never_divides_a_character(tmp_path: Path, place: int) -> None:
    text = "aé東🙂" * 5
    path = tmp_path / "t.txt"
    path.write_text(text)
    size = len(text.encode())
    with path.open("rb") as file:
        cut = documents._cut(file, min(place, size), size)
        file.seek(0)
        file.read(cut).decode()
        file.read().decode()
    assert place <= cut < place + 4


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n\n   \n{"other": 1, "text": "tw\\u00f6"}\r\n{"text": null}\n{"text": ""}\n{"text": '
        b'"\\ud800!"}'
    )
    assert texts(path) == [b"one", "twö".encode(), b"?!"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "half', ["not JSON", "rows.jsonl:4"]),
        (b'["list"]', ["list", "one JSON object a line", "rows.jsonl:4"]),
        (b'{"txt": "a"}', ['no "text"', 'Did you mean "txt"?', "rows.jsonl:4", "data.text_field"]),
        (b'{"text": 3}', ['"text" is of type int', "rows.jsonl:4"]),
        (b"\xff\xfe", ["not JSON", "rows.jsonl:4"]),
    ],
)
@pytest.mark.parametrize("piece", [9, 10**6])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, words: list[str], piece: int
) -> None:
    monkeypatch.setattr(documents, "PIECE", piece)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' + line + b'\n{"text": "five"}\n')
    message = refusal(path)
    assert all(word in message for word in words), message


def test_another_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"content": "a"}, {"content": "b"}])
    assert texts(path, "content") == [b"a", b"b"]
    assert 'no "text"; legal: one of content' in refusal(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "rows.parquet"
    rows = ["one", "", None, "zwölf"] * 700
    table = pyarrow.table({"text": rows, "n": list(range(len(rows)))})
    parquet.write_table(table, path, row_group_size=500)
    assert len(list(pieces(find_files(str(path)), ["ab"]))) == 6
    assert texts(path) == [b"one", "zwölf".encode()] * 700
    assert "is of type int64" in refusal(path, "n")
    assert 'no "txt"; legal: one of text, n. Did you mean "text"?' in refusal(path, "txt")
    path.write_bytes(b"PAR1 not at all")
    assert "not a Parquet file" in refusal(path)


def test_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {n}" for n in range(5000)]
    datasets.Dataset.from_dict({"text": rows, "n": list(range(5000))}).save_to_disk(str(tmp_path / "d"))
    assert len(list(pieces(find_files(str(tmp_path / "d")), ["ab"]))) == 1
    assert [text.decode() for text in texts(tmp_path / "d")] == rows
    assert 'no "content"' in refusal(tmp_path / "d", "content")
    assert "row 0" in refusal(tmp_path / "d", "n")
    (tmp_path / "d" / "state.json").write_text("{")
    assert "not a folder of a Hugging Face dataset" in refusal(tmp_path / "d")


def test_parquet_columns_by_their_exact_names(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "rows.parquet"
    columns = [pyarrow.array(["one"]), pyarrow.array(["two"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    assert '2 columns are called "text"' in refusal(path)
    inner = pyarrow.array([{"b": "inner"}])
    parquet.write_table(pyarrow.Table.from_arrays([inner, columns[0]], names=["a", "a.b"]), path)
    assert texts(path, "a.b") == [b"one"]


def test_a_dataset_saved_in_another_format(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [1, 2]})
    for name, columns in (("torch", ["label"]), ("arrow", None), ("pandas", ["text"])):
        rows.with_format(name, columns=columns).save_to_disk(str(tmp_path / name))
        assert texts(tmp_path / name) == [b"one", b"two"]


def test_a_dataset_with_columns_that_cannot_be_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    rows = datasets.Dataset.from_dict(
        {"text": ["one"], "picture": [{"bytes": b"no picture", "path": None}]}, features=features
    )
    rows.save_to_disk(str(tmp_path / "d"))
    assert texts(tmp_path / "d") == [b"one"]
    message = refusal(tmp_path / "d", "picture")
    assert message.startswith("data.text_field") and str(tmp_path / "d") in message and "legal" in message


@pytest.mark.parametrize(("library", "name"), [("pyarrow", "rows.parquet"), ("datasets", "d")])
def test_libraries_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    if library == "datasets":
        (tmp_path / "d").mkdir()
        for file in ("state.json", "dataset_info.json"):
            (tmp_path / "d" / file).write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"PAR1")
    message = refusal(tmp_path / name)
    assert "pip install shardwise[data]" in message
    assert library in message
