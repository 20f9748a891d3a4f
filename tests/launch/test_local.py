"""Ranks that are processes of this machine: how they start, and how their errors reach the user.  Without torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.launch.local import RunFailed, clear_logs, last_lines, launch_local, run_folder, under_torchrun


def launch(tmp_path: Path, script: str, *, ranks: int = 2, hang_timeout: float = 20.0) -> list[str]:
    """Run a script as ranks; the log of each."""
    path = tmp_path / "script.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{script}\n")
    with run_folder(tmp_path / "run"):
        command = ["-m", "shardwise.launch.rank", str(tmp_path / "run"), str(path), "--size", "3"]
        launch_local(command, ranks, tmp_path / "run", threads=3, hang_timeout=hang_timeout)
    return [(tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text() for rank in range(ranks)]


def test_a_script_runs_on_every_rank_as_it_would_alone(tmp_path: Path) -> None:
    words = "sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'], __name__, sys.path[0]"
    before = dict(os.environ)
    logs = launch(tmp_path, f"print(rank, {words}); print('to stderr', file=sys.stderr)")
    for rank, log in enumerate(logs):
        assert log == f"{rank} ['--size', '3'] 2 3 __main__ {tmp_path}\nto stderr\n"
    assert {**os.environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""} == {**before, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    assert not under_torchrun()


def test_ranks_begin_in_the_environment_that_their_device_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user has set stays, and nothing of it stays in this process."""
    monkeypatch.setattr(Backend, "built", staticmethod(lambda: Backend("cuda")))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    words = "os.environ['CUDA_DEVICE_MAX_CONNECTIONS'], os.environ['PYTORCH_ALLOC_CONF']"
    assert launch(tmp_path, f"print({words})", ranks=1) == ["32 backend:native\n"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


@pytest.mark.parametrize(
    ("type_", "devices", "nodes", "program", "bound"),
    [("cuda", 4, 2, True, True), ("cuda", 2, 2, True, False), ("cuda", 4, 1, True, False), ("cuda", 4, 2, False, False),
    ("cpu", 4, 2, True, False)],
)  # fmt: skip
def test_ranks_are_bound_to_the_cpus_beside_their_gpus(
    monkeypatch: pytest.MonkeyPatch, type_: str, devices: int, nodes: int, program: bool, bound: bool
) -> None:
    monkeypatch.setattr(Backend, "count", devices)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / f"node{i}" for i in range(nodes)]))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if program else None)
    found = Backend(type_).numa_options(3)
    assert (found is not None and found.affinity_mode.value == "node") == bound


def test_an_exception_names_its_rank_and_line(tmp_path: Path) -> None:
    script = "if rank == 1:\n    raise KeyError('no such field')\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        launch(tmp_path, script)
    assert time.monotonic() - start < 25
    assert failed.value.rank == 1 and failed.value.cause == "other"
    assert "KeyError: 'no such field'" in str(failed.value) and "script.py:4" in str(failed.value)
    assert any("raise KeyError" in line for line in failed.value.details)


def test_wrong_input_is_told_as_it_is(tmp_path: Path) -> None:
    script = "from shardwise.core.errors import ConfigError\nraise ConfigError('model.width = 3: legal: 4')"
    with pytest.raises(RunFailed) as failed:
        launch(tmp_path, script)
    assert str(failed.value) == "model.width = 3: legal: 4" and failed.value.cause == "config"


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    """However long each of them takes to start: rank 0 speaks once rank 1 is there, and rank 1 once rank 0 spoke."""
    there, told = tmp_path / "there", tmp_path / "run" / "monitor" / "rank_0.error"
    script = (
        "from pathlib import Path\nfrom shardwise.runtime.call import CommunicationError\n"
        f"there, told = Path({str(there)!r}), Path({str(told)!r})\n"
        "if rank == 1:\n    there.touch()\n"
        "while not (there if rank == 0 else told).exists():\n    time.sleep(0.02)\n"
        "if rank == 0:\n    raise CommunicationError('rank 1 is gone', rank=0, operation='all_reduce')\n"
        "raise ValueError('the cause')"
    )
    with pytest.raises(RunFailed, match="rank 1 failed at running .*: ValueError: the cause"):
        launch(tmp_path, script)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_those_that_do_not_listen(tmp_path: Path) -> None:
    script = (
        "if rank == 1:\n    print('last words'); time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        launch(tmp_path, script)
    assert time.monotonic() - start < 25
    assert failed.value.rank == 1 and failed.value.cause == "lost"
    assert "rank 1 was killed (SIGKILL" in str(failed.value) and "running" in str(failed.value)
    assert any("last words" in line for line in failed.value.details)
    assert children() == []


def test_an_exit_code_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 0 ended with exit code 5") as failed:
        launch(tmp_path, "if rank == 0:\n    sys.exit(5)\ntime.sleep(60)")
    assert failed.value.rank == 0


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 1 has been stopped \(SIGSTOP\)") as failed:
        launch(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)", hang_timeout=1.0)
    assert time.monotonic() - start < 25
    assert failed.value.cause == "hang" and any(line.startswith("rank 0: ") for line in failed.value.details)
    assert children() == []


def launch_command(ranks: int, folder: Path, script: Path) -> list[str]:
    words = f"-m shardwise launch --ranks {ranks} --run-dir".split()
    return [sys.executable, *words, str(folder), str(script)]


@pytest.mark.slow
@pytest.mark.fresh
def test_an_interruption_ends_the_ranks(tmp_path: Path) -> None:
    """SIGTERM to the launcher; one rank does not listen to signals."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"open('{tmp_path}/here' + os.environ['RANK'], 'w').close()\ntime.sleep(60)\n"
    )
    command = launch_command(2, tmp_path / "run", script)
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(tmp_path / "here0", tmp_path / "here1")
    ranks = psutil.Process(launcher.pid).children()
    assert len(ranks) == 2
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 130 and "interrupted" in output and "Traceback" not in output
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.fresh
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nopen('{tmp_path}/here' + os.environ['RANK'], 'w').close()\ntime.sleep(60)\n")
    launcher = subprocess.Popen(launch_command(1, tmp_path / "run", script))
    wait_for(tmp_path / "here0")
    (rank,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    with run_folder(tmp_path / "run"):  # at once: it waits for the rank, which would go on writing
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert psutil.wait_procs([rank], timeout=10)[1] == []


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run"):
        (tmp_path / "run" / "logs" / "rank_0.log").write_text("of an earlier run")
        (tmp_path / "run" / "own.txt").write_text("of the user's")
        with pytest.raises(ConfigError, match="another run is writing"), run_folder(tmp_path / "run"):
            pass
    with run_folder(tmp_path / "run"):
        clear_logs(tmp_path / "run")
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", ".ranks", "logs", "monitor", "own.txt"]
        assert not list((tmp_path / "run" / "logs").iterdir())
    with pytest.raises(ConfigError, match="cannot write"), run_folder(tmp_path / "run" / "own.txt" / "below"):
        pass


def test_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {n}\n\n" for n in range(5000)))
    assert last_lines(tmp_path / "log") == [f"line {n}" for n in range(4994, 5000)]
    assert last_lines(tmp_path / "none") == []


def children() -> list[psutil.Process]:
    """Ranks of this process that still run."""
    return [
        p
        for p in psutil.Process().children()
        if p.status() != psutil.STATUS_ZOMBIE and "shardwise" in " ".join(p.cmdline())
    ]


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)
