"""Write the reference of the Python interface, the lower part of ``docs/python.md``, from its docstrings.

``python scripts/python_reference.py`` rewrites the page; ``tests/docs/test_python_reference.py`` tests that it is
current.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shardwise

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
MARK = "<!-- What follows is written by scripts/python_reference.py. -->\n"
LEADING = ("distribute", "Trainer", "Checkpoints", "Plan")  # of the names in shardwise.__all__; the others follow
BESIDE = (
    "shardwise.nn.MoE",
    "shardwise.parallel.data.data_parallel", "shardwise.parallel.pipeline.pipeline",
    "shardwise.parallel.tensor.tensor_parallel", "shardwise.train.distribute.DistributedModel",
    "shardwise.train.distribute.Optimizer", "shardwise.runtime.batch.StepResult",
    "shardwise.core.data_options.DataOptions",
    "shardwise.core.pipeline_options.PipelineOptions", "shardwise.core.tensor_options.TensorOptions",
    "shardwise.core.numeric_options.NumericOptions", "shardwise.core.memory_options.MemoryOptions",
    "shardwise.core.errors.ConfigError",
)  # fmt: skip
"""What the others take and return, by the module that it is imported from."""
LONGEST = 88  # columns of a signature on one line
SHORT = 24  # characters of a default; a longer one is not spelt out


def reference() -> str:
    """Return the reference as Markdown."""
    names = [*LEADING, *(name for name in shardwise.__all__ if name not in LEADING)]
    parts = [entry(name, getattr(shardwise, name), "shardwise") for name in names]
    for path in BESIDE:
        module, _, name = path.rpartition(".")
        parts.append(entry(name, getattr(importlib.import_module(module), name), module))
    return "\n".join(parts)


def entry(name: str, thing: Any, module: str) -> str:
    """Return the section of a function or class, with the public methods and properties of a class."""
    plain = inspect.isclass(thing) and issubclass(thing, Exception)
    shown = "" if plain else textwrap.indent(signature(name, thing), "    ") + "\n\n"
    lines = [f"## `{name}`\n", f"`from {module} import {name}`\n", f"{shown}{markdown(inspect.getdoc(thing) or '')}\n"]
    lines += [f"- {text}" for text in members(thing)] if inspect.isclass(thing) else []
    return "\n".join(lines).rstrip() + "\n"


def members(thing: type) -> Iterator[str]:
    """Yield each public method and property that is documented, in the order of the source."""
    for name, value in vars(thing).items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        text = inspect.getdoc(function)
        if name.startswith("_") or not text or not (callable(function) or _is_property(function)):
            continue
        head = f".{name}" if _is_property(function) else f".{name}{_arguments(function)}"
        yield f"`{head}`: " + textwrap.indent(markdown(text), "  ").lstrip()


def _is_property(value: Any) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def signature(name: str, thing: Callable[..., Any]) -> str:
    """Return the signature, on as many lines as it needs."""
    given = _arguments(thing)
    if len(name + given) <= LONGEST:
        return name + given
    rows = textwrap.wrap(given[1:].rpartition(")")[0], LONGEST - 4, break_long_words=False, break_on_hyphens=False)
    return f"{name}(\n    " + "\n    ".join(rows) + "\n)"


def _arguments(thing: Callable[..., Any]) -> str:
    """Return the arguments with their defaults in parentheses; what types they have is told by the text."""
    parameters = []
    for one in inspect.signature(thing).parameters.values():
        if one.name == "self":
            continue
        short = one.default is inspect.Parameter.empty or len(repr(one.default)) <= SHORT
        bare = one.replace(annotation=inspect.Parameter.empty)
        parameters.append(bare if short else bare.replace(default=_Long()))
    return str(inspect.Signature(parameters))


class _Long:
    """Stands for a default that is too long to be shown."""

    def __repr__(self) -> str:
        return "..."


def markdown(text: str) -> str:
    """Return a docstring as Markdown: its roles and literals as code, its arguments as a list."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`")).replace("::\n", ":\n")
    head, found, arguments = text.partition("\nArgs:\n")
    if not found:
        return text
    listed, _, rest = arguments.partition("\n\n")
    items = re.sub(r"^    (\w+): ", r"- `\1`: ", listed, flags=re.MULTILINE)
    return f"{head}\n{re.sub(r'^ +', '  ', items, flags=re.MULTILINE)}\n\n{rest}".rstrip()


def page() -> str:
    """Return the page as it should be: what stands above the mark, and the reference."""
    head, found, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert found, f"{PAGE} has no line {MARK}"
    return f"{head}{MARK}\n{reference()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
