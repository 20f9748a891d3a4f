"""Where a model's code is while it runs, for messages about what it has just called."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from types import CodeType, FrameType

from torch import Tensor, nn

from shardwise.core.errors import ShardwiseError, in_users_file, of_library


def users_line() -> str:
    """Return ``file:line`` of the innermost line of the user's code that is running; "" if there is none."""
    frame = inspect.currentframe()
    while frame is not None and not _in_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def models_call() -> str:
    """Return the file and the place in it of the innermost call that a model's code makes, also a package's; "" if
    there is none."""
    frame = inspect.currentframe()
    while frame is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{place_of(frame.f_code, frame.f_lasti)}"


@cache
def place_of(code: CodeType, instruction: int) -> tuple[int | None, ...]:
    """Return where in its file an instruction stands: the first and the last line and column.  A call is several
    instructions, of which Python stops at one or another."""
    return next(islice(code.co_positions(), instruction // 2, None), ())


_of_library, _in_users_file = cache(of_library), cache(in_users_file)


def running_module() -> str:
    """Return the path of the innermost module whose forward is running, in the model that ``WithLoss`` wraps; "" if it
    is the model itself, or none."""
    modules = _modules(frame for frame, _ in traceback.walk_stack(None))
    within = (name for outer in reversed(modules) for name, one in outer.named_modules() if one is modules[0])
    path = next(within, "")
    return path.removeprefix("module").removeprefix(".")


def here() -> str:
    """Return where a model is, for messages: `` in blocks.0.drop (model.py:12)``, or less where less is known."""
    path = running_module()
    return (f" in {path}" if path else "") + at_line()


def at_line() -> str:
    """Return the innermost line of the user's code that is running, for messages: `` (model.py:12)``; "" if none is."""
    line = users_line()
    return f" ({line})" if line else ""


def raised_in(error: BaseException, model: nn.Module) -> str:
    """Return where in ``model`` an error was raised: `` in body.1, a BatchNorm1d (model.py:12)``, or less.

    The line is the user's, or, where a package calls nothing of the user's, the package's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = {id(one): name for name, one in model.named_modules()}
    inner = next((one for one in reversed(_modules(frame for frame, _ in frames)) if id(one) in names), model)
    every = [(file, line) for frame, line in frames if (file := frame.f_code.co_filename)[:1] != "<"]
    lines = [one for one in every if in_users_file(one[0])] or [one for one in every if not of_library(one[0])]
    path = f" in {names[id(inner)]}, a {type(inner).__name__}" if inner is not model else ""
    return path + (f" ({lines[-1][0]}:{lines[-1][1]})" if lines else "")


def _modules(frames: Iterable[FrameType]) -> list[nn.Module]:
    """Return the modules whose methods these frames run: their first argument, whatever its name."""
    first = (f.f_locals.get(f.f_code.co_varnames[0]) for f in frames if f.f_code.co_argcount)
    return [one for one in first if issubclass(type(one), nn.Module)]  # what stands for objects refuses isinstance()


def fields_in_words(fields: Mapping[str, Tensor]) -> str:
    """Return the fields of a batch for messages: ``x (4, 8) float32, labels (4,) int64``."""
    return ", ".join(
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" for name, value in fields.items()
    )


@contextmanager
def noting_batch(fields: Callable[[], Mapping[str, Tensor]]) -> Iterator[None]:
    """Note this rank's batch on an exception of the user's code that is raised inside this context; ``fields`` returns
    the batch, if there is one."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        if found := fields():
            error.add_note(f"the batch on this rank: {fields_in_words(found)}")
        raise
