"""Read a config of another library from a file: what it is shows in its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.core.errors import ConfigError, check_choice

from . import accelerate, deepspeed, fsdp
from .answers import Context, Line, answered, flat, settings_of

Source = Literal["accelerate", "deepspeed", "fsdp"]
SIGNS: Mapping[Source, tuple[str, ...]] = {
    "accelerate": ("compute_environment", "distributed_type", "num_processes", "num_machines"),
    "deepspeed": ("zero_optimization", deepspeed.MICRO, deepspeed.WHOLE, "bf16", "fp16", "optimizer"),
    "fsdp": ("fsdp", "fsdp_config", "sharding_strategy", "reshard_after_forward", "fsdp_sharding_strategy",
             "fsdp_version", "transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap"),
}  # fmt: skip
FILE = "deepspeed_config.deepspeed_config_file"


@dataclass(frozen=True)
class Converted:
    """The lines of a file with their answers, and the sections of a shardwise config that they make."""

    source: Source
    lines: list[Line]
    sections: dict[str, dict[str, Any]]


def convert(path: Path, source: str | None = None, ranks: int | None = None) -> Converted:
    """Read ``path`` and answer each of its keys; ``ranks`` where batch sizes depend on their number.

    Raises :class:`ConfigError` for a file that cannot be read, that has a value which the other library does not take,
    or whose lines contradict each other."""
    values = _read(path)
    if source is not None:
        check_choice("--from", source, get_args(Source))
    kind: Source = source or _source(path, values)  # type: ignore[assignment]
    lines = _lines(kind, values, ranks)
    if kind == "accelerate" and (name := dict(flat(values)).get(FILE)):
        other = path.parent / name
        if not other.is_file():
            raise ConfigError.on(FILE, f"there is no file {other}", "a path from the folder of this file")
        known = lines_ranks(values) if ranks is None else ranks
        lines += _lines("deepspeed", _read(other), known)
    return Converted(kind, lines, settings_of(lines))


def lines_ranks(values: Mapping[str, Any]) -> int | None:
    """Return the number of processes in an Accelerate config."""
    found = values.get("num_processes")
    return found if isinstance(found, int) and found > 0 else None


def _lines(kind: Source, values: Mapping[str, Any], ranks: int | None) -> list[Line]:
    hosts = values.get("num_machines")
    flat_values = dict(flat(values))
    if kind == "fsdp":
        named = {_bare(name): value for name, value in flat_values.items()}
        return answered(named, fsdp.RULES, Context(named, ranks))
    if kind == "deepspeed":
        return answered(flat_values, deepspeed.RULES, Context(flat_values, ranks))
    context = Context(flat_values, ranks or lines_ranks(values), hosts if isinstance(hosts, int) else None)
    return answered(flat_values, accelerate.RULES, context)


def _bare(name: str) -> str:
    """Return an argument of FSDP without the names that others put before it."""
    name = name.removeprefix("fsdp_config.")
    return name if name == "fsdp" else name.removeprefix("fsdp_")


def _source(path: Path, values: Mapping[str, Any]) -> Source:
    for kind, signs in SIGNS.items():
        if any(sign in values for sign in signs):
            return kind
    legal = "a YAML of `accelerate config`, a DeepSpeed JSON, FSDP arguments; --from says which it is"
    raise ConfigError.on(str(path), f"its keys are none of a known config: {', '.join(map(str, values))}", legal)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError.on(str(path), f"cannot be read: {error.strerror}", "a file of JSON or YAML") from error
    except UnicodeDecodeError as error:
        raise ConfigError.on(str(path), "is not text", "a file of JSON or YAML") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise ConfigError.on(
            str(path), f"is not JSON or YAML: {' '.join(str(error).split())}", "JSON or YAML"
        ) from None
    if not isinstance(found, dict) or not found:
        raise ConfigError.on(str(path), "has no keys", "a table of keys and values")
    return {str(name): value for name, value in found.items()}


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("YAML needs PyYAML; legal: `pip install pyyaml`, or the same as .json") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
