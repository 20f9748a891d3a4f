"""How far tokenising is, where there is no terminal."""

import io

import pytest
from rich.console import Console

from shardwise.data import progress
from shardwise.data.progress import shown


def test_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), iter([0.0, 1.0, 4.9, 5.1, 6.0, 6.1, 6.2, 30.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100 + next(clock))
    with shown("tokenising", Console(file=out, width=80)) as tell:
        for done in (1, 2, 3, 4, 10, 10):
            tell(done * 10**6, 10 * 10**6)
        tell(0, 5 * 10**6)  # another corpus
        tell(5 * 10**6, 5 * 10**6)
    assert out.getvalue().splitlines() == [
        "tokenising: 1.0 MB of 10.0 MB",
        "tokenising: 4.0 MB of 10.0 MB",
        "tokenising: 10.0 MB of 10.0 MB",
        "tokenising: 5.0 MB of 5.0 MB",
    ]


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with shown("tokenising", Console(file=out, width=100, force_terminal=True)) as tell:
        tell(5 * 10**6, 10 * 10**6)
    assert "5.0/10.0 MB" in out.getvalue()
