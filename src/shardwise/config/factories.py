"""Functions of the user, which a config names as ``path/to/file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.core.errors import ConfigError, describe, did_you_mean

from .toml import shown

Function = Callable[..., Any]
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_function(key: str, reference: str) -> Function:
    """Return the function that ``reference``, the value of ``key``, names.

    If there is none, :class:`ConfigError` says why, with the file and line if an import failed.
    """
    place, _, name = reference.rpartition(":")
    with blame(key, reference):
        module = _file_module(Path(place)) if place.endswith(".py") else _module(place)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        what = f"{place} has no {name}" if found is None else f"{name} in {place} is of type {type(found).__name__}"
        legal = f"a function in {place}" + (f": {', '.join(functions)}" if functions else "")
        raise ConfigError(f"{key} = {shown(reference)}: {what}; legal: {legal}.{did_you_mean(name, functions)}")
    function: Function = found
    return function


def call(key: str, reference: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function that ``reference`` names and return its result; :class:`ConfigError` if either fails."""
    function = load_function(key, reference)
    _check_arguments(key, reference, function, arguments)
    with blame(key, reference):
        return function(**arguments)


def _check_arguments(key: str, reference: str, function: Function, arguments: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for arguments that the function does not take, and for those that it lacks."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function of C tells no signature
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = [name for name, one in signature.parameters.items() if one.kind in NAMED]
        unknown = next((name for name in arguments if name not in known), "")
        legal = f"{key.partition('.')[0]}.arguments with " + (", ".join(known) if known else "nothing")
        name = reference.rpartition(":")[2]
        hint = f".{did_you_mean(unknown, known)}"
        raise ConfigError.on(f"{key} = {shown(reference)}", f"{name}: {error}", legal, hint) from None


@contextmanager
def blame(key: str, value: Any) -> Iterator[None]:
    """Turn an exception inside this context into a :class:`ConfigError` on ``key``, with the file and line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key} = {shown(value)}: {describe(error)}") from error


def _file_module(path: Path) -> ModuleType:
    """Import the module of a Python file once; its imports search its folder too, as a script's do."""
    name = f"shardwise_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    _search(path.parent)
    sys.modules[name] = module  # before it runs, as import does: dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(name: str) -> ModuleType:
    """Import a module by its name; it may be in the current folder."""
    _search(Path.cwd())
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
