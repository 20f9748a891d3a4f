"""The callbacks of a config: functions and classes of the user that look on while a run trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.core.errors import ConfigError

from .config import Config
from .factories import blame, load_function
from .toml import shown

KEY = "train.callbacks"


def check_callbacks(config: Config, hooks: tuple[str, ...]) -> None:
    """Raise :class:`ConfigError` where a callback cannot be imported, or is not what can be called; none is made."""
    for reference in config.train.callbacks:
        found = load_function(KEY, reference)
        if not inspect.isclass(found):
            _check_call(reference, found, "the function")
            continue
        own = [hook for hook in hooks if hasattr(found, hook)]
        if not own:
            wrong = f"the class {found.__name__} has none of the hooks"
            raise ConfigError.on(f"{KEY} = [{shown(reference)}]", wrong, f"any of {', '.join(hooks)}")
        for hook in own:
            _check_call(reference, getattr(found, hook), f"{found.__name__}.{hook}", given=(None, {}))


def build_callbacks(config: Config) -> list[tuple[str, Any]]:
    """Return the callbacks with their names: an instance of each class, and each function as the hook ``on_step``."""
    found = []
    for reference in config.train.callbacks:
        made: Callable[..., Any] = load_function(KEY, reference)
        with blame(KEY, reference):
            one: Any = made() if inspect.isclass(made) else SimpleNamespace(on_step=made)
        place, _, name = reference.rpartition(":")
        found.append((f"callback {Path(place).name}:{name}", one))
    return found


def _check_call(reference: str, call: Callable[..., Any], what: str, given: tuple[Any, ...] = ({},)) -> None:
    """Raise :class:`ConfigError` unless ``call`` takes one argument (beside ``self``)."""
    try:
        inspect.signature(call).bind(*given)
    except TypeError as error:
        legal = "one parameter, a dict (of a function: the metrics of a step)"
        raise ConfigError.on(f"{KEY} = [{shown(reference)}]", f"{what}: {error}", legal) from None
    except ValueError:
        return  # a function of C tells no signature
