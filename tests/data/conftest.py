"""Shared by the tests of data: a folder for tokens that no other test sees, and a small tokenizer.json."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE of 400 tokens, made from this folder's tests."""
    from shardwise.data.bpe import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer([str(Path(__file__).parent)], path, 400).path
