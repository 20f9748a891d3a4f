"""``python -m shardwise.launch.encoder FOLDER`` is one rank of ``shardwise encode``: it does its part of the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.core.garbage import without_gc

from .rank import rank_process


def main() -> None:
    """Encode as the rank that torchrun's environment variables name; ranks do not wait for each other."""
    folder = Path(sys.argv[1]).absolute()
    with rank_process(folder) as progress:
        with without_gc():
            import torch  # its warnings now go to the log

            from shardwise.data.texts import Texts

            from .encoding import Work

        work = Work(folder)
        job, rank, ranks = work.job, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(job.threads)
        os.environ.setdefault("RAYON_NUM_THREADS", str(job.threads))  # the tokenizer's
        mine = list(work.pending(rank, ranks))
        if not mine:
            return
        progress.phase("loading the model")
        encode = _encoder(job)
        texts = Texts(Path(job.source), job.field)
        for chunk in mine:
            progress.phase(f"encoding chunk {chunk} of {job.chunks}")
            work.write(chunk, encode(texts.read(*job.rows_of(chunk))))


def _encoder(job: Any) -> Callable[[Sequence[str]], Any]:
    """Return a function from texts to their vectors, fp32 (texts, width) on the host."""
    import numpy as np
    import torch

    from shardwise.backend import Backend
    from shardwise.capture.casts import COMPUTE_DTYPE
    from shardwise.config.factories import call
    from shardwise.core.errors import ConfigError

    from .sentences import Recipe, Sentences

    if ".py:" in job.model:
        own = call("--model", job.model, {})

        def encode(texts: Sequence[str]) -> Any:
            found = own(list(texts))
            found = found.detach().to("cpu", torch.float32).numpy() if isinstance(found, torch.Tensor) else found
            try:
                return np.asarray(found, np.float32)
            except (TypeError, ValueError) as error:
                wrong = f"gave an object of type {type(found).__name__} that is no array of numbers ({error})"
                raise ConfigError.on(
                    job.model, wrong, "one vector for each text, all as long: (texts, width)"
                ) from None

        return encode
    recipe = Recipe.of(Path(job.model), job.pooling, job.normalize, job.length)
    return Sentences(recipe, Backend.here().device(), COMPUTE_DTYPE[job.precision], job.batch_size).encode


if __name__ == "__main__":
    main()
