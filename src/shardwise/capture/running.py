"""Where a model's code is while it runs, for messages about what it has just called."""

from __future__ import annotations

import traceback

from torch import nn

from shardwise.core.errors import of_user


def users_line() -> str:
    """Return ``file:line`` of the innermost line of the user's code that is running; "" if there is none."""
    lines = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return next((f"{name}:{line}" for name, line in lines if of_user(name) and not name.startswith("<")), "")


def running_module() -> str:
    """Return the path of the innermost module whose forward is running, in the model that ``WithLoss`` wraps; "" if it
    is the model itself, or none."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    if not modules:
        return ""
    path = next((name for name, one in modules[-1].named_modules() if one is modules[0]), "")
    return path.removeprefix("module").removeprefix(".")


def here() -> str:
    """Return where a model is, for messages: `` in blocks.0.drop (model.py:12)``, or less where less is known."""
    path, line = running_module(), users_line()
    return (f" in {path}" if path else "") + (f" ({line})" if line else "")
