"""One rank of ``shardwise train``: ``python -m shardwise.launch.worker RUN_DIR``, with the config in the run's folder."""

from __future__ import annotations

import sys
from pathlib import Path

from .rank import rank_process


def main() -> None:
    """Train as the rank that torchrun's environment variables name."""
    run_dir = Path(sys.argv[1])
    with rank_process(run_dir) as progress:
        from shardwise.config import load_config  # imports torch: only now, when its warnings go to the log

        from .run import Side
        from .training import train

        train(load_config(run_dir / "config.toml"), Side(progress))


if __name__ == "__main__":
    main()
