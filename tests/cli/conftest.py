"""Text to train on."""

from __future__ import annotations

import random

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(3000)))
    return f"data.source={path}"
