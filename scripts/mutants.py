#!/usr/bin/env python3
"""Plant the bugs of ``mutants.toml`` one at a time, and run the tests of ``make test-ci`` up to the first
failure: do they find it?

    scripts/mutants.py                     # all bugs but those that the results file has already
    scripts/mutants.py --only core lower   # the bugs whose file begins with one of these, or by number
    scripts/mutants.py --again             # also the bugs with a result: the test that found them runs first
    scripts/mutants.py --first tests/verify/test_zero.py   # these tests run before those of the bug's own package
    scripts/mutants.py --table             # run nothing, and print the results as a table of Markdown

A bug is planted in a copy of the checkout, where the tests of its own package run first, then all others.  Results go
to ``scripts/mutants.json`` (--results) one after the other, so an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/shardwise")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
ORDER = (
    "core",
    "lower",
    "parallel",
    "shard",
    "units",
    "runtime",
    "verify",
    "train",
    "checkpoint",
    "data",
    "estimate",
    "initial",
)
"""The packages whose tests come first among the rest; tests that start processes come last."""
ENDED = {0, 5}  # the exit codes of pytest if all passed, and if there was nothing to run


@dataclass(frozen=True)
class Mutant:
    """A ``bug``: in ``file`` the text ``old``, which must occur there once, becomes ``new``."""

    file: str
    bug: str
    old: str
    new: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]

    def plant(self, root: Path) -> None:
        """Change the file below ``root``; :class:`SystemExit` unless the old text occurs there once."""
        path = root / SOURCE / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.file}: the text of {self.bug!r} stands there {text.count(self.old)} times; legal: once"
            )
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Result:
    """The test that failed (None if all passed), whether it is in the bug's own package, and the seconds until then."""

    file: str
    bug: str
    test: str | None
    own: bool
    seconds: float


def mutants() -> list[Mutant]:
    """Read all bugs of the table."""
    return [Mutant(**one) for one in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]]


def folders(root: Path) -> list[str]:
    """Return the folders of all tests, in the order in which they run."""
    found = sorted(path.name for path in (root / "tests").iterdir() if next(path.glob("test_*.py"), None))
    return [
        f"tests/{name}" for name in sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    ]


def failure(root: Path, paths: list[str], workers: int, timeout: float) -> str | None:
    """Return the first test in ``paths`` that fails, or takes more than ``timeout`` seconds; None if none does, and
    "crash" where pytest names none."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--dist=load",
        "--maxschedchunk=8",
        "-x",
        "-m",
        "not full",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"--timeout={timeout}", *paths]
    path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode in ENDED:
        return None
    found = FAILED.search(done.stdout)
    return found[1] if found else "crash"


@contextmanager
def copy() -> Iterator[Path]:
    """Make a copy of the checkout that lasts as long as the context."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".venv", ".git", "runs", ".*_cache", "__pycache__"))
        yield root


def examine(mutant: Mutant, given: argparse.Namespace, before: str | None) -> Result:
    """Plant a bug in a copy of the checkout and run the tests there, as the options ``given`` say.

    The test that found the bug ``before`` runs first, in all its cases, if it still exists.
    """
    begun, own = time.monotonic(), f"tests/{mutant.package}"
    with copy() as root:
        mutant.plant(root)
        others = [] if given.quick else [x for x in folders(root) if x != own]
        groups = [given.first, [own] if (root / own).exists() else [], others]
        if before is not None and exists(root, before):
            groups.insert(0, [before.partition("[")[0]])
        test = next(filter(None, (failure(root, x, given.workers, given.timeout) for x in groups if x)), None)
    inside = test is not None and test.startswith(f"{own}/")
    return Result(mutant.file, mutant.bug, test, inside, round(time.monotonic() - begun, 1))


def exists(root: Path, test: str) -> bool:
    """Return whether there is a test of the name of this one, whatever its case."""
    file, _, name = test.partition("[")[0].partition("::")
    return (root / file).is_file() and f"def {name.rpartition('::')[2]}(" in (root / file).read_text()


def table(results: list[Result]) -> str:
    """Return the results as a table of Markdown, in the order of the bugs; tests are named without their cases."""
    order = {(one.file, one.bug): i for i, one in enumerate(mutants())}
    rows = ["| file | bug | caught by |", "|---|---|---|"]
    for one in sorted(results, key=lambda one: order[one.file, one.bug]):
        found = "**nothing**" if one.test is None else f"`{one.test.partition('[')[0].removeprefix('tests/')}`"
        rows.append(f"| `{one.file}` | {one.bug} | {found} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FILE|NUMBER", help="beginnings of files, or numbers from 0"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that run tests")
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="of one test: some bugs hang")
    parser.add_argument(
        "--quick", action="store_true", help="run the tests of a bug's own package alone; keep what they find"
    )
    parser.add_argument("--again", action="store_true", help="run also the bugs that the results file has")
    parser.add_argument("--first", nargs="+", default=[], metavar="TEST", help="tests that run before all others")
    parser.add_argument("--baseline", action="store_true", help="plant nothing: all tests have to pass in a copy")
    parser.add_argument("--table", action="store_true", help="print the results as a table and end")
    given = parser.parse_args()
    results = [Result(**one) for one in json.loads(given.results.read_text())] if given.results.exists() else []
    if given.table:
        print(table(results))
        return
    if given.baseline:
        with copy() as root:
            test = failure(root, folders(root), given.workers, given.timeout)
        sys.exit(None if test is None else f"{test} fails where no bug is planted")
    known = {(one.file, one.bug): one.test for one in results}
    for number, one in enumerate(mutants()):
        wanted = not given.only or any(one.file.startswith(each) or each == str(number) for each in given.only)
        key = one.file, one.bug
        if not wanted or (key in known and not given.again):
            continue
        found = examine(one, given, known.get(key))
        print(f"{number:3d} {one.file}: {one.bug}: {found.test or 'NOT CAUGHT'} ({found.seconds:.0f} s)", flush=True)
        if found.test or not given.quick:
            results = [each for each in results if (each.file, each.bug) != key] + [found]
            given.results.write_text(json.dumps([asdict(each) for each in results], indent=1))
    caught = sum(one.test is not None for one in results)
    print(f"{caught} of {len(results)} caught")


if __name__ == "__main__":
    main()
