"""Which numbers of ranks are measured, with which config: no rank is started here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.config import Hardware
from shardwise.core.errors import ConfigError
from shardwise.launch import scaling_cases
from shardwise.launch.scaling_cases import Case, Subject, cases_of, in_common

SMALL = ("model.width=16", "model.layers=2", "model.heads=2", "data.batch_size=8", "data.sequence_length=8")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "here", staticmethod(lambda: Hardware(cores=4)))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("a few words to train on, again and again. " * 20)
    return f"data.source={tmp_path / 'text.txt'}"


def found(
    text: str,
    *overrides: str,
    ranks: Sequence[int] = (),
    axis: str = "dp",
    kind: str = "both",
    first: int | None = None,
) -> tuple[list[Case], list[str]]:
    subject = Subject(
        None, (*SMALL, text, f"data.cache_dir={text[12:]}.cache", *overrides), axis, kind, Path("/nowhere/run")
    )
    return cases_of(subject, ranks, first)


def numbers(cases: Sequence[Case]) -> list[tuple[int, int]]:
    return [(case.ranks, case.rows) for case in cases]


def test_strong_and_weak(text: str) -> None:
    cases, notes = found(text)
    assert numbers(cases) == [(1, 8), (2, 8), (2, 16), (4, 8), (4, 32)] and notes == []
    assert numbers(found(text, kind="strong")[0]) == [(1, 8), (2, 8), (4, 8)]
    assert numbers(found(text, kind="weak", ranks=(4, 2))[0]) == [(2, 8), (4, 16)]
    assert numbers(found(text, kind="weak", ranks=(4,), first=2)[0]) == [(4, 16)]
    for case in cases:
        assert (case.config.train.devices, case.config.parallel.dp) == (case.ranks, case.ranks)
        assert case.config.data.batch_size == case.rows and case.config.train.threads == 1
        assert case.config.train.loggers == case.config.train.trace_steps == ()
        assert case.config.train.run_dir == "/nowhere/run"


def test_other_axes_stay(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, int]] = []
    shape = lambda config, device: checked.append((config.parallel.tp, config.parallel.dp))  # noqa: E731
    monkeypatch.setattr(scaling_cases, "check_plan", shape)
    cases, _ = found(text, "parallel.tp=2", "train.devices=4", ranks=(2, 4), kind="strong")
    assert [(c.config.parallel.tp, c.config.parallel.dp) for c in cases] == [(2, 1), (2, 2)]
    cases, _ = found(text, "train.threads=3", ranks=(1, 2), kind="strong", axis="tp")
    assert [(c.config.parallel.tp, c.config.parallel.dp, c.config.train.threads) for c in cases] == [
        (1, 1, 3), (2, 1, 3)
    ]  # fmt: skip
    assert checked == [(2, 1), (2, 2), (1, 1), (2, 1)]  # captures of the model would take most of the time


def test_what_numbers_have_in_common(text: str) -> None:
    cases, _ = found(text, "train.epochs=2", kind="weak")
    first, *rest = (in_common(case.config, "dp") for case in cases)
    assert all(one == first for one in rest) and "model.width" in first and "parallel.dp" not in first
    assert in_common(cases[0].config, "tp") != first  # where another axis grows, tp is no part of it


def test_a_machine_with_fewer_cores_gets_a_note(text: str) -> None:
    _, notes = found(text, ranks=(4, 8), kind="strong")
    assert notes == ["8 ranks share 4 cores: correct, but slower than one rank a core"]


def test_usual_numbers_that_the_config_cannot_have_are_left_out(text: str) -> None:
    cases, notes = found(text, "parallel.zero=3", kind="strong")
    assert numbers(cases) == [(2, 8), (4, 8)]
    assert len(notes) == 1 and notes[0].startswith("without 1 rank: parallel.zero = 3") and "--ranks" not in notes[0]
    with pytest.raises(ConfigError, match="--ranks 4: parallel.dp: 4 ranks over parallel.tp = 3; legal: a multiple"):
        found(text, "parallel.tp=3", kind="strong")  # none of them


@pytest.mark.parametrize(
    ("ranks", "overrides", "axis", "words"),
    [
        ((1, 3), (), "dp", r"--ranks 3: data.batch_size = 8 .*multiple of parallel.dp x parallel.microbatches = 3 x 1"),
        ((2, 3), ("parallel.tp=2",), "dp", r"--ranks 3: parallel.dp: 3 ranks over parallel.tp = 2; legal: a mult"),
        ((1, 2), ("parallel.zero=1",), "dp", r"--ranks 1: parallel.zero = 1 .*at least 2"),
        ((1, 64), (), "dp", r"--ranks 64: data.batch_size"),
        ((1, 2, 8), (), "pp", r"--ranks 8: parallel.pp = 8|--ranks 8: .*stages"),
        ((1, 2), ("model.widht=8",), "dp", r"^model.widht .*unknown key.*width"),
        ((1, 2), ("parallel.tp=zwei",), "dp", r"^parallel.tp = .?zwei"),
        ((1, 2), ("data.batch_size=0",), "dp", r"^data.batch_size = 0 \(command line\): legal: an integer"),
    ],
)  # fmt: skip
def test_refused(text: str, ranks: tuple[int, ...], overrides: tuple[str, ...], axis: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        found(text, *overrides, ranks=ranks, axis=axis, kind="strong")


def test_weak_scaling_needs_rows(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ranks 3: data.batch_size: 9 rows for 2 ranks.*cannot grow to 3"):
        found(text, "data.batch_size=9", "parallel.microbatches=1", ranks=(3, 4), kind="weak", first=2)
    with pytest.raises(ConfigError, match=r"--ranks 32: data.batch_size: 256 rows, and the data has \d+; legal"):
        found(text, ranks=(1, 32), kind="weak")
    with pytest.raises(ConfigError, match=r"--ranks 1: the first of --with is 2; legal: at least 2"):
        found(text, ranks=(1, 4), first=2)


def test_ranks_that_torchrun_has_started(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "here", staticmethod(lambda: Hardware(cores=4, world=2, local=1)))
    assert numbers(found(text)[0]) == [(2, 8)]
    assert numbers(found(text, first=1)[0]) == [(2, 8), (2, 16)]
    with pytest.raises(ConfigError, match=r"--ranks 4: train.devices = 4 .*: 2, the number of ranks already started"):
        found(text, ranks=(4,))
