"""One rank of ``shardwise train``: ``python -m shardwise.launch.worker RUN_DIR``, with the config in that folder."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from .rank import rank_process, record_error, stop_on


def main() -> None:
    """Train as the rank that torchrun's environment variables name."""
    run_dir = Path(sys.argv[1]).absolute()
    with rank_process(run_dir) as progress:
        from shardwise.config import load_config  # imports torch: only now, when its warnings go to the log

        from .ready import Surroundings
        from .training import train

        # The first SIGTERM asks all ranks to stop with a checkpoint, as the launcher would; the next ends this one.
        asked = stop_on([signal.SIGTERM], then=signal.getsignal(signal.SIGTERM))
        config = load_config(run_dir / "config.toml")
        config = replace(
            config, train=replace(config.train, run_dir=str(run_dir))
        )  # whatever folder a factory changes to
        failed = partial(record_error, run_dir, int(os.environ["RANK"]), progress)
        train(config, Surroundings(progress, asked, failed=failed))


if __name__ == "__main__":
    main()
