#!/usr/bin/env python3
"""Make the pictures of README.md and docs/ anew, by the commands that these name.

    scripts/pictures.py                        # all of them; runs that train take several minutes
    scripts/pictures.py step.svg schedules.svg # only these
    scripts/pictures.py --list                 # print the commands, and run none
    scripts/pictures.py --again curves.png     # train anew, also where runs/pictures has the finished run already

Pictures with measured times (curves.png, asynchronous.png, scaling.png, servers.png) have to be made on a machine that
does nothing else.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/pictures")

ASYNCHRONOUS = (
    "train model.name=llama model.tied=false parallel.pp=2 train.clip_norm=0 optimizer.schedule=constant"
    " train.run_dir=runs/pictures"
)
PICTURES: Mapping[str, Sequence[str]] = {
    "step.svg": ["show model.layers=2 parallel.dp=2 parallel.microbatches=2 --picture docs/step.svg"],
    "schedules.svg": [
        "draw --schedule 1f1b --schedule interleaved --schedule zb-h1 --times 125,125,125,0 --out docs/schedules.svg"
    ],
    "memory.png": [
        "memory examples/llama7b.toml parallel.dp=8 --device A100-80GB --picture docs/memory.png",
    ],
    "curves.png": [
        "train train.run_dir=runs/pictures/train",
        "plot runs/pictures/train --out docs/curves.png",
    ],
    "asynchronous.png": [
        *(
            f"{ASYNCHRONOUS}/{name} parallel.schedule={name} parallel.microbatches=4 train.steps=300"
            " validation.every=100"
            for name in ("1f1b", "pipedream-2bw")
        ),
        f"{ASYNCHRONOUS}/pipedream parallel.schedule=pipedream data.batch_size=4 train.steps=1200 validation.every=400",
        "plot runs/pictures/1f1b runs/pictures/pipedream-2bw runs/pictures/pipedream --over seconds"
        " --out docs/asynchronous.png",
    ],
    "scaling.png": ["bench scaling --ranks 1 --ranks 2 --picture docs/scaling.png"],
    "servers.png": ["benchmark asynchronous.py --seconds 25 --picture docs/servers.png"],
    "report.png": [
        "train train.run_dir=runs/pictures/train",
        "report runs/pictures/train",
        "screenshot runs/pictures/train/report.html docs/report.png",
    ],
}
"""The commands that make each picture of docs/, without the word ``shardwise``; ``screenshot`` is Chromium's, and
``benchmark`` a script of benchmarks/."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", choices=[[], *PICTURES], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    parser.add_argument("--again", action="store_true", help="train anew what has been trained")
    given = parser.parse_args()
    done: set[str] = set()
    for name in given.pictures or PICTURES:
        for command in PICTURES[name]:
            if command not in done:
                done.add(command)
                make(command, only_shown=given.list, again=given.again)


def make(command: str, *, only_shown: bool = False, again: bool = False) -> None:
    """Run one command in the checkout, unless it trains a run that is finished; end the script if it fails."""
    word, *arguments = shlex.split(command)
    print({"screenshot": "chromium --headless ", "benchmark": "python "}.get(word, "shardwise ") + command, flush=True)
    folder = next((Path(a.partition("=")[2]) for a in arguments if a.startswith("train.run_dir=")), None)
    finished = folder is not None and (ROOT / folder / "result.json").is_file()
    if only_shown or (finished and not again):
        return
    found = [sys.executable, "-m", "shardwise", word, *arguments]
    if word == "screenshot":
        found = screenshot(*arguments)
    elif word == "benchmark":
        found = [sys.executable, f"benchmarks/{arguments[0]}", *arguments[1:]]
    heard = subprocess.DEVNULL if word == "screenshot" else None  # Chromium tells what it misses of a desktop
    if (code := subprocess.run(found, cwd=ROOT, stderr=heard).returncode) != 0:
        sys.exit(f"failed with code {code}: {shlex.join(found)}")


def screenshot(page: str, out: str) -> list[str]:
    """Return the command that takes a picture of the top of a page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit(f"{out}: there is no Chromium on this machine")
    look = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1500"]
    return [browser, *look, f"--screenshot={ROOT / out}", f"file://{ROOT / page}"]


if __name__ == "__main__":
    main()
