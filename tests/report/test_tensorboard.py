"""What TensorBoard reads back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.core.errors import ConfigError
from shardwise.report.tensorboard import TensorBoard


def read(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard")).Reload()


def scalars(folder: Path, name: str) -> dict[int, float]:
    events = read(folder).Scalars(name)
    assert len({e.step for e in events}) == len(events)
    return {e.step: e.value for e in events}


def text_of(folder: Path, name: str) -> dict[int, str]:
    return {e.step: e.tensor_proto.string_val[0].decode() for e in read(folder).Tensors(f"{name}/text_summary")}


def test_numbers_are_there_under_their_keys_and_nothing_else_is(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.add({"step": 0, "loss": 5.5, "grad_norm": None, "tokens_per_second": 1000, "skipped": True, "device": "cpu"})
    board.add({"step": 1, "loss": float("nan"), "grad_norm": 1.25, "tokens_per_second": 1100})
    board.add({"step": 1, "validation_loss": 4.5})
    board.close()
    assert sorted(read(tmp_path).Tags()["scalars"]) == ["grad_norm", "loss", "tokens_per_second", "validation_loss"]
    assert scalars(tmp_path, "loss") == {0: 5.5}
    assert scalars(tmp_path, "grad_norm") == {1: 1.25}
    assert scalars(tmp_path, "tokens_per_second") == {0: 1000.0, 1: 1100.0}
    assert scalars(tmp_path, "validation_loss") == {1: 4.5}


def test_a_restart_forgets_what_it_does_again(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in range(8):
        first.add({"step": step, "loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path)
    second.text(0, "config", "seed = 1")  # said again at step 0: no reason to forget steps 1 to 4
    for step in (5, 6):
        second.add({"step": step, "loss": 100.0 + step})
    second.close()
    assert scalars(tmp_path, "loss") == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 105.0, 6: 106.0}


def test_texts_before_and_after_the_first_step_and_alone(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "a")
    board.text(0, "config", "# seed\n1")
    board.add({"step": 0, "loss": 1.0})
    board.text(3, "sample", "def")
    board.close()
    assert text_of(tmp_path / "a", "config") == {0: "# seed\n1"}
    assert text_of(tmp_path / "a", "sample") == {3: "def"}
    alone = TensorBoard(tmp_path / "b")
    alone.text(2, "sample", "x")
    alone.close()
    assert text_of(tmp_path / "b", "sample") == {2: "x"}


def test_what_adds_nothing_leaves_nothing(tmp_path: Path) -> None:
    TensorBoard(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"train.loggers = .*; legal: pip install shardwise\[tensorboard\], or wandb"):
        TensorBoard(tmp_path)


@pytest.mark.fresh
def test_nothing_is_imported_before_use() -> None:
    code = "import sys, shardwise.report.tensorboard; print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
