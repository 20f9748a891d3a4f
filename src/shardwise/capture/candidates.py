"""The functions, and parts of them, that may run as written in place of what stopped a capture."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import FrameType, FunctionType

from shardwise.capture.parts import part_of, parts
from shardwise.capture.redirected import function_of
from shardwise.core.errors import of_library

PARTS = 12  # the most parts of functions that are tried at a time


def candidates(
    errors: Sequence[BaseException], known: Sequence[FunctionType], whole: object
) -> Iterator[FunctionType]:  # fmt: skip
    """Yield the functions in which errors were raised, those of the last error first, beginning with the innermost,
    without those ``known``, and then parts of them.  The ``whole`` forward is last: it reads parameters, which nothing
    that runs as written may, and is there for what it does besides, which a message tells."""
    stops = [stop for error in reversed(errors) for stop in _stops(error)]
    functions = list(dict.fromkeys(function for function, *_ in stops if function not in known))
    yield from (one for one in functions if one is not whole)
    yield from islice(_parts(stops, known), PARTS)
    yield from (one for one in functions if one is whole)


Stop = tuple[FunctionType, FrameType, int, bool]
"""A function in which an error was raised, with its frame, the line, and whether it is the innermost one."""


def _stops(error: BaseException) -> Iterator[Stop]:
    """Yield where an error and what caused it were raised, beginning with the innermost function."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for one in reversed(chain):
        frames = [each for each in traceback.walk_tb(one.__traceback__) if not of_library(each[0].f_code.co_filename)]
        for at, (frame, line) in enumerate(reversed(frames)):
            if (function := function_of(frame)) is not None:
                yield function, frame, line, not at


def _parts(stops: Iterable[Stop], known: Sequence[FunctionType]) -> Iterator[FunctionType]:
    """Yield the parts of functions around the lines where they have stopped, each once."""
    seen = {part_of(one) for one in known}
    for function, frame, line, innermost in stops:
        for one in parts(function, frame, line, innermost):
            if part_of(one) not in seen:
                seen.add(part_of(one))
                yield one


__all__ = ["candidates"]
