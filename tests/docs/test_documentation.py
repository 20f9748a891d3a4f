"""Every command and snippet of the README and of the guides runs, in order, in one fresh copy of the repository a page.

What comments in a page say of its blocks is in :mod:`pages`.  All pages run with ``full``; by default the README does,
and all configs are read.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import PAGES, ROOT, Block, anchors, blocks, commands, links

from shardwise.cli import main
from shardwise.config import Hardware, load_config
from shardwise.config.sections import SECTIONS, rules

LANGUAGES = {"sh", "python", "toml", "diff", "text", "json"}
MOST_SKIPPED = 13
TAKE_SIZES = (["train"], ["verify"], ["show"], ["memory"], ["bench", "scaling"])
"""The commands that take section.key=value."""
APART = {".git", ".venv", "runs", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
ALL = {page: blocks(page) for page in PAGES}
RUN = [page for page in PAGES if any(one.language in ("sh", "python") and not one.skipped for one in ALL[page])]
QUICK = {"README.md"}


def run_page(page: Path, found: list[Block], copy: Path) -> None:
    """Run the blocks of a page in ``copy``; what one leaves, a variable of Python included, those after it find."""
    variables: dict[str, Any] = {"__name__": "__docs__"}
    for block in found:
        if block.skipped or block.language not in ("sh", "python", "toml"):
            continue
        setup = block.directives.get("setup", "")
        if block.language == "python":
            run_python(setup, block, variables)
        else:
            run_commands(block, setup, copy, "")
        if "file" in block.directives:
            (copy / block.directives["file"]).write_text(block.text, encoding="utf-8")
        elif block.language == "toml":
            read_config(block, copy)
        elif block.language == "python":
            run_python(block.text, block, variables)
        else:
            run_commands(block, block.text, copy, block.directives.get("tested with", ""))


def run_python(text: str, block: Block, variables: dict[str, Any]) -> None:
    """Run Python in the current folder; errors have the page and its line."""
    code = compile("\n" * block.line + text, str(block.page), "exec")
    exec(code, variables)  # noqa: S102 - our own page


def run_commands(block: Block, text: str, copy: Path, arguments: str) -> None:
    for command in commands(text):
        words, start = words_of(command, arguments), time.monotonic()
        done = subprocess.run(words, cwd=copy, capture_output=True, text=True, timeout=280, env=environment(copy))
        print(f"{time.monotonic() - start:5.1f} s  {command}")
        assert done.returncode == 0, f"{block.where}: {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def words_of(command: str, arguments: str) -> list[str]:
    """Return the words by which a command of a page is run: those of a process that is forked where it is Python's."""
    program, *rest = shlex.split(command)
    own = program in ("shardwise", ".venv/bin/shardwise")
    if own and any(rest[: len(words)] == words for words in TAKE_SIZES):
        rest += shlex.split(arguments)
    python = own or program in ("python", ".venv/bin/python")
    if not python or any(word in ("|", ">", "&&", ";") for word in rest):
        return ["bash", "-euo", "pipefail", "-c", command]
    return [sys.executable, *(["-m", "shardwise"] if own else []), *rest]


