"""This module tokenises one piece of work; ``python -m shardwise.data.worker`` does one after another for its parent.

The parent writes a job as one line of JSON and reads one line of JSON back: the counts of the piece, or the error. A
worker ends when its parent does, because its input ends then. It imports neither torch nor what the user's script
imports.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.core.errors import ConfigError

from .documents import Fragment, Span, read
from .tokenizer import BATCH, Tokenizer, Tokens, open_tokenizer, token_dtype

SIDES = ("train", "validation")
KEY = b"shardwise validation\0"


@dataclass(frozen=True)
class Job:
    """A job is a piece of work, whose tokens go to the files ``<out>.train`` and ``<out>.validation``."""

    spans: tuple[Span, ...]
    field: str
    tokenizer: str
    end_token: str | None
    validation: float
    out: str


@dataclass(frozen=True)
class Done:
    """This has for each of :data:`SIDES` the number of documents that end in a piece and of its tokens with ends."""

    documents: tuple[int, int]
    tokens: tuple[int, int]


def side(digest: bytes, validation: float) -> int:
    """Return 0 (train) or 1 (validation) for a document with this SHA-256; only its content decides."""
    number = int.from_bytes(hashlib.sha256(KEY + digest).digest()[:8], "big")
    return int(number < validation * 2.0**64)


def tokenise(job: Job, tokenizer: Tokenizer) -> Done:
    """Write the tokens of a piece, each document followed by the end token.  ConfigError for anything that is not a
    document or cannot be encoded."""
    dtype = token_dtype(tokenizer.vocabulary)
    end = np.array([tokenizer.end], dtype).tobytes()
    documents, tokens = [0, 0], [0, 0]
    with open(f"{job.out}.{SIDES[0]}", "wb") as train, open(f"{job.out}.{SIDES[1]}", "wb") as validation:
        files: tuple[BinaryIO, BinaryIO] = (train, validation)

        def flush(batch: list[Fragment]) -> None:
            for fragment, ids in zip(batch, _encode(tokenizer, batch), strict=True):
                digest = fragment.digest or hashlib.sha256(fragment.text).digest()
                at = side(digest, job.validation)
                files[at].write(ids.tobytes())
                tokens[at] += len(ids) + fragment.last
                if fragment.last:
                    files[at].write(end)
                    documents[at] += 1

        batch: list[Fragment] = []
        held = 0
        for fragment in read(job.spans, job.field):
            batch.append(fragment)
            held += len(fragment.text)
            if held >= BATCH:
                flush(batch)
                batch, held = [], 0
        flush(batch)
    return Done((documents[0], documents[1]), (tokens[0], tokens[1]))


def _encode(tokenizer: Tokenizer, batch: Sequence[Fragment]) -> list[Tokens]:
    """Return the tokens of each fragment; a ConfigError says which file it is about."""
    try:
        return tokenizer.encode([fragment.text for fragment in batch])
    except ConfigError:
        for fragment in batch:
            try:
                tokenizer.encode([fragment.text])
            except ConfigError as error:
                raise ConfigError(f"{error} (text of {fragment.path})") from error
        raise


def main() -> None:
    """Serve jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent too, which ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # text that a library prints must not be taken for an answer
    opened = functools.cache(open_tokenizer)
    for line in sys.stdin:
        values = json.loads(line)
        job = Job(**{**values, "spans": tuple(Span(**span) for span in values["spans"])})
        try:
            answer: dict[str, Any] = asdict(tokenise(job, opened(job.tokenizer, job.end_token)))
        except ConfigError as error:
            answer = {"config": str(error)}
        except OSError as error:
            answer = {"os": [error.errno, error.strerror, str(error.filename or Path(job.out).parent)]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
