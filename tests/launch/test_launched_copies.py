"""A script that shares nothing with other ranks is no success on several of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = """
import sys
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
for x in tqdm(DataLoader(torch.randn(8, 3), batch_size=4, shuffle=True)):
    model(x).sum().backward()
    optimizer.step()
print("done")
"""
DISTRIBUTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("done", ones.item())
dist.destroy_process_group()
"""
SHARDED = """
import torch
from shardwise import distribute

model = torch.nn.Linear(3, 1)
model, optimizer = distribute(model, torch.optim.AdamW(model.parameters()), loss=lambda output, batch: output.sum())
print("done")
"""
BY_HAND = "import os\nprint('done', list(range(10))[int(os.environ['RANK']) :: int(os.environ['WORLD_SIZE'])])"
CHILDREN = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"RANK\"])'])"


def launched(folder: Path, script: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    command = ["-m", "shardwise", "launch", "--ranks", str(ranks), "--run-dir", str(folder / "run"), str(path)]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_copies_are_an_error(tmp_path: Path, end: str) -> None:
    found = launched(tmp_path, PLAIN + end)
    assert found.returncode == 2, found
    assert "script.py ran 2 times, each time as a whole" in found.stderr
    assert "shardwise.distribute(model, optimizer)" in found.stderr and "--ranks 1" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [DISTRIBUTED, SHARDED, BY_HAND])
def test_ranks_that_know_of_each_other(tmp_path: Path, script: str) -> None:
    found = launched(tmp_path, script)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.fresh  # forked processes are started without Python's own events
def test_ranks_that_start_others_are_left_alone(tmp_path: Path) -> None:
    found = launched(tmp_path, CHILDREN)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_one_rank_is_no_copy(tmp_path: Path) -> None:
    assert launched(tmp_path, PLAIN, ranks=1).returncode == 0


def test_what_fails_by_itself_says_so(tmp_path: Path) -> None:
    found = launched(tmp_path, PLAIN + "sys.exit(3)")
    assert found.returncode == 1 and "exit code 3" in found.stderr, found.stderr
