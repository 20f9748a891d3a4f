"""``shardwise tokenizer train``."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.tokenizer import app
from shardwise.data.tokenizer import JsonTokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of {n * n} lines, one after the other\n" for n in range(500)))
    return path


def test_train(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    done = CliRunner().invoke(app, ["train", str(text), "--out", str(out), "--vocabulary", "300"])
    assert done.exit_code == 0, done.output
    assert "300 tokens from 1 documents" in done.output
    assert f'data.tokenizer="{out}"' in done.output
    made = JsonTokenizer(str(out))
    assert (made.vocabulary, made.end_token) == (300, "<|endoftext|>")
    assert made.decode(made.encode([text.read_bytes()])[0]) == text.read_text()


def test_json_is_all_that_is_printed(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    done = CliRunner().invoke(
        app, ["train", str(text), f"{tmp_path}/*.txt", "--out", str(out), "--vocabulary", "9999", "--json"]
    )
    found = json.loads(done.stdout)
    assert found["path"] == str(out)
    assert found["documents"] == 1  # named twice
    assert found["bytes"] == text.stat().st_size
    assert 257 < found["vocabulary"] < 9999  # the text has no more pairs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocabulary", "256"], "at least 257"),
        (["--out", "/no/such/folder/t.json"], "--out /no/such/folder/t.json: there is no folder"),
        (["--out", "/tmp"], "--out /tmp: /tmp is a folder; legal: a file"),
        (["/no/such/text"], "/no/such/text is neither a file nor a folder"),
    ],
)
def test_refused(text: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "t.json")]
    done = CliRunner().invoke(app, ["train", str(text), *out, *arguments])
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output
    assert "reading text" not in done.output  # it is known before
    assert not (tmp_path / "t.json").exists()
