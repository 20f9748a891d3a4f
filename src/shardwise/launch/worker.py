"""``python -m shardwise.launch.worker RUN_DIR`` runs one rank of ``shardwise train`` with the config in that folder."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardwise.core.garbage import without_gc
from shardwise.report.files import CONFIG, current

from .rank import rank_process, record_error, stop_on


def main() -> None:
    """Train as the rank that torchrun's environment variables name."""
    run_dir = Path(sys.argv[1]).absolute()
    with rank_process(run_dir) as progress:
        with without_gc():
            from shardwise.config import load_config  # imports torch, whose warnings now go to the log

            from .ready import Surroundings
            from .training import train

        # The first SIGTERM asks all ranks to stop with a checkpoint, as the launcher would; the next ends this rank.
        asked = stop_on([signal.SIGTERM], then=signal.getsignal(signal.SIGTERM))
        config = load_config(current(run_dir, CONFIG))
        # The absolute path stays right if a factory changes the working directory.
        config = replace(config, train=replace(config.train, run_dir=str(run_dir)))
        failed = partial(record_error, run_dir, int(os.environ["RANK"]), progress)
        train(config, Surroundings(progress, asked, failed=failed))


if __name__ == "__main__":
    main()
