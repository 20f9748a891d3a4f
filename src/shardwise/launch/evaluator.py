"""``python -m shardwise.launch.evaluator FOLDER STEP WEIGHTS [BATCHES]`` is one rank of ``shardwise evaluate``.

``FOLDER`` has the config; STEP is the number of steps that the weights have been trained for.  Rank 0 writes what was
found on at most BATCHES batches (by default on all) into ``evaluation.json``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardwise.core.garbage import without_gc
from shardwise.report.files import CONFIG, EVALUATION

from .rank import rank_process, record_error


def main() -> None:
    """Evaluate as the rank that torchrun's environment variables name."""
    folder, step, weights, *most = Path(sys.argv[1]).absolute(), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]
    with rank_process(folder) as progress:
        with without_gc():
            from shardwise.config import load_config  # imports torch, whose warnings now go to the log

            from .ready import Surroundings
            from .results import write_json
            from .training import ready_run
            from .validation import Validation

        config = load_config(folder / CONFIG)
        config = replace(config, train=replace(config.train, run_dir=str(folder)))
        side = Surroundings(progress, failed=partial(record_error, folder, int(os.environ["RANK"]), progress))
        with ready_run(config, side, trained=weights) as run:
            found = Validation.of(run).measure(step, int(most[0]) if most else None)
            if run.trainer.comm.rank == 0:
                write_json(folder / EVALUATION, found)
            run.trainer.comm.barrier(what="the evaluation's record")


if __name__ == "__main__":
    main()