def environment(copy: Path) -> dict[str, str]:
    """Return an environment in which ``shardwise`` and ``python`` are those of the copy's virtual environment."""
    path = os.pathsep.join([str(copy / ".venv" / "bin"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def read_config(block: Block, folder: Path) -> None:
    """Read a block as a config: it may be a part of one."""
    path = folder / "block.toml"
    path.write_text(block.text, encoding="utf-8")
    load_config(path, hardware=Hardware(cores=8))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository as in a fresh clone, with a virtual environment; it is the current folder."""
    folder = tmp_path / "shardwise"
    shutil.copytree(
        ROOT, folder, symlinks=True, ignore=lambda _, names: {n for n in names if n in APART or n.endswith(".egg-info")}
    )
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, module in (("python", ""), ("shardwise", "-m shardwise"), ("torchrun", "-m torch.distributed.run")):
        tool = folder / ".venv" / "bin" / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        tool.chmod(0o755)
    (folder / ".venv" / "bin" / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=() if p.name in QUICK else pytest.mark.full, id=p.stem) for p in RUN]
)
@pytest.mark.timeout(900)
def test_every_command_and_snippet_runs(page: Path, copy: Path) -> None:
    run_page(page, ALL[page], copy)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_has_a_language(page: Path) -> None:
    assert {one.where: one.language for one in ALL[page] if one.language not in LANGUAGES} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_options_and_keys_exist(page: Path) -> None:
    """By default too, and of blocks that are not run; ``tested with`` has keys as well."""
    for block in (one for one in ALL[page] if one.language == "sh"):
        for command in commands(block.text):
            check_words(shlex.split(command), block.where)
        for word in shlex.split(block.directives.get("tested with", "")):
            check_key(word, block.where)


def check_words(words: list[str], where: str) -> None:
    """Check what stands behind ``shardwise`` in a command: the command's name, its options, and keys of a config."""
    own = next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "shardwise"), None)
    if own is None:
        return
    command: Any = typer.main.get_command(main.app)
    rest = words[own + 1 :]
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"{where}: {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    legal = {option for one in command.params for option in one.opts} | {"--help"}
    for word in rest:
        if word.startswith("--"):
            assert word in legal, f"{where}: {word}"
        elif "=" in word and command.name != "launch":
            check_key(word, where)


def check_key(word: str, where: str) -> None:
    section, _, name = word.partition("=")[0].partition(".")
    assert section in SECTIONS and name.partition(".")[0] in rules(section), f"{where}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_of_a_page_is_used_by_a_later_command(page: Path) -> None:
    for at, block in enumerate(ALL[page]):
        if (name := block.directives.get("file")) is not None:
            later = "".join(one.text for one in ALL[page][at + 1 :] if one.language == "sh" and not one.skipped)
            assert name in later, block.where


def test_few_blocks_are_not_run() -> None:
    """Each says why; what is only shown (an output, a difference) does not count."""
    skipped = {one.where: one.skipped for page in PAGES for one in ALL[page] if one.skipped is not None}
    print(*(f"{where}: {why}" for where, why in skipped.items()), sep="\n")
    assert len(skipped) <= MOST_SKIPPED and all(skipped.values()), skipped


def test_shell_blocks_without_a_reason_are_run() -> None:
    """A block of text is an output: nobody is meant to type it."""
    typed = ("shardwise ", ".venv/bin/", "make ", "pip ", "torchrun ", "srun ", "python ")
    texts = [one for page in PAGES for one in ALL[page] if one.language == "text"]
    assert [one.where for one in texts if one.text.startswith(typed)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.slow
def test_the_picture_of_a_step_is_what_the_readme_says_makes_it(copy: Path) -> None:
    (command,) = [
        part
        for part in (ROOT / "README.md").read_text().split("`")
        if part.startswith("shardwise show") and "step.svg" in part
    ]
    picture = copy / "docs" / "step.svg"
    before = picture.read_text()
    picture.unlink()
    subprocess.run(words_of(command, ""), cwd=copy, env=environment(copy), timeout=120, check=True, capture_output=True)
    assert picture.read_text() == before


EXAMPLE = """
<!-- setup: echo before -->

<!-- tested with: train.steps=1
parallel.dp=2 -->
```sh
shardwise train  # the defaults
shardwise train a.toml \\
    model.pins='{"#" = 1}'
```
<!-- not run: no GPUs -->
words between
```python
1 / 0
```
- in a list:

  ```toml
  [train]
    steps = 1
  ```
"""


def test_blocks_and_what_is_said_of_them() -> None:
    first, second, third = blocks(ROOT / "README.md", EXAMPLE)
    assert first.directives == {"setup": "echo before", "tested with": "train.steps=1\nparallel.dp=2"}
    assert commands(first.text) == ["shardwise train", """shardwise train a.toml      model.pins='{"#" = 1}'"""]
    assert words_of("shardwise train", first.directives["tested with"])[-2:] == ["train.steps=1", "parallel.dp=2"]
    assert second.directives == {} and second.line == 13, "words between a comment and a block part them"
    assert (third.language, third.text) == ("toml", "[train]\n  steps = 1\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```sh\nfalse\n```\n", AssertionError),
        ("```sh\nshardwise train no.toml\n```\n", AssertionError),
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("<!-- setup: x = y -->\n```python\n1\n```\n", NameError),
        ("```toml\n[train]\nstep = 1\n```\n", Exception),
    ],
)
def test_what_fails_is_found(text: str, error: type[Exception], copy: Path) -> None:
    page = ROOT / "README.md"
    with pytest.raises(error):
        run_page(page, blocks(page, text), copy)


@pytest.mark.parametrize(
    "command",
    [
        "shardwise trian",
        "torchrun -m shardwise train --jsno",
        "shardwise train trian.steps=1",
        "shardwise train train.step=1",
    ],
)
def test_wrong_words_are_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check_words(shlex.split(command), "here")


def test_blocks_of_a_page_follow_each_other(copy: Path) -> None:
    text = """
<!-- file: mine.py -->
```python
print("made")
```
```sh
python mine.py > made.txt
```
<!-- setup: from pathlib import Path -->
```python
word = Path("made.txt").read_text().strip()
```
```python
assert word == "made"
```
<!-- not run: it would fail -->
```sh
false
```
"""
    page = ROOT / "README.md"
    run_page(page, blocks(page, text), copy)
    assert (copy / "mine.py").read_text() == 'print("made")\n'
